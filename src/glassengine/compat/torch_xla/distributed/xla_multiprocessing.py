"""`torch_xla.distributed.xla_multiprocessing`, imported as `xmp`: the start of a run of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from glassengine.compat.torch_xla.torch_xla import launch
from glassengine.errors import UsageError

R = TypeVar("R")


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call `fn(index, *args)` in this process, where index is its rank on this machine: 0 without torchrun.

    Args:
        fn: What every process runs.
        args: Its arguments behind the rank.
        nprocs: None or 1.
        join: True: it returns when `fn` does.
        daemon: Without effect, as `start_method`: no process is started.
        start_method: Without effect.

    Raises:
        UsageError: Several processes are asked for, or not to wait.
    """
    if nprocs not in (None, 1) or not join:
        raise UsageError(
            "lazy tensors are in one process",
            got=f"nprocs={nprocs}, join={join}",
            expected="nprocs=1 or None",
            hint="torchrun --nproc-per-node N script.py",
        )
    return launch(fn, args)


class MpModelWrapper:
    """A model that every process takes from the one that made it; here it is moved, in place.

    Args:
        model: On the CPU.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """Return the model on the lazy device."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one process after the other: in this one."""

    def run(self, fn: Callable[[], R]) -> R:
        """Return what `fn` returns."""
        return fn()
