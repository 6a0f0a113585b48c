"""Records every operation of a call, with inputs and results, and finds the first that differs between two calls."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.diagnose.invariance.ways import PartMapping, largest_difference, matching_rows, same_bits
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named

Origin = Literal["operation", "state", "memory", "argument", "indices", "region"]
_OF_LIBRARIES = ("/torch/", "/glassengine/", "/transformers/utils/", "/transformers/modeling_layers.py")


@dataclass(eq=False)
class TracedOp:
    """One operation of a call.

    Attributes:
        call: Number of the call.
        module: Path of the module that runs it.
        name: Base name of the operation, or class of a module.
        source: File and line that call it.
        occurrence: Number among the operations of the same name, line and module of the call.
        func: The operation; None for a module.
        leaves: Arguments, flat; tensors are copies of what they held.
        spec: How they are nested.
        inputs: Tensors among the leaves.
        origins: Of each input where it comes from: "" computed or given, "state", "memory", "weight".
        outputs: Copies of the results.
    """

    call: int
    module: str
    name: str
    source: str | None
    occurrence: int
    func: Any = None
    leaves: Sequence[Any] = ()
    spec: Any = None
    inputs: Sequence[Tensor] = ()
    origins: Sequence[str] = ()
    outputs: Sequence[Tensor] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is paired by, within a call."""
        return self.module, self.name, self.source, self.occurrence

    @property
    def settings(self) -> dict[str, float | str]:
        """Arguments that are numbers or words, not sizes or axes, by name."""
        if self.func is None:
            return {}
        args, kwargs = pytree.tree_unflatten(list(self.leaves), self.spec)
        known = self.func._schema.arguments
        given = {one.name: one.default_value for one in known if one.has_default_value()}
        given |= {one.name: value for one, value in zip(known, args, strict=False)} | kwargs
        return {name: value for name, value in given.items() if isinstance(value, float | str)}

    def rerun(self, leaves: Sequence[Any] | None = None) -> list[Tensor]:
        """Run it once more by itself on its inputs, or on others, and return its results."""
        given = [one.clone() if isinstance(one, Tensor) else one for one in (leaves or self.leaves)]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        with torch.no_grad():
            result = self.func(*args, **kwargs)
        return [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]


class CallTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while it is on.

    Args:
        root: The model; its parameters are not copied.
        modules_only: Record modules alone: compiled code shows no operations.

    Attributes:
        ops: What was recorded.
    """

    def __init__(self, root: nn.Module, *, modules_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[TracedOp] = []
        self._modules_only, self._call = modules_only, 0
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._weights = {one.untyped_storage().data_ptr() for one in root.parameters()}
        self._open: list[str] = []
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._known: dict[int, str] = {}
        self._alive: list[Tensor] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[CallTrace]:
        """Record what runs meanwhile."""
        entered: list[tuple[nn.Module, list[Tensor]]] = []

        def before(module: nn.Module, args: Any) -> None:
            self._open.append(self._paths.get(id(module), ""))
            if self._modules_only:
                entered.append((module, [one.clone() for one in tensors_of(args)]))

        def after(module: nn.Module, args: Any, result: Any) -> None:
            path = self._open.pop() if self._open else ""
            if self._modules_only and entered:
                _, inputs = entered.pop()
                outputs = [one.clone() for one in tensors_of(result)]
                self._add(path, type(module).__name__, line_of(module), inputs=inputs, outputs=outputs)

        inside = contextlib.nullcontext() if self._modules_only else self
        with register_module_forward_pre_hook(before), register_module_forward_hook(after), inside:
            yield self

    def begin(self, call: int, given: Any) -> None:
        """Begin a call whose inputs are `given`."""
        self._call = call
        self._counts.clear()
        for one in tensors_of(given):
            self._keep(one, "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view or func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        origins = [self._origin(one) for one in leaves if isinstance(one, Tensor)]
        kept = [self._copied(one) if isinstance(one, Tensor) else one for one in leaves]
        result = func(*args, **(kwargs or {}))
        outputs = tensors_of(result) or [one for one in leaves[:1] if schema.is_mutable and isinstance(one, Tensor)]
        name = schema.name.partition("::")[2]
        for one in outputs:
            if not schema.is_mutable:
                self._keep(one, "memory" if named(name).is_unwritten else "")
        if not named(name).is_unwritten:
            inputs = [one for one in kept if isinstance(one, Tensor)]
            found = self._add(self._open[-1] if self._open else "", name, _line(), inputs=inputs, outputs=[])
            found.func, found.leaves, found.spec, found.origins = func, kept, spec, origins
            found.outputs = [one.detach().clone() for one in outputs]
        return result

    def _add(self, module: str, name: str, source: str | None, **tensors: Any) -> TracedOp:
        key = (module, name, source)
        found = TracedOp(self._call, module, name, source, self._counts[key], **tensors)
        self._counts[key] += 1
        self.ops.append(found)
        return found

    def _keep(self, tensor: Tensor, origin: str) -> None:
        self._known[tensor.untyped_storage().data_ptr()] = origin
        self._alive.append(tensor)  # or another tensor would get its place

    def _origin(self, tensor: Tensor) -> str:
        place = tensor.untyped_storage().data_ptr()
        return "weight" if place in self._weights else self._known.get(place, "state")

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage().data_ptr() in self._weights else tensor.detach().clone()


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)]


def _line() -> str | None:
    """Return file and line of the first caller that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        path = frame.f_code.co_filename
        if not any(part in path for part in _OF_LIBRARIES) and not path.startswith("<"):
            return f"{_short(path)}:{line}"
    return None


def line_of(module: nn.Module) -> str | None:
    """Return file and line of the forward of a module."""
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else f"{_short(code.co_filename)}:{code.co_firstlineno}"


def _short(path: str) -> str:
    """Return a path from the working directory or the folder of packages on."""
    if "/site-packages/" in path:
        return path.rpartition("/site-packages/")[2]
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


@dataclass(frozen=True)
class CallDifference:
    """Where two calls begin to differ.

    Attributes:
        kind: Where it comes from: an operation on equal inputs; state, memory or an argument that the operation reads;
            other indices or another mask; or a region of which no operation could be paired.
        ops: The operation on both sides.
        view: How its tensors are aligned.
        size: Largest difference.
        detail: In words.
    """

    kind: Origin
    ops: tuple[TracedOp, TracedOp]
    view: PartMapping
    size: float | None
    detail: str | None = None


Calls = Sequence[tuple[int, PartMapping]]
"""For each call of the second side the call of the first one that it belongs to, and how their tensors are aligned."""
Tensors = Literal["inputs", "outputs"]
IsRounding = Callable[[Tensor, Tensor, Sequence[Tensor]], bool]
"""Two tensors, and what the first one is in runs that round otherwise -> whether rounding explains their difference."""


class Search:
    """Finds the first operation that differs though all its inputs are the same.

    Args:
        left: What the first side ran.
        right: What the second side ran.
        calls: Which calls belong together.
        noisy: The first side in runs that round otherwise; empty to compare bit for bit.
        is_rounding: Decides by them.
    """

    def __init__(
        self,
        left: Sequence[TracedOp],
        right: Sequence[TracedOp],
        calls: Calls,
        noisy: Sequence[Sequence[TracedOp]] = (),
        is_rounding: IsRounding | None = None,
    ) -> None:
        self._left, self._right, self._calls = left, right, calls
        self._by_key = _by_key(left)
        self._noisy = [_by_key(run) for run in noisy]
        self._is_rounding = is_rounding

    def first(self) -> CallDifference | None:
        """Return where the second side begins to differ; None where nothing that can be paired does."""
        indices: list[CallDifference] = []
        for op in self._right:
            call, view = self._calls[op.call]
            other = self._by_key.get((call, *op.key))
            found = None if other is None else self._differs(other, op, view)
            if found is None:
                continue
            if not any(one.is_floating_point() for one in op.outputs):
                indices.append(found)
                continue
            if found.kind == "indices":
                return replace(found, detail=_made_by(indices, op))
            if found.kind == "region" and (alone := self._unpaired(found)) is not None:
                detail = f"{alone.name} at {alone.source} runs on one side alone"
                return CallDifference("region", (alone, alone), view, found.size, detail)
            return found
        return None

    def _unpaired(self, found: CallDifference) -> TracedOp | None:
        """Return the first operation before a pair that runs on one side alone and computes numbers."""
        a, b = found.ops
        ours = set(self._by_key)
        theirs = {(self._calls[op.call][0], *op.key) for op in self._right}
        for op in self._left[: self._left.index(a)]:
            if op.call == a.call and (op.call, *op.key) not in theirs and _computes(op):
                return op
        for op in self._right[: self._right.index(b)]:
            call = self._calls[op.call][0]
            if call == a.call and (call, *op.key) not in ours and _computes(op):
                return op
        return None

    def _compared(self, a: TracedOp, b: TracedOp, view: PartMapping, which: Tensors) -> list[bool | None]:
        """Return for each tensor whether both sides have the same; None where they cannot be aligned."""
        found: list[bool | None] = []
        for i, (x, y) in enumerate(zip(getattr(a, which), getattr(b, which), strict=False)):
            pair = view.aligned(x, y)
            same = None if pair is None else same_bits(*pair)
            if same is False and pair is not None and self._noisy and self._is_rounding is not None:
                same = self._is_rounding(*pair, self._runs(a, view, which, i, y))
            found.append(same)
        return found

    def _runs(self, a: TracedOp, view: PartMapping, which: Tensors, i: int, y: Tensor) -> list[Tensor]:
        """Return what a tensor of the first side is in runs that round otherwise."""
        runs = []
        for run in self._noisy:
            op = run.get((a.call, *a.key))
            if op is not None and i < len(getattr(op, which)):
                pair = view.aligned(getattr(op, which)[i], y)
                runs += [pair[0]] if pair is not None else []
        return runs

    def _differs(self, a: TracedOp, b: TracedOp, view: PartMapping) -> CallDifference | None:
        """Return how one operation differs; None where its results are the same or cannot be aligned."""
        outputs = self._compared(a, b, view, "outputs")
        inputs = self._compared(a, b, view, "inputs")
        if not self._noisy and (False in inputs or None in (*inputs, *outputs)):
            moved = _by_rows(a, b)
            if moved is not None:
                return (
                    CallDifference("operation", (a, b), view, moved, "rows in an order of their own") if moved else None
                )
            if all(_moved(x, y) for x, y in zip(a.outputs, b.outputs, strict=False)):
                return None
        if False not in outputs:
            return None
        aligned = (view.aligned(x, y) for x, y in zip(a.outputs, b.outputs, strict=False))
        sizes = [largest_difference(*pair) for pair in aligned if pair is not None]
        size = max((one for one in sizes if one is not None), default=None)
        is_drawn = named(a.name.rstrip("_")).is_random  # whatever lay there is overwritten
        different = [] if is_drawn else [i for i, same in enumerate(inputs) if same is False]
        origins = [a.origins[i] for i in different if i < len(a.origins)]
        if not different and (a.inputs or b.inputs):
            other = _first_other(a.settings, b.settings)
            if other is not None:
                return CallDifference("argument", (a, b), view, size, other)
            has_others = len(a.inputs) != len(b.inputs) or None in inputs
            detail = "it gets a mask, or other shapes" if has_others else None
            return CallDifference("operation", (a, b), view, size, detail)
        if "memory" in origins:
            is_written = bool(a.func is not None and a.func._schema.is_mutable)
            return None if is_written else CallDifference("memory", (a, b), view, size)
        if "state" in origins:
            return CallDifference("state", (a, b), view, size)
        if a.func is not None and all(not a.inputs[i].is_floating_point() for i in different):
            return CallDifference("indices", (a, b), view, size)
        return CallDifference("region", (a, b), view, size)


def _by_key(ops: Sequence[TracedOp]) -> dict[tuple[Any, ...], TracedOp]:
    return {(op.call, *op.key): op for op in ops}


def _computes(op: TracedOp) -> bool:
    is_known = named(op.name.rstrip("_")).rounding not in (Rounding.MOVES, Rounding.CASTS, Rounding.EXACT)
    return is_known and any(one.is_floating_point() for one in op.outputs)


def _moved(x: Tensor, y: Tensor) -> bool:
    """Whether a result is there on the other side, too, in another order."""
    if x.dim() == y.dim() == 1:
        few, many = sorted((x, y), key=len)
        return bool(torch.isin(few, many).all())
    return matching_rows(x, y) is not None


def _made_by(indices: Sequence[CallDifference], op: TracedOp) -> str | None:
    """Return which operation made the indices or the mask that an operation reads, and that differ."""
    for one in reversed(indices):
        made = one.ops[1].outputs
        if any(same_bits(made[0], read) for read in op.inputs if read.shape == made[0].shape):
            return f"it reads what {one.ops[1].name} makes ({one.ops[1].source})"
    return None


def _first_other(a: Mapping[str, float | str], b: Mapping[str, float | str]) -> str | None:
    # An argument that one side does not have, as of another overload, is no cause.
    name = next((name for name in a if name in b and a[name] != b[name]), None)
    return None if name is None else f"its argument {name!r} is {a[name]!r} on one side and {b[name]!r} on the other"


def _by_rows(a: TracedOp, b: TracedOp) -> float | None:
    """Return the largest difference of results whose rows are found by those of the inputs; None where they are not."""
    if len(a.inputs) != len(b.inputs) or len(a.outputs) != 1 or len(b.outputs) != 1:
        return None
    rows = None
    for x, y in zip(a.inputs, b.inputs, strict=True):
        if (x.shape == y.shape and same_bits(x, y)) or not x.is_floating_point():
            continue
        if rows is None:
            rows = matching_rows(x, y)
            if rows is None:
                return None
            continue
        if x.dim() == 0 or len(x) <= int(rows[0].max()) or len(y) <= int(rows[1].max()):
            return None
        if not same_bits(x[rows[0]], y[rows[1]]):
            return None
    x, y = a.outputs[0], b.outputs[0]
    if rows is None or x.dim() == 0 or x.shape[1:] != y.shape[1:] or not x.is_floating_point():
        return None
    if len(x) != len(a.inputs[_which(a, rows[0])]) or len(x) <= int(rows[0].max()) or len(y) <= int(rows[1].max()):
        return None
    return 0.0 if same_bits(x[rows[0]], y[rows[1]]) else largest_difference(x[rows[0]], y[rows[1]])


def _which(op: TracedOp, rows: Tensor) -> int:
    """Return the first matrix of an operation that has so many rows."""
    return next(i for i, one in enumerate(op.inputs) if one.dim() == 2 and len(one) > int(rows.max()))
