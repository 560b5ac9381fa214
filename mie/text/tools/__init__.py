"""Calls of tools and reasoning in a model's text: read in pieces, or forced by a grammar.

It handles text, JSON and schemas. It imports no tokens, no requests and no HTTP.
"""
