"""Inputs that nobody gave: what a model does with each of them says which values can show a mistake."""
