"""What quantization does to a weight."""
