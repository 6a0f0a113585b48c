"""Log-probabilities that an inference engine reported, beside those of the checkpoint: the gap and its causes."""
