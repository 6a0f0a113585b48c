"""The memory between a running model and the thread that writes."""
