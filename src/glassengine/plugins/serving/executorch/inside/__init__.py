"""What runs in ExecuTorch's interpreter, where this package is not: it needs ExecuTorch and torch alone."""
