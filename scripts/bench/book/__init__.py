"""The book of benchmarks: the gain of each mechanism, in chapters with results as plain data."""
