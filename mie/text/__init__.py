"""Text to token ids and back: the tokenizer, incremental text, stop strings, chat templates.

This room knows tokenizers and jinja2. It never heard of an array, a model or an engine.
"""
