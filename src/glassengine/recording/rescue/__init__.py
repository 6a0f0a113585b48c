"""Steps that only the ring of a killed process has, written into its recording."""
