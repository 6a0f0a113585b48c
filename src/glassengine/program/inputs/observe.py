"""Observes the use of each input in a forward: the table it indexes, comparisons, and its first reader.

The forward runs once, on values that no table refuses, while every op of torch is watched. A tensor that holds an
input's own values, moved, cast, or times one number plus another, stands for that input; the op that reads it as
something else is a use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from glassengine.ops.row import Rounding
from glassengine.ops.traits import named

_FEW = 8
"""Numbers of a scale for each channel."""
LARGE = 1e3
"""A factor that turns a one into something that hides a score."""


@dataclass
class Use:
    """What was seen of one input.

    Attributes:
        bound: Indices must be below it; None where nothing is indexed by the input.
        constants: Numbers that it is compared with.
        equal_to: Those of them that it may be equal to.
        ranges: Largest number of each tensor of several whole numbers, of no input, that it is compared with.
        is_mask: Whether it chooses: a condition, a factor of data, a term beside which a score is nothing.
        is_number: Whether it is calculated with, beside weights alone.
        is_summed: Whether it is summed up along an axis.
        convolved: Spatial dimensions and channels of the first convolution that reads it; None where none does.
        is_positive: Whether a logarithm or a root is taken of it.
        factor: Smallest factor that the forward begins with.
        offset: What is added after it.
        is_data: Whether a product with weights reads it.
        hides: Whether it is multiplied by so large a number that it hides what it is added to.
        is_read: Whether any op takes it.
    """

    bound: int | None = None
    constants: set[float] = field(default_factory=set)
    equal_to: set[float] = field(default_factory=set)
    ranges: list[int] = field(default_factory=list)
    is_mask: bool = False
    is_number: bool = False
    is_summed: bool = False
    convolved: tuple[int, int] | None = None
    is_positive: bool = False
    factor: float = 1.0
    offset: float = 0.0
    is_data: bool = False
    hides: bool = False
    is_read: bool = False


class _Held(NamedTuple):
    """A tensor with the values of an input, times `factor`, plus something between `low` and `high`."""

    name: str
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0


def uses_of(run: Callable[[], Any], inputs: Mapping[str, torch.Tensor]) -> dict[str, Use]:
    """Return what a forward does with its inputs.

    Args:
        run: Runs it, on the very tensors of `inputs`.
        inputs: By name.

    Raises:
        Exception: Any error of the forward.
    """
    watch = OpWatch(inputs)
    with torch.no_grad(), watch:
        run()
    return watch.uses


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the ops of a forward."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = {name: Use() for name in inputs}
        self._held = WeakIdKeyDictionary()
        self._influenced = WeakIdKeyDictionary()
        for name, tensor in inputs.items():
            self._held[tensor] = (_Held(name),)
            self._influenced[tensor] = True

    def depends(self, results: Any, arguments: Any) -> None:
        """Note that `results` depend on what `arguments` depend on; for ops that torch does not see."""
        if any(map(self._is_influenced, pytree.tree_leaves(arguments))):
            for leaf in pytree.tree_leaves(results):
                if isinstance(leaf, torch.Tensor):
                    self._influenced[leaf] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and take note."""
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            self._each(self._of(leaf), is_read=True)
        result = func(*args, **kwargs)
        # An unknown form of an op gives no information.
        with contextlib.suppress(TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            self._see(func._schema.name.split("::")[-1].rstrip("_"), args, kwargs, result)
        self.depends(result, (args, kwargs))
        return result

    def _is_influenced(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._influenced

    def _of(self, value: Any) -> tuple[_Held, ...]:
        if not isinstance(value, torch.Tensor) or value not in self._held:
            return ()
        held: tuple[_Held, ...] = self._held[value]
        return held

    def _see(self, op: str, args: Any, kwargs: Any, result: Any) -> None:
        self._see_table(op, args)
        if named(op).kind == "comparison":
            self._see_comparison(op, args)
        elif named(op).kind in ("term", "factor") and self._is_affine(args):
            self._hold(result, self._affine(op, args, kwargs))
            return
        self._see_choice(op, args, kwargs)
        self._see_reading(op, args)
        traits = named(op)
        if traits.holds:
            # What an index picks is data of the table.
            read = args[traits.table[0]] if traits.table else args[1:] if traits.condition == 0 else args
            self._hold(result, [one for leaf in pytree.tree_leaves(read) for one in self._of(leaf)])

    def _hold(self, result: Any, held: Any) -> None:
        unique = tuple(dict.fromkeys(held))[:4]
        if not unique:
            return
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._held[leaf] = unique
                if leaf.dtype is torch.bool:
                    self._each(unique, is_mask=True)

    def _each(self, held: tuple[_Held, ...], **facts: Any) -> None:
        for one in held:
            for key, value in facts.items():
                setattr(self.uses[one.name], key, value)

    def _see_table(self, op: str, args: Any) -> None:
        known = named(op).table
        if known is None:
            return
        source, where, axis = known
        table = args[source]
        if op in ("index", "index_put"):
            for number, index in enumerate(args[where]):
                if isinstance(index, torch.Tensor):
                    self._index(index, table.shape[number])
            return
        if op == "take":
            self._index(args[where], table.numel())
            return
        at = axis if axis is not None else args[1]
        self._index(args[where], table.shape[at] if table.dim() else 1)

    def _index(self, index: torch.Tensor, size: int) -> None:
        highest: dict[str, int] = {}
        for one in self._of(index):
            if index.dtype is torch.bool:
                self.uses[one.name].is_mask = True
                continue
            # Of several ways in which the index was made of the input, each may be the one that is taken.
            most = int((size - 1 - one.high) // one.factor) if one.factor > 0 else size - 1
            highest[one.name] = max(most, highest.get(one.name, 0))
        for name, most in highest.items():
            use = self.uses[name]
            use.bound = min(use.bound or most + 1, most + 1)

    def _see_comparison(self, op: str, args: Any) -> None:
        for own, other in ((args[0], args[1]), (args[1], args[0])):
            for one in self._of(own):
                number = _number(other)
                if number is not None and not self._is_influenced(other):
                    constant = (number - one.low) / (one.factor or 1.0)
                    self.uses[one.name].constants.add(constant)
                    if named(op).commutes:
                        self.uses[one.name].equal_to.add(constant)
                elif isinstance(other, torch.Tensor) and not self._is_influenced(other) and not _is_float(other):
                    self.uses[one.name].ranges.append(int(other.max()))

    def _is_affine(self, args: Any) -> bool:
        sides = [bool(self._of(arg)) for arg in args[:2]]
        if sum(sides) != 1:
            return False
        other = args[sides.index(False)]
        if _number(other) is not None:
            return True
        # Means and scales of channels are few; a table of many numbers is a weight.
        is_scale = isinstance(other, torch.Tensor) and (not _is_float(other) or other.numel() <= _FEW)
        return is_scale and not self._is_influenced(other)

    def _affine(self, op: str, args: Any, kwargs: Any) -> list[_Held]:
        first = bool(self._of(args[0]))
        other = args[1] if first else args[0]
        low, high = _limits(other)
        alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1.0))
        found = []
        for one in self._of(args[0] if first else args[1]):
            factor, least, most = one.factor, one.low, one.high
            if op == "add":
                least, most = least + alpha * low, most + alpha * high
            elif (op == "sub") == first and op in ("sub", "rsub"):
                least, most = least - alpha * high, most - alpha * low
            elif op in ("sub", "rsub"):
                factor, least, most = -factor, low - most, high - least
            elif op == "mul" or (op == "div" and first and low):
                scale = high if op == "mul" else 1.0 / low
                factor, least, most = factor * scale, least * scale, most * scale
            else:
                continue
            use = self.uses[one.name]
            if abs(factor) >= LARGE:
                use.is_mask = use.hides = True
            if 0 < abs(factor) < abs(use.factor):
                use.factor, use.offset = factor, least
            found.append(_Held(one.name, factor, min(least, most), max(least, most)))
        return found

    def _see_choice(self, op: str, args: Any, kwargs: Any) -> None:
        traits = named(op)
        if traits.condition is not None:
            self._each(self._of(args[traits.condition]), is_mask=True)
        if traits.kind == "logic" or op == "any":
            for arg in args[:2]:
                self._each(self._of(arg), is_mask=True)
        if traits.kind == "sum" or op in ("cumsum", "all"):
            self._each(self._of(args[0]), is_summed=True)
        if op.startswith("_scaled_dot_product") or op == "scaled_dot_product_attention":
            masks = [kwargs.get("attn_mask"), kwargs.get("attn_bias")]
            for arg in (*args[3:], *masks):
                self._each(self._of(arg), is_mask=True)

    def _see_reading(self, op: str, args: Any) -> None:
        if named(op).rounding is Rounding.CONVOLUTION:
            for one in self._of(args[0]):
                use = self.uses[one.name]
                use.convolved = use.convolved or (args[1].dim() - 2, int(args[0].shape[1]))
                use.is_data = True
        if named(op).domain == "positive":
            self._each(self._of(args[0]), is_positive=True)
        is_factor = named(op).kind == "factor"
        if named(op).rounding is Rounding.PRODUCT or is_factor:
            tensors = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, torch.Tensor)]
            for tensor in tensors:
                others = [other for other in tensors if other is not tensor]
                if is_factor and any(map(self._is_influenced, others)):
                    self._each(self._of(tensor), is_mask=True)
                elif others:
                    self._each(self._of(tensor), is_number=True, is_data=True)


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _number(value: Any) -> float | None:
    """Return a number, or the one that a tensor holds."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return None


def _limits(value: Any) -> tuple[float, float]:
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return float(value.min()), float(value.max())
    number = _number(value)
    assert number is not None
    return number, number
