"""Define the forms in which weights are packed and quantised."""
