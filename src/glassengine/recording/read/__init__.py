"""Reading recordings, and everything else that holds named tensors."""
