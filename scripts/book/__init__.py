"""The book of benchmarks: what each mechanism gains, in chapters whose results are plain data."""
