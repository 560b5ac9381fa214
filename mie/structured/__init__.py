"""Grammars of texts, as constraints on tokens.

It knows llguidance, grammars and the spelling of tokens. It must not know requests or arrays.
"""
