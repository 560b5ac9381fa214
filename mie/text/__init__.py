"""Convert between text and token ids: tokenizer, detokenizer, stop strings, chat templates.

This room uses tokenizers and jinja2. It imports no arrays, models or engines.
"""
