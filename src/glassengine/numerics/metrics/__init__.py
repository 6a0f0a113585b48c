"""Measures the distance between two tensors."""
