"""From tensors to a verdict: scores, origins, evidence, and the conclusion."""
