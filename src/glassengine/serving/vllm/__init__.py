"""Public names of `plugins.serving.vllm`."""
