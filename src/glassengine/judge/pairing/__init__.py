"""Which ops of two programs belong together, by the values that they compute."""
