"""`torch_xla.debug`: `metrics`, imported as `met`, and `profiler`, imported as `xp`."""

from glassengine.compat.torch_xla.debug import metrics as metrics
from glassengine.compat.torch_xla.debug import profiler as profiler
