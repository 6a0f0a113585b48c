"""Record one model: within the user's own code, from the command line, or as transformers' debugger does."""
