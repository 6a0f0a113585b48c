"""A model in the interpreter of another environment: another torch, another transformers."""
