"""Replays the ops between a candidate's tensors on the tensors that it really had."""
