"""Loading what a user calls MODEL: checkpoints, adapters, stored programs, ONNX files."""
