"""The reference as a graph of its operations, run in float64: exactly, with rounding noise, or with one edit.

The graph is that of one call on the real inputs, so that loops and branches on values are as they were. A reference
that cannot be traced is run as a whole: in float64, and on inputs that differ by rounding.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError, first_line
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.float64 import double, retarget, target_of
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.noise import disturbed, noisy, rounded, rounds
from glassengine.numerics.ops import Accumulation, Operation, Roundoff
from glassengine.ops.arguments import argument
from glassengine.ops.row import Rounding
from glassengine.ops.traits import base_name, traits_of
from glassengine.program.representation.outputs import is_view

Choices = dict[Node, Tensor]
"""Op -> places or bools that it chose."""

DOUBLE = 2.0**-29
"""Unit roundoff of float64 over that of float32."""
_OF_BOUND = 0.5
"""Noise of an op of several steps, as a share of its rounding bound: formulas differ by more than a rounded result."""


def wide(value: Any) -> Any:
    """Return an argument in float64 and on the processor: a tensor as a copy, a dtype, a device."""
    if isinstance(value, Tensor):
        own = value.detach().cpu()
        made = double(own)
        return made.clone(memory_format=torch.preserve_format) if made.dtype is own.dtype else made
    return torch.device("cpu") if isinstance(value, torch.device) else retarget(value)


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    """Make what is computed of whole numbers and of Python's in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _wide_once(value: Any) -> Any:
    is_wide = isinstance(value, Tensor) and value.dtype is torch.float64 and value.device.type == "cpu"
    return value.detach() if is_wide else wide(value)


def _narrow_device(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(value, torch.device) else retarget(value)


@dataclass
class Trace:
    """A reference on inputs of one shape."""

    reference: Callable[..., Any]
    module: GraphModule | None
    why_not: str | None
    accumulation: Accumulation
    steps: list[Node] = field(default_factory=list)
    checked: tuple[Any, Any] = (None, None)
    """The inputs that it was tried on, and what it gave."""

    @cached_property
    def rounding(self) -> list[Node]:
        """The ops that round."""
        return [node for node in self.steps if _rounds(node)]

    def coarsest(self, native: torch.dtype) -> float:
        """Return the unit roundoff of the coarsest op but casts and products; of float32 at least."""
        ops = [n for n in self.rounding if not traits_of(n).casts and not traits_of(n).multiplies]
        values = [v for n in ops for v in _floats(n.meta["val"])]
        kinds = {v.dtype for v in values} if self.module is not None else {native}
        return max((unit_roundoff(kind) for kind in kinds if kind.is_floating_point), default=2.0**-24)

    @cached_property
    def is_double(self) -> bool:
        """Whether every op rounds to float64. Sums are modeled as those of float32, and their noise scaled."""
        kinds = {value.dtype for node in self.rounding for value in _floats(node.meta["val"])}
        return kinds == {torch.float64}

    @torch.no_grad()
    def exact(self, inputs: Sequence[Any]) -> tuple[Any, OnlyOp | None]:
        """Return (tensors of the result in float64, tensors of the inputs after the call), and the only op that rounds.

        The op is None where several round, or none.
        """
        if self.module is None:
            return self._whole(pytree.tree_map(wide, list(inputs))), None
        lane = _Lane(self, None)
        lane.kept = self.rounding[0] if len(self.rounding) == 1 else None
        return lane.on(inputs), lane.only

    @cached_property
    def choices(self) -> list[Node]:
        """The ops that choose among values that rounding may have changed: rankings and comparisons."""
        rounded: set[Node] = set()
        found = []
        for node in self.steps:
            is_below = any(source in rounded for source in node.all_input_nodes)
            if is_below or node in self.rounding:
                rounded.add(node)
            choice = traits_of(node).choice
            if is_below and (traits_of(node).kind == "comparison" or (choice is not None and choice.places)):
                found.append(node)
        return found

    @torch.no_grad()
    def choosing(
        self,
        inputs: Sequence[Any],
        generator: torch.Generator | None,
        forced: Choices | None = None,
        *,
        native: bool = False,
    ) -> tuple[Any, Choices]:
        """Return the results and what was chosen: with rounding noise, with choices of another run, in own dtypes."""
        lane = _Lane(self, generator)
        lane.forced, lane.is_native = forced or {}, native
        return lane.on(inputs), lane.chosen

    @torch.no_grad()
    def noisy(self, inputs: Sequence[Any], generator: torch.Generator) -> Any:
        """Return the results with one sample of legal rounding after each op."""
        if self.module is not None:
            return _Lane(self, generator).on(inputs)

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return wide(value)
            return disturbed(wide(value), unit_roundoff(value.dtype), generator, smallest_precise(value.dtype))

        return self._whole(pytree.tree_map(moved, list(inputs)))

    @torch.no_grad()
    def seen(self, inputs: Sequence[Any], node: Node, generator: torch.Generator | None) -> tuple[Any, Any]:
        """Return (value, arguments) of an op in float64, or in a noise run."""
        lane = _Lane(self, generator)
        lane.watched = node
        lane.on(inputs)
        return lane.seen

    def _whole(self, inputs: Sequence[Any]) -> Any:
        try:
            with _double_by_default():
                return [double(t) for t in tensors_of(self.reference(*inputs))], tensors_of(inputs)
        except Exception as error:
            raise UsageError(
                "the reference can neither be traced nor run in float64",
                got=f"{self.why_not}; {type(error).__name__}: {first_line(error)}",
                hint="give a reference in plain PyTorch, without a test of its dtype",
            ) from error


@dataclass(frozen=True)
class OnlyOp:
    """An op with its float64 arguments and result."""

    node: Node
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roundoff: Roundoff
    how: Accumulation

    @property
    def is_cheap(self) -> bool:
        """Whether its bound costs no more than means of errors: of elements, and of ops of several steps."""
        return self.is_alone or traits_of(self.node).rounding is Rounding.COMPOSITE

    @property
    def is_alone(self) -> bool:
        """Whether each element is computed by itself."""
        return traits_of(self.node).rounding is Rounding.POINTWISE

    @torch.no_grad()
    def bound(self, where: Tensor | None = None) -> Tensor | None:
        """Return its rounding bound; None where it has none.

        Args:
            where: Bool mask in the shape of the result: for these elements alone.
        """
        r, args, kwargs, value = self.roundoff, self.args, self.kwargs, self.value
        if traits_of(self.node).multiplies and self.how.u_operands:
            r = Roundoff(r.u, self.how.u_operands, tiny=r.tiny, u_sums=r.u_sums)
        try:
            if where is not None and self.is_alone:
                picked = partial(_picked, where, value.shape)
                args, kwargs, value = map_aggregate(args, picked), map_aggregate(kwargs, picked), value[where]
            found = rounding_bound(Operation(base_name(self.node.target), target_of(self.node), args, kwargs, value), r)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # a form of the op that its bound does not know
        if found is not None and self.node.meta["val"].dtype is torch.float64:
            found = found * DOUBLE
        return found if found is None or self.is_alone or where is None else found[where]


def _picked(where: Tensor, shape: torch.Size, value: Any) -> Any:
    return value.expand(shape)[where] if isinstance(value, Tensor) and value.dim() else value


def traced(
    reference: Callable[..., Any], inputs: Sequence[Any], accumulation: Accumulation, *, backward: bool = False
) -> Trace:
    """Run a reference once on copies of `inputs`, and keep what it called.

    Args:
        reference: The function.
        inputs: Its arguments.
        accumulation: Of products.
        backward: Whether it differentiates. Then ops are seen below autograd, as what autograd keeps for its backward
            pass is seen there only; attention, of whose backward pass nothing is known, is run as its products.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend, sdpa_kernel

    copies = copied(inputs)

    def call(*args: Any) -> Any:
        return tensors_of(reference(*args)), tensors_of(args)

    make = make_fx(
        call,
        _backward_written_out() if backward else None,
        tracing_mode="real",
        pre_dispatch=not backward,
        _error_on_data_dependent_ops=False,
    )
    with torch.no_grad():
        try:
            with sdpa_kernel(SDPBackend.MATH) if backward else contextlib.nullcontext():
                module = make(*copies)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            return Trace(reference, None, why, accumulation)
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        for node in nodes:
            if traits_of(node).is_random and argument(node, "train") is not False and argument(node, "p") != 0:
                raise UsageError(
                    "the reference draws random numbers",
                    got=str(node.target),
                    hint="pass them as inputs, or judge a sampler by glass.testing.assert_samples_match",
                )
        found = Trace(reference, module, None, accumulation, nodes)
        try:
            is_whole = _is_faithful(found, reference, inputs)
            found.checked = inputs, found.exact(inputs)
        except Exception as error:
            return Trace(reference, None, f"{type(error).__name__}: {first_line(error)}", accumulation)
    why = "it makes tensors of its inputs outside of PyTorch"
    return found if is_whole else Trace(reference, None, why, accumulation)


def _is_faithful(trace: Trace, reference: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether a graph that holds tensors gives what the reference gives on other inputs: no result is among them."""
    assert trace.module is not None
    if not any(node.op == "get_attr" for node in trace.module.graph.nodes):
        return True
    leaves, spec = pytree.tree_flatten(copied(inputs))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[i] = leaf * (1 + 2.0**-6)
    given = pytree.tree_unflatten(leaves, spec)
    ours = trace.module(*pytree.tree_leaves(copied(given)))[0]
    return all(is_near(a, b) for a, b in zip(ours, tensors_of(reference(*copied(given))), strict=True))


def is_near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for a thousandth."""
    if one.shape != other.shape:
        return False
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64).nan_to_num(0.0, 0.0, 0.0) for t in (one, other))
    return float((a - b).abs().square().mean()) <= 1e-6 * float(b.abs().square().mean()) if a.numel() else True


_BACKWARD = (
    "_softmax_backward_data _log_softmax_backward_data native_layer_norm_backward native_group_norm_backward "
    "gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward softplus_backward mish_backward "
    "nll_loss_backward mse_loss_backward huber_loss_backward hardswish_backward _fused_rms_norm_backward"
)


@functools.cache
def _backward_written_out() -> dict[Any, Callable[..., Any]]:
    """Return formulas of ops of a backward pass, of whose inner rounding nothing is known."""
    from torch._decomp import get_decompositions

    packets = [getattr(torch.ops.aten, name, None) for name in _BACKWARD.split()]
    return dict(get_decompositions([packet for packet in packets if packet is not None]))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(inputs: Any, *, whole: bool = True) -> Any:
    """Return inputs with copies of their tensors.

    They have the same strides and the memory around them, and those that share memory share it again; unless not
    `whole`.
    """
    stores: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value
        if not whole or value.layout is not torch.strided:
            return value.clone()
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in stores:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            stores[key] = flat.clone()
        own = stores[key]
        if own.dtype is not value.dtype:
            own = own.view(torch.uint8).view(value.dtype)
        return own.as_strided(value.shape, value.stride(), value.storage_offset())

    return pytree.tree_map(copy, list(inputs))


def _rounds(node: Node) -> bool:
    if node.op != "call_function" or not _floats(node.meta.get("val")):
        return False
    if traits_of(node).casts:
        source, target = (one.meta["val"].dtype for one in (node.args[0], node))  # type: ignore[union-attr]
        is_float = source.is_floating_point and target.is_floating_point
        return bool(is_float and torch.finfo(source).bits > torch.finfo(target).bits)
    return not is_view(node) and node.target is not operator.getitem and rounds(node)


def _floats(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]


class _Lane(Interpreter):
    """One run of the graph in float64."""

    def __init__(self, trace: Trace, generator: torch.Generator | None) -> None:
        assert trace.module is not None
        super().__init__(trace.module, garbage_collect_values=True)
        self._generator, self._how = generator, trace.accumulation
        self.kept: Node | None = None
        self.only: OnlyOp | None = None
        self.watched: Node | None = None
        self.seen: tuple[Any, Any] = (None, None)
        self.forced: Choices = {}
        self.chosen: Choices = {}
        self.is_native = False
        self._choices = set(trace.choices)
        self._is_mutable = any(_is_mutable(node) for node in trace.steps)

    def on(self, inputs: Sequence[Any]) -> Any:
        """Return (results, inputs afterwards), each the list of their tensors."""
        leaves = pytree.tree_leaves(list(inputs))
        # What is in float64 already is copied only if it may be written to.
        widened = wide if self._is_mutable else _wide_once
        if self.is_native:
            return self.run(*copied(leaves))
        with _double_by_default():
            return self.run(*map(widened, leaves))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value if self.is_native else wide(value)

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self.is_native:
            value = super().run_node(n)
            if n in self._choices:
                self.chosen[n] = value if isinstance(value, Tensor) else value[1]
            return value
        given: tuple[Any, Any] = self.fetch_args_kwargs_from_env(n)
        args, kwargs = map_aggregate(given[0], _narrow_device), map_aggregate(given[1], _narrow_device)
        call: Any = target_of(n) if isinstance(n.target, torch._ops.OpOverload) else n.target
        value = call(*args, **kwargs)
        own = n.meta.get("val")
        if traits_of(n).casts and value is args[0] and isinstance(n.args[0], Node):
            # In its own dtype it was a copy, which what follows may write to.
            is_copy = isinstance(own, Tensor) and own.dtype is not n.args[0].meta["val"].dtype
            value = value.clone() if is_copy else value
        if n in self._choices:
            if n in self.forced:
                value = _chosen(n, args, value, self.forced[n])
            self.chosen[n] = value if isinstance(value, Tensor) else value[1]
        if n is self.watched:
            self.seen = value, args
        if n is self.kept and isinstance(value, Tensor) and not _is_mutable(n):
            self.only = OnlyOp(n, value, args, kwargs, self._roundoff(n), self._how)
        if self._generator is not None and _rounds(n):
            return _written(n, value, self._noised(n, value, args, kwargs))
        return value

    def _roundoff(self, node: Node) -> Roundoff:
        dtype = _floats(node.meta["val"])[0].dtype
        dtype = torch.float32 if dtype is torch.float64 else dtype
        return Roundoff(unit_roundoff(dtype), tiny=smallest_precise(dtype), u_sums=self._how.u_sums)

    def _noised(self, node: Node, value: Any, args: Any, kwargs: Any) -> Any:
        assert self._generator is not None
        r, generator = self._roundoff(node), self._generator
        if not isinstance(value, Tensor):
            if traits_of(node).choice is not None:
                return value
            return pytree.tree_map(lambda t: rounded(t, r.u, generator, None, r.tiny) if _floats(t) else t, value)
        found = noisy(node, value, args, kwargs, r.u, generator, self._how, r.tiny)
        if traits_of(node).rounding is Rounding.COMPOSITE:
            bound = OnlyOp(node, value, args, kwargs, r, self._how).bound()
            if bound is not None and node.meta["val"].dtype is torch.float64:
                bound = bound / DOUBLE  # as all noise of this run
            if bound is not None:
                unit = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
                moved = found + bound * _OF_BOUND * unit
                found = torch.where(moved.isfinite(), moved, found)
        return found


def _chosen(node: Node, args: tuple[Any, ...], value: Any, places: Tensor) -> Any:
    """Return what a choice gives where others are chosen."""
    if isinstance(value, Tensor):
        return places
    dim = argument(node, "dim")
    dim = -1 if dim is None else dim
    keeps = places.dim() == args[0].dim()
    at = places if keeps else places.unsqueeze(dim)
    values = args[0].gather(dim, at)
    return (values if keeps else values.squeeze(dim)), places


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(node: Node, value: Any, other: Any) -> Any:
    """Return another value of a node; written into its first argument where the op writes there."""
    if not _is_mutable(node) or not isinstance(value, Tensor) or other is value:
        return other
    return value.copy_(other)
