"""Snapshots: one execution of one executable, written and read."""
