"""Building an engine: from a model to a directory."""
