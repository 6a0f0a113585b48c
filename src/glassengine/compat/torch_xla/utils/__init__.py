"""`torch_xla.utils`: `utils`, imported as `xu`."""

from glassengine.compat.torch_xla.utils import utils as utils
