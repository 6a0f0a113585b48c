"""Code for the other interpreter, where this package is missing: it needs torch and numpy, and Python 3.9."""
