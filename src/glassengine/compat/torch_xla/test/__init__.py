"""`torch_xla.test`: `test_utils`, with which the examples of PyTorch/XLA print their progress."""

from __future__ import annotations

from glassengine.compat.torch_xla.test import test_utils as test_utils
