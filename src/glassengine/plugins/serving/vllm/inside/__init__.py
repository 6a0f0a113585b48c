"""Code for vLLM's interpreter, where this package is missing: it needs torch alone. The folder goes on PYTHONPATH."""
