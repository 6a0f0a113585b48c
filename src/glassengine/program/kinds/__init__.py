"""Kinds of programs by how they generate, and the inputs that each is exported with."""
