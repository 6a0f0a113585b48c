"""Pieces and relations of graphs: cut out, run by themselves, and paired by name."""
