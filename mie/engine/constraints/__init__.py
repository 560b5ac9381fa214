"""Restrict the tokens of a row: constraints of structured outputs, and bad words."""
