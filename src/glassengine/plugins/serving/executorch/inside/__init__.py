"""Code for ExecuTorch's interpreter, where this package is missing: it needs ExecuTorch and torch alone."""
