"""What runs in vLLM's interpreter, where this package is not: it needs torch alone. The folder goes on PYTHONPATH."""
