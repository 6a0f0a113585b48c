"""`torch_xla.test`: `test_utils`, with which the examples of PyTorch/XLA print their progress."""

from glassengine.compat.torch_xla.test import test_utils as test_utils
