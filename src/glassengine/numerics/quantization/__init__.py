"""Measures the effect of quantization on weights and activations."""
