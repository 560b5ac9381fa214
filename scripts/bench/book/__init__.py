"""The book of benchmarks: the gain of each mechanism, in chapters whose results are plain data."""
