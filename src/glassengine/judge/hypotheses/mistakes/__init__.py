"""The mistakes that are tried, by kind, and their order."""
