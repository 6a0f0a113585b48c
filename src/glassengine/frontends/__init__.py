"""Sources of graphs other than engines: `torch.compile`, op-by-op debugging."""
