"""The paged allocator: which block holds which tokens, and who holds the block.

This room knows integers (block ids, token ids). No arrays, no model, no sequence.
"""
