"""Whatever must run a model to obtain a prediction: the ladder and its parts."""

from glassengine.diagnose.check_model import check

__all__ = ["check"]
