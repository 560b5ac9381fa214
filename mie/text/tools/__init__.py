"""Calls of tools and reasoning in a model's text: read in pieces, or forced by a grammar.

It knows text, JSON and schemas. It must not know tokens, requests or HTTP.
"""
