"""What the ops between a candidate's tensors should have made of the tensors that it really had."""
