"""What a back-end is: availability, capabilities, build, load; devices, and the order of inputs and outputs."""
