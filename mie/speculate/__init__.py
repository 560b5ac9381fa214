"""Guess the next tokens of sequences from tokens that were seen before.

This room knows tokens, and how often guesses were right. It computes no logits, and its results
decide the speed of an engine and never a token. It has no arrays and reads no clock.
"""
