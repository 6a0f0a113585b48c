"""Public names of `plugins.serving.ggml`."""
