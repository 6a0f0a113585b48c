"""Writing a recording: directory, shards, and the thread that brings them to disk."""
