"""The interface of serving engines as candidates, their opening and recording; the engines are a plugin."""
