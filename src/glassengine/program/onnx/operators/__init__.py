"""The operators of ONNX as calls of torch, by kind."""
