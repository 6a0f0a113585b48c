"""An ONNX file as it is stored: names, types, tensors and grids, and the file run as it is written."""
