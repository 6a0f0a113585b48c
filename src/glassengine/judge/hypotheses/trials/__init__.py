"""What is tried: a piece of the baseline with one mistake in it, against what the candidate made."""
