"""Lazy tensors: operations are recorded, and run as one graph when a value is needed."""
