"""The benchmark of a GPU."""
