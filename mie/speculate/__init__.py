"""Guess the next tokens of sequences from earlier tokens.

This room handles tokens, and counts of right guesses. It computes no logits, and its results
decide the speed of an engine and never a token. It has no arrays and reads no clock.
"""
