"""One batch of sequences on a loaded engine: inputs checked, caches, steps, what is looked at."""
