"""The levels of a check: which sides run for which kind of candidate, and how their tensors are paired."""
