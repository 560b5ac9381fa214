"""Parts of the manager, for layers that keep other things than the blocks of all tokens."""
