"""The interface of back-ends: availability, capabilities, build, load; devices, and the order of inputs and outputs."""
