"""Implementations under judgement, and how their tensors correspond to those of the baseline."""
