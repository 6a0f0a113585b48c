"""ExecuTorch, run by the interpreter that it is installed for: a `.pte` file with its ETRecord."""
