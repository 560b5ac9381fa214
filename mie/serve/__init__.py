"""The HTTP edge: OpenAI's interface on an `AsyncLLM`.

This room handles text and HTTP, never arrays. The packages that it needs come with the extra
``serve``, so only ``mie serve`` imports it.
"""
