"""Foreign files that hold tensors, one module per format."""
