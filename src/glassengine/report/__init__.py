"""Draws results: on a terminal."""
