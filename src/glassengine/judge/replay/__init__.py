"""What an op should have made of the inputs that the candidate really had."""
