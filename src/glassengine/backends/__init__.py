"""Back-ends: what builds a program into an executable, and the registry of them."""
