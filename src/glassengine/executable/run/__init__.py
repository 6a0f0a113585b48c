"""Executables: the only place where a compiled graph is compiled or run, and who may observe it."""
