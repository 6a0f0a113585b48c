"""A program: one graph, the names of its inputs, outputs and sites."""
