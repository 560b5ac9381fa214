"""Modules of train_tiny_model.py: the grammar, the stories and the chat template."""
