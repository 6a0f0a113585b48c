"""`libneuronxla`: which executions PyTorch NeuronX takes a snapshot of.

    from glassengine.compat import libneuronxla

    old_callback = libneuronxla.register_hlo_snapshot_callback(callback)

The callback is asked before each execution, of lazy tensors, of `torch.compile(backend="glass")` and of engines, while
snapshots are taken: by `XLA_FLAGS`, or in `glassengine.snapshots.take`.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.snapshot.policy import register_hlo_snapshot_callback

__all__ = ["register_hlo_snapshot_callback"]

_PUBLIC = {"register_hlo_snapshot_callback": "glassengine.executable.snapshot.policy"}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
