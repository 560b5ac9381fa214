"""The mutants that mutate.py applies."""
