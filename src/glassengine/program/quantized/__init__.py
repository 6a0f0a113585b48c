"""Quantized checkpoints by format: what their files hold, without the packages that made them."""
