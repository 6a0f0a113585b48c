"""Writes results: places, files that appear whole or not at all, and their checksums."""
