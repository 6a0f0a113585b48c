"""`torch_xla.core.xla_model`, imported as `xm`: the device, steps, ordinals, and what one process does with the others.

What PyTorch/XLA does among the replicas of a run does here what it does there in a run of one process, and is refused
where there are several.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import torch
from torch.utils import _pytree as pytree

from glassengine.compat.torch_xla.refusals import refusing, require_default
from glassengine.compat.torch_xla.runtime import (
    global_ordinal,
    is_distributed,
    local_ordinal,
    require_alone,
    world_size,
)
from glassengine.compat.torch_xla.torch_xla import device, real_devices, sync
from glassengine.errors import UsageError
from glassengine.executable.steps import add_step_closure as add_step_closure
from glassengine.executable.steps import is_master_ordinal
from glassengine.plugins.lazy.running import fetch, run_pending
from glassengine.plugins.lazy.settings import Reason
from glassengine.plugins.lazy.tensor import LazyTensor
from glassengine.writing import open_for_torch

T = TypeVar("T")

REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "sum", "mul", "and", "or", "min", "max"

_AMONG_PROCESSES = "torch.distributed has it, on tensors of the CPU: tensor.cpu()"
_RANDOM = "random numbers are drawn from torch's own generator: torch.get_rng_state() and torch.set_rng_state()"
_GRAPHS = "glass.lazy.text(tensor) and glass.lazy.graph(tensor) show what is pending"

__getattr__ = refusing(
    __name__,
    {
        **dict.fromkeys(("all_to_all", "collective_permute", "recv", "reduce_scatter", "send"), _AMONG_PROCESSES),
        **dict.fromkeys(("get_rng_state", "set_rng_state"), _RANDOM),
        **dict.fromkeys(("get_stablehlo", "get_stablehlo_bytecode"), _GRAPHS),
        "get_memory_info": "tensors of the lazy device are in the memory of this process",
        "set_replication": "one process has one device",
    },
)


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return the lazy device.

    Args:
        n: None or 0; there is one.
        devkind: None or "CPU".

    Raises:
        UsageError: Another one is asked for.
    """
    if devkind not in (None, "CPU"):
        raise UsageError("graphs run on the CPU", got=f"devkind={devkind!r}", expected="None or 'CPU'")
    return device(n)


def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """Return what graphs run on."""
    return real_devices() * len(devices or (0,))


def xla_device_hw(device: Any) -> str:
    """Return the kind of device on which graphs run."""
    return "CPU"


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """Return the lazy device, as text, in a list."""
    return [str(xla_device(None, devkind))][:max_devices]


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the lazy device."""
    return isinstance(tensor, LazyTensor)


def xrt_world_size(defval: int = 1) -> int:
    """Return how many processes there are."""
    return world_size()


def get_ordinal(defval: int = 0) -> int:
    """Return the rank of this process among all."""
    return global_ordinal()


def get_local_ordinal(defval: int = 0) -> int:
    """Return the rank of this process on its machine."""
    return local_ordinal()


def master_print(*args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """Print in the first process only; `local` in the first of each machine."""
    if is_master_ordinal(local):
        print(*args, file=fd or sys.stdout, flush=flush)


def do_on_ordinals(target: Callable[..., object], data: Sequence[Any] = (), ordinals: Sequence[int] = (0,)) -> None:
    """Call `target(*data)` in the processes of these ranks."""
    if global_ordinal() in ordinals:
        target(*data)


mark_step = sync


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Return when no graph runs any more: they run to their end before the call that runs them returns.

    What is pending stays pending, as in PyTorch/XLA.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Run one graph that computes these tensors."""
    fetch([tensor._lazy.get() for tensor in tensors if isinstance(tensor, LazyTensor)], Reason("read", "unlazy()"))


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Record a step of an optimizer and return what it returns.

    Args:
        optimizer: Over lazy parameters.
        barrier: End the step of the program afterwards, as `mark_step` does.
        optimizer_args: Of its `step`.
        groups: Refused: of replicas, where there are several processes.
        pin_layout: Without effect: it chooses how XLA lays out memory.

    Raises:
        UsageError: There are several processes, whose gradients would have to be added.
    """
    reduce_gradients(optimizer, groups, pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True) -> None:
    """Leave the gradients of the only process as they are; see `optimizer_step`."""
    require_alone("core.xla_model.reduce_gradients", "torch.distributed.all_reduce")
    require_default("reduce_gradients", {"groups": groups}, _AMONG_PROCESSES)


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True) -> Any:
    """Return what a reduction over the only process is: the tensor, times `scale`.

    Args:
        reduce_type: One of `REDUCE_SUM` and the others.
        inputs: A tensor, for which a new one is returned; or several, which are multiplied in place and returned.
        scale: Factor.
        groups: Refused, see `optimizer_step`.
        pin_layout: Without effect.
    """
    require_alone("core.xla_model.all_reduce", "torch.distributed.all_reduce")
    require_default("all_reduce", {"groups": groups}, _AMONG_PROCESSES)
    if isinstance(inputs, torch.Tensor):
        return inputs.clone() if scale == 1.0 else inputs * scale
    if scale != 1.0:
        for tensor in inputs:
            tensor.mul_(scale)
    return inputs


def all_gather(
    value: torch.Tensor, dim: int = 0, groups: Any = None, output: torch.Tensor | None = None, pin_layout: bool = True
) -> torch.Tensor:
    """Return what the only process has: a copy of its tensor, in `output` where one is given."""
    require_alone("core.xla_model.all_gather", "torch.distributed.all_gather")
    require_default("all_gather", {"groups": groups}, _AMONG_PROCESSES)
    return value.clone() if output is None else output.copy_(value)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Return the payloads of all processes: that of the only one. `torch.distributed.barrier` waits for several."""
    require_alone("core.xla_model.rendezvous", "torch.distributed.all_gather_object")
    return [payload]


def mesh_reduce(tag: str, data: T, reduce_fn: Callable[[list[T]], Any]) -> Any:
    """Return what `reduce_fn` makes of the values of all processes, each on the CPU: that of the only one."""
    require_alone("core.xla_model.mesh_reduce", "torch.distributed.all_gather_object")
    return reduce_fn([_on_cpu(data)])


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Run what makes the parameters; the only process has those of the first one."""
    require_alone("core.xla_model.broadcast_master_param", "torch.distributed.broadcast")
    run_pending()


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Any = None, pin_layout: bool = True
) -> None:
    """Leave the tensors of the only process as they are."""
    require_alone("core.xla_model.collective_broadcast", "torch.distributed.broadcast")


def send_cpu_data_to_device(data: Any, device: Any, input_sharding: Any = None) -> Any:
    """Return `data` with its tensors moved to the lazy device; containers, and batches that have `.to`, are kept.

    Raises:
        UsageError: A sharding is asked for.
    """
    require_default("send_cpu_data_to_device", {"input_sharding": input_sharding}, "there is one device")

    def move(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return pytree.tree_map(move, data)


def save(data: Any, file_or_path: str | Path | BinaryIO, master_only: bool = True, global_master: bool = False) -> None:
    """Write `data` by `torch.save`, with the values of its tensors: one graph computes those that are pending.

    What is loaded has tensors on the CPU. Where `torch.distributed` is set up, all processes wait for each other.

    Args:
        data: A state dict, for example.
        file_or_path: Where to.
        master_only: Only the first process writes.
        global_master: The first of all processes, not the first of each machine.

    Raises:
        OSError: It cannot be written.
    """
    written = _on_cpu(data)
    if not master_only or is_master_ordinal(not global_master):
        if isinstance(file_or_path, (str, Path)):
            with open_for_torch(Path(file_or_path)) as file:
                torch.save(written, file)
        else:
            torch.save(written, file_or_path)
    if is_distributed():
        torch.distributed.barrier()


def _on_cpu(data: Any) -> Any:
    unlazy([leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, LazyTensor)])
    return pytree.tree_map_only(LazyTensor, lambda tensor: tensor.detach().cpu(), data)


class RateTracker:
    """Counts what is done in a second, e.g. examples.

    Args:
        smooth_factor: Share of the rate before in a new one.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._share = 0.4 if smooth_factor is None else smooth_factor
        self._start = self._since = time.monotonic()
        self._total = self._new = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count some more."""
        self._new += count
        self._total += count

    def rate(self) -> float:
        """Return the rate since the last call, smoothed."""
        now = time.monotonic()
        if now > self._since:
            rate = self._new / (now - self._since)
            self._rate = rate if self._rate is None else (1 - self._share) * rate + self._share * self._rate
            self._new, self._since = 0.0, now
        return self._rate or 0.0

    def global_rate(self) -> float:
        """Return the rate since the tracker was made."""
        passed = time.monotonic() - self._start
        return self._total / passed if passed else 0.0
