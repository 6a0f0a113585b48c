"""vLLM, run by the interpreter that it is installed for: what records it there, and what reads that here."""
