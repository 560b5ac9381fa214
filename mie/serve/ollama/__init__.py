"""Ollama's interface: its requests, its answers line by line, and its lists of models."""
