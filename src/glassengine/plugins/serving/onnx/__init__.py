"""ONNX decoders as candidates: their files by the names of a checkpoint, and every value of their steps."""
