"""Connect many callers to one engine: prepare their requests and distribute their outputs.

This room knows callers and text. It knows no arrays and no blocks.
"""
