"""Manage the memory of layers that do not keep every token: sliding windows, recurrent states."""
