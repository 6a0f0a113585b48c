"""`torch_xla.experimental`: the eager mode."""

from glassengine.compat.torch_xla.torch_xla import eager_mode as eager_mode
from glassengine.compat.torch_xla.torch_xla import eager_mode_context as eager_mode_context
from glassengine.compat.torch_xla.torch_xla import is_eager_mode as is_eager_mode
