"""The captured graph that an executable is compiled from."""
