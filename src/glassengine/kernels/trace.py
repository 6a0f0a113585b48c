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
from glassengine.numerics.float64 import Accumulation, Operation, Roundoff, double, retarget, target_of
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.noise import disturbed, noisy, rounded, rounds
from glassengine.ops.row import Rounding, argument
from glassengine.ops.traits import base_name, traits_of
from glassengine.program.representation.outputs import is_view

Choices = dict[Node, Tensor]
"""Op -> places or bools that it chose."""

DOUBLE = 2.0**-29
"""Unit roundoff of float64 over that of float32."""
_OF_BOUND = 0.5
"""Noise of an op of several steps, as a share of its rounding bound: formulas differ by more than a rounded result."""


def wide(value: Any, *, copies: bool = True) -> Any:
    """Return an argument in float64 and on the processor: a tensor (as a copy, if asked for), a dtype, a device."""
    if isinstance(value, Tensor):
        own = value.detach().cpu()
        made = double(own)
        return made.clone(memory_format=torch.preserve_format) if copies and made.dtype is own.dtype else made
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
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


@dataclass
class TracedRun:
    """What a run of a reference gave: tensors of the result, then the inputs after the call."""

    tensors: list[Tensor]
    only: OnlyOp | None = None
    """The only op that rounds; None where several do, or none."""
    chosen: Choices = field(default_factory=dict)
    seen: tuple[Any, Any] = (None, None)
    """(value, arguments) of the op that was watched."""


@dataclass
class ReferenceTrace:
    """A reference on inputs of one shape."""

    reference: Callable[..., Any]
    module: GraphModule | None
    why_not: str | None
    accumulation: Accumulation
    steps: list[Node] = field(default_factory=list)
    checked: tuple[Any, TracedRun | None] = (None, None)
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

    def source(self, which: int) -> Any:
        """Return what makes tensor number `which` of a run; None if the reference is not traced."""
        outputs = [] if self.module is None else pytree.tree_leaves([n.args for n in self.module.graph.nodes][-1])
        return outputs[which] if which < len(outputs) else None

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
    def run(
        self,
        inputs: Sequence[Any],
        generator: torch.Generator | None = None,
        *,
        forced: Choices | None = None,
        native: bool = False,
        watched: Node | None = None,
    ) -> TracedRun:
        """Run the reference in float64 (or as `native`), with legal rounding after each op if there is a generator.

        Ops choose as `forced` says; the value and the arguments of one op may be `watched`.
        """
        if self.module is not None:
            return _Lane(self, generator, forced or {}, native, watched).on(inputs)

        def moved(value: Any) -> Any:
            if generator is None or not isinstance(value, Tensor) or not value.is_floating_point():
                return wide(value)
            return disturbed(wide(value), unit_roundoff(value.dtype), generator, smallest_precise(value.dtype))

        given = pytree.tree_map(moved, list(inputs))
        try:
            with _double_by_default():
                return TracedRun([*map(double, tensors_of(self.reference(*given))), *tensors_of(given)])
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
        """Return its rounding bound, for the elements of a bool mask alone; None where it has none."""
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
    reference: Callable[..., Any], inputs: Sequence[Any], accumulation: Accumulation, backward: bool
) -> ReferenceTrace:
    """Run a reference once on copies of `inputs`, and keep what it called.

    If it differentiates (`backward`), ops are seen below autograd, as what autograd keeps for its backward pass is seen
    there only; attention, of whose backward pass nothing is known, is run as its products.
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
            return ReferenceTrace(reference, None, why, accumulation)
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        for node in nodes:
            if traits_of(node).is_random:
                raise UsageError(
                    "the reference draws random numbers",
                    got=str(node.target),
                    hint="pass them as inputs, or judge a sampler by glass.testing.assert_samples_match",
                )
        found = ReferenceTrace(reference, module, None, accumulation, nodes)
        try:
            is_whole = _is_faithful(found, reference, inputs)
            found.checked = inputs, found.run(inputs)
        except Exception as error:
            return ReferenceTrace(reference, None, f"{type(error).__name__}: {first_line(error)}", accumulation)
    why = "it makes tensors of its inputs outside of PyTorch"
    return found if is_whole else ReferenceTrace(reference, None, why, accumulation)


def _is_faithful(trace: ReferenceTrace, reference: Callable[..., Any], inputs: Sequence[Any]) -> bool:
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
    """Return inputs with copies of their tensors; if `whole` with strides, what is around them, and shared memory."""
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


_uncopied = partial(wide, copies=False)


class _Lane(Interpreter):
    """One run of the graph in float64."""

    def __init__(
        self,
        trace: ReferenceTrace,
        generator: torch.Generator | None,
        forced: Choices,
        is_native: bool,
        watched: Node | None,
    ) -> None:
        assert trace.module is not None
        super().__init__(trace.module, garbage_collect_values=True)
        self._generator, self._how = generator, trace.accumulation
        self._forced, self._is_native, self._watched = forced, is_native, watched
        is_exact = generator is None and len(trace.rounding) == 1
        self._kept = trace.rounding[0] if is_exact else None
        self._choices = set(trace.choices)
        self._is_mutable = any(is_mutable(node) for node in trace.steps)
        self._found = TracedRun([])

    def on(self, inputs: Sequence[Any]) -> TracedRun:
        """Return what it gives."""
        leaves = pytree.tree_leaves(list(inputs))
        if self._is_native:
            self._found.tensors = tensors_of(self.run(*copied(leaves)))
        else:
            with _double_by_default():
                # What is in float64 already is copied only if it may be written to.
                self._found.tensors = tensors_of(self.run(*(wide(leaf, copies=self._is_mutable) for leaf in leaves)))
        return self._found

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value if self._is_native else wide(value)

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self._is_native:
            value = super().run_node(n)
            if n in self._choices:
                self._found.chosen[n] = value if isinstance(value, Tensor) else value[1]
            return value
        given: tuple[Any, Any] = self.fetch_args_kwargs_from_env(n)
        args, kwargs = map_aggregate(given[0], _uncopied), map_aggregate(given[1], _uncopied)
        call: Any = target_of(n) if isinstance(n.target, torch._ops.OpOverload) else n.target
        value = call(*args, **kwargs)
        own = n.meta.get("val")
        if traits_of(n).casts and value is args[0] and isinstance(n.args[0], Node):
            # In its own dtype it was a copy, which what follows may write to.
            is_copy = isinstance(own, Tensor) and own.dtype is not n.args[0].meta["val"].dtype
            value = value.clone() if is_copy else value
        if n in self._choices:
            if n in self._forced:
                value = _chosen(n, args, value, self._forced[n])
            self._found.chosen[n] = value if isinstance(value, Tensor) else value[1]
        if n is self._watched:
            self._found.seen = value, args
        if n is self._kept and isinstance(value, Tensor) and not is_mutable(n):
            self._found.only = OnlyOp(n, value, args, kwargs, self._roundoff(n), self._how)
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


def is_mutable(node: Node) -> bool:
    """Whether an op writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(node: Node, value: Any, other: Any) -> Any:
    """Return another value of a node; written into its first argument where the op writes there."""
    if not is_mutable(node) or not isinstance(value, Tensor) or other is value:
        return other
    return value.copy_(other)
