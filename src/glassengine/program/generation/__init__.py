"""How a model generates: one object for each kind, which knows what is recognized, exported and decoded."""
