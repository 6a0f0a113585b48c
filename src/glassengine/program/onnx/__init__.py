"""ONNX files as programs: read, translated for judging, run as they are, built as they are."""
