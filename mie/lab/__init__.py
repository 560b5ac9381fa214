"""Experiment on the engine: simulate it, compare backends, measure loads, and draw traces.

This room knows engines, loads and event logs. It knows neither HTTP nor a terminal.
"""
