"""Names of PyTorch/XLA over lazy tensors: a script of theirs runs when its imports of `torch_xla` name this package.

    from glassengine.compat import torch_xla
    import glassengine.compat.torch_xla.core.xla_model as xm
    import glassengine.compat.torch_xla.debug.metrics as met

The device is `glassengine.lazy.device()`, so its type is "lazy" and not "xla". There is one device in each process;
what needs several processes, SPMD or a compiler of XLA is refused when it is called, with what to use in its place.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred
from glassengine.extensions import plugin

if TYPE_CHECKING:
    from glassengine.compat.torch_xla import amp as amp
    from glassengine.compat.torch_xla import core as core
    from glassengine.compat.torch_xla import debug as debug
    from glassengine.compat.torch_xla import distributed as distributed
    from glassengine.compat.torch_xla import experimental as experimental
    from glassengine.compat.torch_xla import runtime as runtime
    from glassengine.compat.torch_xla import test as test
    from glassengine.compat.torch_xla import utils as utils
    from glassengine.compat.torch_xla.torch_xla import compile as compile
    from glassengine.compat.torch_xla.torch_xla import device as device
    from glassengine.compat.torch_xla.torch_xla import device_count as device_count
    from glassengine.compat.torch_xla.torch_xla import devices as devices
    from glassengine.compat.torch_xla.torch_xla import launch as launch
    from glassengine.compat.torch_xla.torch_xla import manual_seed as manual_seed
    from glassengine.compat.torch_xla.torch_xla import real_devices as real_devices
    from glassengine.compat.torch_xla.torch_xla import step as step
    from glassengine.compat.torch_xla.torch_xla import sync as sync

plugin("lazy")  # one that is missing is said here, for every module below
_HERE = "glassengine.compat.torch_xla"
_FUNCTIONS = f"{_HERE}.torch_xla"
_PUBLIC = {
    "amp": f"{_HERE}.amp",
    "compile": _FUNCTIONS,
    "core": f"{_HERE}.core",
    "debug": f"{_HERE}.debug",
    "device": _FUNCTIONS,
    "device_count": _FUNCTIONS,
    "devices": _FUNCTIONS,
    "distributed": f"{_HERE}.distributed",
    "experimental": f"{_HERE}.experimental",
    "launch": _FUNCTIONS,
    "manual_seed": _FUNCTIONS,
    "real_devices": _FUNCTIONS,
    "runtime": f"{_HERE}.runtime",
    "step": _FUNCTIONS,
    "sync": _FUNCTIONS,
    "test": f"{_HERE}.test",
    "utils": f"{_HERE}.utils",
}
__all__ = list(_PUBLIC)
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
