"""Runs of several processes: the parts of a tensor put together, and what goes wrong between processes."""
