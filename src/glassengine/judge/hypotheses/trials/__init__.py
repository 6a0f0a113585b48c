"""Trials: a piece of the baseline with one mistake in it, against the candidate's result."""
