"""Where graphs come from, other than engines: `torch.compile`, op-by-op debugging."""
