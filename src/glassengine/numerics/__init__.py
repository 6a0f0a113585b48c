"""The arithmetic of a judgement: rounding, bounds and distances of one tensor or one op."""
