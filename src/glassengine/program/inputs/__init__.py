"""Generated inputs: what a model does with each of them decides which values can show a mistake."""
