"""Names of PyTorch/XLA over lazy tensors: a script of theirs runs when its imports of `torch_xla` name this package.

    from glassengine.compat import torch_xla
    import glassengine.compat.torch_xla.core.xla_model as xm
    import glassengine.compat.torch_xla.debug.metrics as met

The device is `glassengine.lazy.device()`, so its type is "lazy" and not "xla". There is one device in each process;
what needs several processes, SPMD or a compiler of XLA is refused when it is called, with what to use in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glassengine.deferred import deferred
from glassengine.extensions import plugin

if TYPE_CHECKING:
    from glassengine.compat.torch_xla import amp, core, debug, distributed, experimental, runtime, test, utils
    from glassengine.compat.torch_xla.torch_xla import (
        compile,
        device,
        device_count,
        devices,
        launch,
        manual_seed,
        real_devices,
        step,
        sync,
    )

__all__ = [
    "amp",
    "compile",
    "core",
    "debug",
    "device",
    "device_count",
    "devices",
    "distributed",
    "experimental",
    "launch",
    "manual_seed",
    "real_devices",
    "runtime",
    "step",
    "sync",
    "test",
    "utils",
]

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
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
