"""`torch_xla.utils`: `utils`, imported as `xu`."""

from __future__ import annotations

from glassengine.compat.torch_xla.utils import utils as utils
