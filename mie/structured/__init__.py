"""Grammars of texts, as constraints on tokens.

It knows llguidance, grammars, the spelling of tokens, and the process that compiles grammars first.
It must not know requests or arrays.
"""
