"""Counters, times, steps and compilations of this process."""
