"""Small tools of every room: arithmetic, short representations, refusals of names, and statistics.

It knows nothing but the errors.
"""
