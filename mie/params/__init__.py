"""Define what a request may ask for, and check it.

This room knows settings and plain values. It knows no model, no scheduler and no text.
"""
