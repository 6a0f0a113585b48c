"""Compares the series of two watched runs."""
