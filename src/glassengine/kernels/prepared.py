"""A reference prepared on inputs, arrays of other libraries among them: float64 results, noise and bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from glassengine.judge.exclusions.ties import is_comparison, ranking, tied_choices
from glassengine.kernels.leaves import MANY_RUNS, Expectation
from glassengine.kernels.trace import (
    DOUBLE,
    Choices,
    OnlyOp,
    ReferenceTrace,
    TracedRun,
    copied,
    is_near,
    tensors_of,
    traced,
    wide,
)
from glassengine.numerics.float64 import Accumulation

_LARGE = 1 << 22
"""Elements of inputs and results from which on rows are judged in parts."""
_PART = 1 << 18
"""Elements of a part, so that float64 stays within the caches."""
_KEPT = 31 << 20
"""Bytes: below the most that glibc learns from, above all tensors of a part."""
_NATIVE = 16.0
"""Errors of the reference in its own dtype, over those of a noise run, from which on rows depend on each other."""
_FEW = 64
_TURNED = 8.0
"""Times the noise, from which on other values are those of another choice."""


class KernelPart:
    """Some rows, or all: the reference on their inputs, in float64 and with noise."""

    def __init__(
        self, trace: ReferenceTrace, inputs: Sequence[Any], native: list[Tensor], seed: int, widened: Any = None
    ) -> None:
        self.trace, self.inputs, self.native = trace, inputs, [settled(t) for t in native]
        self._inputs = inputs if widened is None else widened
        self._generator = torch.Generator().manual_seed(seed)
        self._runs: list[list[Tensor]] = []

    @cached_property
    def _traced_run(self) -> TracedRun:
        given, found = self.trace.checked
        self.trace.checked = (None, None)
        return found if found is not None and given is self._inputs else self.trace.run(self._inputs)

    @property
    def exact(self) -> list[Tensor]:
        """The results in float64, then the inputs after the call."""
        return self._traced_run.tensors

    def only(self, which: int) -> OnlyOp | None:
        """Return the only op that rounds, if it makes this tensor."""
        only, exact = self._traced_run.only, self.exact[which]
        if only is None or not exact.is_floating_point() or only.value.shape != exact.shape:
            return None
        # What follows may have moved the numbers: a flip, a transposition of a square.
        return only if only.value is exact or torch.equal(only.value, exact) else None

    def runs(self, which: int, number: int) -> list[Tensor]:
        """Return one tensor of so many noise runs, which choose as float64 does."""
        while len(self._runs) < number:
            forced = self._choices if self.trace.choices else None
            self._runs.append(self.trace.run(self.inputs, self._generator, forced=forced).tensors)
        found = [run[which] for run in self._runs[:number]]
        if not self.trace.is_double or not self.exact[which].is_floating_point():
            return found
        # To first order noise of float64 is that of float32, and so much smaller.
        return [self.exact[which] + (run - self.exact[which]) * DOUBLE for run in found]

    @cached_property
    def _choices(self) -> Choices:
        return self.trace.run(self.inputs).chosen

    @cached_property
    def _other_results(self) -> list[list[Tensor]]:
        """Float64 results with choices that rounding makes: of the reference in its own dtype and of noise runs."""
        made = [self.trace.run(self.inputs, native=True).chosen]
        made += [self.trace.run(self.inputs, self._generator).chosen for _ in range(MANY_RUNS)]
        found = []
        for choices in made:
            chosen = {node: places.cpu() for node, places in choices.items()}
            if not all(torch.equal(chosen[node], self._choices[node]) for node in self._choices):
                found.append(self.trace.run(self.inputs, forced=chosen).tensors)
        return found

    def unsettled(self, which: int) -> Tensor | None:
        """Return the elements of a floating tensor that depend on a choice that rounding may turn; None if none."""
        exact = self.exact[which]
        if not self.trace.choices or not exact.is_floating_point():
            return None
        noise = torch.stack([(run - exact).nan_to_num(0.0, 0.0, 0.0).square() for run in self.runs(which, 2)]).mean(0)
        limit = _TURNED * (noise + noise.mean()).sqrt()
        turned = [(other[which] - exact).abs().nan_to_num(0.0) > limit for other in self._other_results]
        found = torch.stack(turned).any(0) if turned else None
        return found if found is not None and bool(found.any()) else None

    def expectation(self, which: int) -> Expectation:
        """Return what tensor number `which` should be."""
        exact, native = self.exact[which], self.native[which]
        if not native.is_floating_point() and not native.is_complex():
            exact = exact.to(native.dtype)
        runs, tied, unsettled = partial(self.runs, which), partial(self._tied, which), partial(self.unsettled, which)
        chooses, u_ops = bool(self.trace.choices), self.trace.coarsest(native.dtype)
        return Expectation(exact, native, runs, self.only(which), tied, chooses, unsettled, u_ops)

    def _tied(self, which: int, candidate: Tensor) -> Tensor | None:
        """Return where another choice is legal; None if the tensor is not a choice."""
        node, place = self.trace.source(which), None
        while isinstance(node, Node) and node.op == "call_function" and not (ranking(node) or is_comparison(node)):
            if getattr(node.target, "__name__", "") == "getitem":
                place = node.args[1]
            elif not str(node.target).startswith(("aten.to", "aten._to_copy", "aten.detach", "aten.clone")):
                return None
            node = node.args[0]
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if is_comparison(node) and node not in self.trace.choices:
            return None  # of values that no rounding has changed
        value, args = self.trace.run(self.inputs, watched=node).seen
        exact = value if place is None else value[place]
        if exact.shape != candidate.shape:
            return None
        u_in = 0.0
        if node in self.trace.choices:
            (values, *_), (moved, *_) = args, self.trace.run(self.inputs, self._generator, watched=node).seen[1]
            size = values.abs().clamp(min=float(values.abs().mean()) * 2.0**-10)
            u_in = max(2.0**-24, float(((moved - values).abs() / size).nan_to_num(0.0, 0.0, 0.0).amax()))
        return tied_choices(node, args, exact, candidate, u_in)


@dataclass(frozen=True)
class KernelRows:
    """How the rows of all results go with rows of inputs."""

    axis: int
    sliced: tuple[int, ...]
    size: int
    step: int

    def starts(self) -> list[int]:
        """Return the first row of each part; the last part overlaps, so that all have one shape."""
        return [min(start, self.size - self.step) for start in range(0, self.size, self.step)]

    def of(self, tensor: Tensor, start: int) -> Tensor:
        """Return some rows."""
        return tensor.narrow(self.axis, start, self.step)


class Prepared:
    """A reference on inputs; `backward` if it differentiates."""

    def __init__(
        self, reference: Callable[..., Any], inputs: Sequence[Any], how: Accumulation, seed: int, backward: bool = False
    ) -> None:
        self.reference, self.inputs, self._seed = reference, list(inputs), seed
        self._traced = partial(traced, reference, accumulation=how, backward=backward)
        self._noise: dict[int, float] = {}
        own = copied(self.inputs)
        with torch.no_grad():
            self.result = reference(*own)
        self.num_results = len(tensors_of(self.result))
        before, after = tensors_of(self.inputs), tensors_of(own)
        self.writes = [not same(a, b) for a, b in zip(before, after, strict=True)]
        # What it does not write to is compared with what was given.
        kept = [new if is_new else old for old, new, is_new in zip(before, after, self.writes, strict=True)]
        self.native = [*tensors_of(self.result), *kept]
        stores = [{t.untyped_storage().data_ptr() for t in tensors_of(tree)} for tree in (self.result, own)]
        self._unread = None if any(self.writes) or stores[0] & stores[1] else own
        self.rows = None if any(self.writes) else self._rows()

    def copies(self, args: Sequence[Any]) -> Any:
        """Return copies of arguments: of the own inputs those that the reference has left as they were, once."""
        is_own = all(a is b for a, b in zip(pytree.tree_leaves(args), pytree.tree_leaves(self.inputs), strict=False))
        found, self._unread = self._unread if is_own else None, None
        return copied(args) if found is None else found

    def parts(self) -> Iterator[tuple[KernelPart, int]]:
        """Yield each part with its first row."""
        if self.rows is None:
            yield self.whole, 0
            return
        # The C library keeps freed memory for what is smaller than the largest block that it has taken back.
        torch.empty(_KEPT, dtype=torch.uint8)
        for start in self.rows.starts():
            yield self._part(start), start

    def of(self, tensor: Tensor, start: int) -> Tensor:
        """Return the rows of a part; all where there is one part."""
        return tensor if self.rows is None else self.rows.of(tensor, start)

    def worst(self, tensor: Tensor, which: int) -> tuple[KernelPart, int]:
        """Return the part in which a tensor differs most from that of the reference, with its first row."""
        if self.rows is None:
            return self.whole, 0
        native = settled(self.native[which])
        gaps = [_power((self.of(tensor, s) - self.of(native, s)).double()) for s in self.rows.starts()]
        start = self.rows.starts()[gaps.index(max(gaps))]
        return self._part(start), start

    @cached_property
    def whole(self) -> KernelPart:
        """All rows."""
        return KernelPart(self._traced(self.inputs), self.inputs, self.native, self._seed)

    @cached_property
    def trace(self) -> ReferenceTrace:
        """The reference as it is traced: on all inputs, or on those of a part."""
        return self.whole.trace if self.rows is None else self._traced(self._sliced(self.rows, 0))

    def _part(self, start: int) -> KernelPart:
        assert self.rows is not None
        results = [self.rows.of(t, start) for t in self.native[: self.num_results]]
        inputs, widened = self._sliced(self.rows, start), self._sliced(self.rows, start, self._wide)
        return KernelPart(self.trace, inputs, [*results, *tensors_of(inputs)], self._seed + start, widened)

    def _sliced(self, rows: KernelRows, start: int, others: list[Any] | None = None) -> list[Any]:
        """Return the inputs of a part; of what all parts read `others` in its place."""
        leaves, spec = pytree.tree_flatten(self.inputs)
        for i, leaf in enumerate(leaves):
            leaves[i] = rows.of(leaf, start) if i in rows.sliced else leaf if others is None else others[i]
        found: list[Any] = pytree.tree_unflatten(leaves, spec)
        return found

    @cached_property
    def _wide(self) -> list[Any]:
        """What all parts read, in float64."""
        sliced = () if self.rows is None else self.rows.sliced
        return [leaf if i in sliced else wide(leaf) for i, leaf in enumerate(pytree.tree_leaves(self.inputs))]

    def _rows(self) -> KernelRows | None:
        """Return how large results go with rows of the inputs; None for small ones, and where they do not."""
        results = self.native[: self.num_results]
        leaves = pytree.tree_leaves(self.inputs)
        total = sum(t.numel() for t in self.native)
        if total < _LARGE or not results or any(not t.is_floating_point() for t in results):
            return None
        for axis in (0, 1):
            sizes = {t.shape[axis] if t.dim() > axis else 0 for t in results}
            size = sizes.pop()
            if sizes or size < 8:
                continue
            tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            places = [i for i, leaf in tensors if leaf.dim() > axis and leaf.shape[axis] == size]
            for sliced in _choices(places):
                # What all parts read is read less often.
                others = sum(leaf.numel() for i, leaf in tensors if i not in sliced)
                part = _PART * (4 if others > _PART else 1)
                step = max(1, min(size // 4, math.ceil(size * part / total)))
                rows = KernelRows(axis, sliced, size, step)
                if self._fits(rows):
                    return rows
        return None

    @torch.no_grad()
    def _fits(self, rows: KernelRows) -> bool:
        """Whether the reference on some rows gives these rows of its results."""
        for start in (0, rows.size // 2):
            try:
                found = tensors_of(self.reference(*copied(self._sliced(rows, start), whole=False)))
            except (RuntimeError, IndexError, ValueError):
                return False
            if not all(is_near(one, rows.of(native, start)) for one, native in zip(found, self.native, strict=False)):
                return False
        return True

    def depends_on_rows(self, part: KernelPart) -> bool:
        """Whether the reference gave other rows than it gives on these rows alone: they depend on others after all."""
        for which in range(self.num_results):
            # Some columns are as good as all, in every part.
            few = (..., slice(None, None, max(1, part.exact[which].shape[-1] // _FEW)))
            exact, native = part.exact[which][few], part.native[which][few]
            power = _power(exact)
            error = _power(native.double() - exact)
            if error > self._noise.get(which, -1.0) * power:
                noise = _NATIVE**2 * _power(part.runs(which, 1)[0][few] - exact)
                self._noise[which] = max(self._noise.get(which, 0.0), noise / power if power else 0.0)
                if error > noise:
                    return True
        return False


def _power(tensor: Tensor) -> float:
    mean = float(tensor.square().mean())
    return mean if math.isfinite(mean) else float(tensor.nan_to_num(0.0, 0.0, 0.0).square().mean())


def _choices(places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield subsets of inputs, all of them first: at most 15."""
    few = places[:4]
    yield tuple(places)
    for number in range(len(few), 0, -1):
        yield from (subset for subset in itertools.combinations(few, number) if subset != tuple(places))


def settled(tensor: Tensor) -> Tensor:
    """Return a tensor on the processor, and without a conjugation or sign that is still to be applied."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN for NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or one.element_size() == 1:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def as_tensors(tree: Any) -> Any:
    """Return a tree with its arrays as tensors; what is no array as it is."""
    return pytree.tree_map(_as_tensor, tree)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy":
        return _of_numpy(value)
    return from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _of_numpy(value: Any) -> Any:
    is_usual = value.dtype.isbuiltin == 1 and value.dtype.isnative
    if value.ndim and is_usual and value.flags.writeable and min(value.strides) >= 0:
        return torch.from_numpy(value)
    # Torch takes no strides below 0 (its DLPack ends the process), and no numbers that others have added to NumPy.
    own = np.array(value, value.dtype.newbyteorder("=") if not value.dtype.isnative else value.dtype, order="C")
    added = getattr(torch, own.dtype.name, None) if own.dtype.isbuiltin == 2 else None
    return torch.from_numpy(own) if added is None else torch.from_numpy(own.view(f"i{own.itemsize}")).view(added)
