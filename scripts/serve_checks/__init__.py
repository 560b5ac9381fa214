"""Checks of a running server: a storm of rude clients, a day of load, other people's clients."""
