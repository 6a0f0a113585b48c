"""Judges one side against another: arithmetic only, no model is run."""

from glassengine.compare.compare import compare

__all__ = ["compare"]
