"""Code of the user that is called, traced and observed on the way to a program."""
