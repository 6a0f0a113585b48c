"""Engines of one model side by side."""
