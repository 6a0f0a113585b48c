"""Engines of several ranks at work: what one rank does in a step, and the processes that are started for all."""
