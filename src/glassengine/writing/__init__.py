"""Where results are written, files that appear whole or not at all, and their checksums."""
