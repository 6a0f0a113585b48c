"""llama.cpp: GGUF files, and every tensor of ggml's graph."""
