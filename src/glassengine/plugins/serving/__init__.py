"""Serving engines as candidates: what they load and run, and which of their tensors is which of the program's."""
