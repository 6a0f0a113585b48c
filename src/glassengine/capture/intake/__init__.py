"""From a tensor of a running model to the recording: its parts, its gradients, the number of its step."""
