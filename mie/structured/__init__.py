"""Grammars of texts, as constraints on tokens.

It uses llguidance, grammars, the spelling of tokens, and the process that compiles grammars first.
It imports no requests and no arrays.
"""
