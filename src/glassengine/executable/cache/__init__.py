"""The persistent cache of compiled graphs."""
