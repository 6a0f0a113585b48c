"""How far one tensor is from another."""
