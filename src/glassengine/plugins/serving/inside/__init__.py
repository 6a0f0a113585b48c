"""Code for interpreters of engines, where this package is missing. The folder goes on PYTHONPATH."""
