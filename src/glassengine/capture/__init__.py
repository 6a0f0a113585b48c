"""From a running model to a recording."""
