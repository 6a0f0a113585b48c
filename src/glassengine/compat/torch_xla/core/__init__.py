"""`torch_xla.core`: `xla_model`, which scripts import as `xm`."""

from glassengine.compat.torch_xla.core import xla_model as xla_model
