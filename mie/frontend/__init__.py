"""Connect many callers to one engine: prepare their requests and distribute their outputs.

This room handles callers and text. It imports no arrays and no blocks.
"""
