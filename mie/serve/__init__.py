"""The HTTP edge: OpenAI's interface on an `AsyncLLM`.

This room knows text and HTTP, never arrays. Its packages come with the extra ``serve``, so nothing
imports it but ``mie serve``, when it runs.
"""
