"""Training runs: where two of them part."""
