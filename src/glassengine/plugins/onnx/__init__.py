"""ONNX graphs, translated: as graphs of torch.fx that are judged op by op, and without their grids."""
