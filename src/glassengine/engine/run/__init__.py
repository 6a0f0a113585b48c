"""Running an engine: sessions, generation, recording."""
