"""Watches a long run: a few numbers of every tensor in every step, and values of the steps that matter."""
