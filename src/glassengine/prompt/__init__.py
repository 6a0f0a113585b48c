"""Compares the way from text to token ids of two sides, without running a model."""
