"""The names of `torch_xla` itself: its device, steps, compiled regions, and the start of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from glassengine.compat.torch_xla.runtime import local_ordinal
from glassengine.errors import UsageError
from glassengine.executable.steps import mark_step
from glassengine.plugins.lazy.running import run_pending
from glassengine.plugins.lazy.settings import forbid_reading, num_compiled, settings
from glassengine.plugins.lazy.surface import device as lazy_device


def device(index: int | None = None) -> torch.device:
    """Return the lazy device.

    Args:
        index: None or 0; there is one.

    Raises:
        UsageError: Another device is asked for.
    """
    if index not in (None, 0):
        raise UsageError("there is one lazy device in each process", got=f"device {index}", expected="None or 0")
    return lazy_device()


def devices() -> list[torch.device]:
    """Return the lazy device in a list."""
    return [device()]


def real_devices() -> list[str]:
    """Return what graphs run on, as PyTorch/XLA spells it."""
    return ["CPU:0"]


def device_count() -> int:
    """Return 1."""
    return 1


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step: run all that is pending as one graph, then the closures of the step.

    Args:
        wait: Return only when asynchronous closures have run, too.
        reset_scope: Without effect: names of scopes are not kept.
    """
    mark_step(wait)


def step() -> contextlib.AbstractContextManager[None]:
    """Return a context whose operations are one step: what is pending before runs before, and it runs at the end."""
    return _region(None, whole=False, most=None)


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """Return a function whose calls are steps, each one graph; without a function, a context or decorator that does so.

    Args:
        f: The function or module.
        full_graph: Raise an error where a value is needed before the end, which would cut the graph.
        name: As errors call it; None for the name of the function.
        max_different_graphs: How many graphs may be compiled for it; None for any number.

    Raises:
        UsageError: In a call: a value is needed with `full_graph`, or there are more graphs than that.
    """
    named = name or getattr(f, "__name__", None) or (type(f).__name__ if f is not None else "a compiled region")
    compiled = [0]

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        with _region(named, whole=bool(full_graph), most=max_different_graphs, compiled=compiled):
            yield

    return region() if f is None else region()(f)


@contextlib.contextmanager
def _region(name: str | None, *, whole: bool, most: int | None, compiled: list[int] | None = None) -> Iterator[None]:
    run_pending()
    number = num_compiled()
    with eager_mode_context(False):
        with forbid_reading(f"{name} (full_graph=True)") if whole else contextlib.nullcontext():
            yield
        mark_step()
    if most is not None and compiled is not None:
        compiled[0] += num_compiled() - number
        if compiled[0] > most:
            raise UsageError(
                f"{name} was compiled too often",
                got=f"{compiled[0]} graphs",
                expected=f"at most {most}: max_different_graphs",
                hint="glass.metrics.compilations() says what changed",
            )


def eager_mode(enable: bool) -> None:
    """Compile and run each operation by itself from now on, or no longer."""
    settings.each_op = enable


def is_eager_mode() -> bool:
    """Return whether each operation runs by itself."""
    return settings.each_op


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Let each operation run by itself, or not, while a block runs."""
    before, settings.each_op = settings.each_op, enable
    try:
        yield
    finally:
        settings.each_op = before


def manual_seed(seed: int, device: Any = None) -> None:
    """Set the seed of random numbers, which are drawn from torch's own generator."""
    torch.manual_seed(seed)


def launch(
    fn: Callable[..., Any], args: Sequence[Any] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> Any:
    """Call `fn(index, *args)` in this process, where index is its rank on this machine: 0 without torchrun.

    Args:
        fn: What every process runs.
        args: Its arguments behind the rank.
        start_method: Without effect: no process is started.
        debug_single_process: Without effect likewise.
    """
    return fn(local_ordinal(), *args)


def autocast(
    device: str | torch.device, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
) -> torch.autocast:
    """Return `torch.autocast` for a device; that of the lazy device is that of the device on which graphs run."""
    lazy_device()
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
