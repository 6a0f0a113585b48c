"""Format of a recording on disk: names, records, frames, shards and statistics."""
