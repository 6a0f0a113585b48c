"""Pairs the tensors of two records: names, maps, layouts, and the elements that count."""
