"""Stored programs: what may be read of them without running code."""
