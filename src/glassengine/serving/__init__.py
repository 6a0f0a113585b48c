"""What a serving engine is as a candidate, and how one is opened and recorded; the engines are a plugin."""
