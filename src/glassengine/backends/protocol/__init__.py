"""The interface of back-ends: availability, capabilities, build, load; devices, order of inputs, attention."""
