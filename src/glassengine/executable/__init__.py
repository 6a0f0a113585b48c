"""The one place where graphs are compiled and run."""
