"""Define the forms in which weights and caches are packed and quantised."""
