"""A serving engine beside the checkpoint that it serves: its weights without running it, then its ops."""
