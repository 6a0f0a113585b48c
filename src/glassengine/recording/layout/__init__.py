"""What a recording is on disk: names, records, frames, shards and statistics."""
