"""Observe what runs: an eager module by hooks, a program node by node."""
