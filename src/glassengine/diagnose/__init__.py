"""Everything that runs a model to judge it: the ladder and its parts."""

from glassengine.diagnose.check_model import check

__all__ = ["check"]
