"""`torch_xla.amp`: autocast on the lazy device."""

from glassengine.compat.torch_xla.amp import syncfree as syncfree
from glassengine.compat.torch_xla.refusals import refusing
from glassengine.compat.torch_xla.torch_xla import autocast as autocast

__getattr__ = refusing(__name__, {"GradScaler": "autocast computes in bfloat16, which needs no scaled gradients"})
