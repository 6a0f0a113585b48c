"""Operators of ONNX by ATen ops and by definitions."""
