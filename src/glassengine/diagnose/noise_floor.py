"""The noise floor of a recorded run: the same model on the same inputs again, every op rounded otherwise.

The model runs as it is; after each op a dispatch mode adds to the result what a second implementation's rounding would
make of it (`numerics.noise`, twice: both sides round), and attention is written out instead of fused. What a tensor
differs by from the recorded one is a sample of its noise; of several runs the largest counts, slice by slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.blocks.arrays import values_of
from glassengine.capture.intake import Writer
from glassengine.compare.matching.sources import OpenedSource, Padding
from glassengine.errors import GlassError
from glassengine.numerics.float64 import retarget
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.mask_values import sentinel
from glassengine.numerics.noise import disturbed, noisy, rounds
from glassengine.numerics.slices import slices
from glassengine.ops.traits import traits_of
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.noise_floor import Key, StoredFloor, write_noise_floor
from glassengine.recording.reader import Recording

NUM_RUNS = 2

HOW = f"{NUM_RUNS} runs with every op rounded otherwise and attention written out"


def measure_noise_floor(path: Path, run_again: Callable[[Writer], None]) -> None:
    """Measure the noise floor of a finished recording and keep it there; `then` of `record_target`.

    Costs two runs of the model, each several times slower than usual, and no memory beyond one tensor's.

    Args:
        path: Directory of the recording.
        run_again: Runs the model as it was run for the recording, on the same tokens, and delivers what the recording
            has to the writer that it is given.

    Raises:
        GlassError: The runs did not make the recorded tensors again.
    """
    recording = Recording.open(path)
    floors: dict[Key, StoredFloor] = {}
    for seed in range(NUM_RUNS):
        collector = Collector(recording, floors)
        with otherwise(seed) as mode:
            collector.mode = mode
            run_again(collector)
    if not floors:
        raise GlassError("the noise floor was not measured: the second run made none of the recorded tensors")
    write_noise_floor(path, floors, HOW)


@contextmanager
def otherwise(seed: int) -> Iterator[RoundedOtherwise]:
    """While it lasts, every op of this thread rounds otherwise, and attention is written out."""
    with RoundedOtherwise(seed) as mode, sdpa_kernel(SDPBackend.MATH):
        yield mode


class RoundedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every op that rounds rounds otherwise: one legal sample, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave ops alone for a while."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # ops on what such a tensor consists of (a part of a distributed one) come here
        if self._is_paused:
            return func(*args, **given)
        before = self._kept(func, args, given)
        result = func(*args, **given)
        if before is None:
            return result
        with torch.no_grad():
            return pytree.tree_map(functools.partial(self._disturbed, func, before), result)

    def _kept(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the float64 arguments of an op that rounds (a copy: the op may write into them), else None."""
        node = _node(func)
        if traits_of(node).casts:
            # `rounds` reads the dtypes of a cast from a traced node; here they are those of the tensors.
            return ((), {}) if _narrows(args, kwargs.get("dtype")) else None
        if traits_of(node).is_random or not rounds(node):  # what is drawn is not rounded
            return None
        wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(retarget, (args, kwargs))
        if func._schema.is_mutable:
            return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, wide)  # type: ignore[no-any-return]
        return wide

    def _disturbed(self, func: Any, before: tuple[tuple[Any, ...], dict[str, Any]], value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        args, kwargs = before
        wide = value.double()
        u, tiny = unit_roundoff(value.dtype), smallest_precise(value.dtype)
        for _ in range(2):
            try:
                wide = noisy(_node(func), wide, args, kwargs, u, self._generator, tiny=tiny)
            except (RuntimeError, IndexError, TypeError):
                # An op whose sums cannot be worked out (it has no float64 kernel, say) rounds its result all the same.
                wide = disturbed(wide, u, self._generator, tiny)
        found = wide.to(value.dtype)
        is_number = value.abs() < sentinel(value.dtype)
        found = torch.where(is_number & found.isfinite(), found, value)
        return value.copy_(found) if func._schema.is_mutable else found


@functools.cache
def _node(func: Any) -> Node:
    """Return a node that calls `func`: ops are classed by their nodes."""
    return Graph().call_function(func)


def _narrows(args: tuple[Any, ...], target: Any) -> bool:
    source = args[0].dtype if args and isinstance(args[0], Tensor) else None
    if not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in (source, target)):
        return False
    assert source is not None
    return torch.finfo(source).bits > torch.finfo(target).bits


class Collector:
    """Takes the place of a writer and compares with what was recorded.

    Args:
        recording: What was recorded.
        floors: By tensor; each gets the largest that is seen.

    Attributes:
        mode: What is on while the model runs.
    """

    def __init__(self, recording: Recording, floors: dict[Key, StoredFloor]) -> None:
        self.mode = RoundedOtherwise(0)
        self._recording = recording
        self._padding = Padding(OpenedSource(recording))
        # All are of one process, whichever of several that is.
        self._entries = {(entry.site, entry.step): entry for entry in recording.entries}
        self._floors = floors

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Compare one tensor, or the recorded rank's shard of one, with the recorded one."""
        entry = self._entries.get((site, step))
        if entry is None or entry.shape != tuple(tensor.shape):
            return
        with self.mode.paused(), torch.no_grad():
            ours, theirs = self._recording.tensor(entry), tensor.detach()
            found_valid = self._padding.valid(entry, entry.shape)
            if found_valid is not None:
                valid = torch.from_numpy(found_valid)
                ours, theirs = (torch.where(valid, side, torch.zeros((), dtype=side.dtype)) for side in (ours, theirs))
            found = slices(values_of(ours), values_of(theirs))
        key = entry.place
        known = self._floors.get(key)
        whole, parts = found.error, found.errors
        if known is not None:
            whole = max(whole, known.whole)
            parts = tuple(np.maximum(a, b) for a, b in zip(parts, known.slices, strict=True))
        self._floors[key] = StoredFloor(whole, found.power, parts)

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Every tensor is looked at."""
        return False

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Tensors without values have no floor."""
        return True

    def leave_out(self, item: LeftOut) -> None:
        """Likewise."""

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Likewise."""

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Nothing is kept from step to step."""
