"""The routes of llama.cpp's server: completions, properties, and the names of its options."""
