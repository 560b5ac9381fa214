"""Experiment on the engine: simulate it, compare backends, measure loads, and draw traces.

This room handles engines, loads and event logs. It uses neither HTTP nor a terminal.
"""
