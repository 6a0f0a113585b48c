"""Programs as ONNX graphs: what the back-ends share that run such a graph."""
