"""From a module to a program: export, functionalization, naming."""
