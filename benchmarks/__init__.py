"""Benchmarks: `python -m benchmarks [SUITE]`. Figures are printed and kept under results/, never asserted."""
