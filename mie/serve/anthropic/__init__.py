"""Anthropic's Messages API: its requests, answers, events and errors."""
