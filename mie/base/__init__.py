"""Offer small tools, and wrap the operating system: files, memory, processes, threads and logs.

This room uses only the standard library and the errors.
"""
