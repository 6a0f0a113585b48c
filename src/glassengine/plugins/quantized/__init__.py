"""Quantized candidates beside unquantized baselines."""
