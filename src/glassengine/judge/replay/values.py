"""Keeps what a candidate was given and made in a step, by node of the baseline, and how it may have rounded that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import BackendError
from glassengine.numerics.activations import Read
from glassengine.numerics.float64 import (
    FLOAT32_SUMS,
    Accumulation,
    Operation,
    Roundoff,
    in_double,
    is_real,
    retargeted,
    target_of,
)
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.mask_values import is_finite
from glassengine.numerics.noise import WideOperands, reads_memory
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.outputs import is_view, weight_only_nodes
from glassengine.program.representation.program import Program


class NoCounterpart(Exception):
    """An input of the op was not observed on the candidate's side."""


DOES_NOT_FIT = (NoCounterpart, BackendError, RuntimeError, IndexError, ValueError)
"""Raised where an op of the baseline cannot be computed on what the candidate has."""


def called(node: Node) -> tuple[Node, Callable[..., Any]]:
    """Return the op to replay for `node`, and what computes its value; one of several results is taken from its op."""
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, Node) and not is_view(source):
        target, part = target_of(source), part_of(node, source)
        return source, lambda *args, **kwargs: part(target(*args, **kwargs))
    return node, target_of(node)


def part_of(node: Node, op: Node) -> Callable[[Any], Any]:
    """Return what takes the value of `node` from the result of its op."""
    return (lambda result: result) if node is op else operator.itemgetter(node.args[1])


def in_float64(op: Node, call: Callable[..., Any], read: Callable[[Node], Any]) -> Operation:
    """Return an op in float64 on what `read` gives for the nodes that it reads; `call` computes its result."""
    args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), read)
    args, kwargs = retargeted((args, kwargs))
    call = in_double(op, call)
    return Operation(op_name(op), call, args, kwargs, call(*args, **kwargs))


def predicted_in_float64(node: Node, read: Callable[[Node], Any]) -> Any:
    """Return the value of a node in float64. A view stays in the dtype of what it shows: what reads it is widened."""
    if not is_view(node):
        return in_float64(node, target_of(node), read).exact
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), read)
    return target_of(node)(*args, **kwargs)


@dataclass(eq=False, repr=False)
class Values:
    """The values of one candidate, and what is known of its kernels.

    Attributes:
        program: The baseline program, with weights.
        compiled: Whether the candidate has kernels of its own, or another dtype than the baseline.
        dtype: Floating dtype of the candidate's weights; None for the baseline's own.
        wide_operands: Which of the candidate's products may read unrounded registers, as its other ops may.
        accumulation: How the candidate's products are summed.
        operands: Node of a product -> what the candidate's kernel reads of activations, where it rounds them.
        derive_views: Whether a view of what was observed counts as observed: of a record that has no views.
        rounded: Node -> dtype that the candidate's kernel rounds to, what it reads as well, though its result has more.
        observed: What the candidate was given and made in this step, by node; sizes and lists join when asked for.
        constant: Names of the nodes that depend on weights alone.
    """

    program: Program
    _: KW_ONLY
    compiled: bool = False
    dtype: torch.dtype | None = None
    wide_operands: WideOperands = "thin products"
    accumulation: Accumulation = FLOAT32_SUMS
    operands: Mapping[str, Callable[[torch.Tensor], Read]] = field(default_factory=dict)
    derive_views: bool = False
    rounded: Mapping[str, torch.dtype] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.constant = {node.name for node in weight_only_nodes(self.program)}
        self._weights = self.program.weights()
        self._made_of_weights: dict[str, Any] = {}
        self._inputs = {port.name: port.node for port in self.program.inputs}
        self._same: set[str] = set()

    def take(self, inputs: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> None:
        """Take over a step: inputs by name, caches among them, and what was made by node."""
        self.observed = {self._inputs[name]: tensor for name, tensor in inputs.items() if name in self._inputs}
        self.observed |= made
        self._same.clear()

    def take_same(self, node: Node, value: torch.Tensor, native: torch.Tensor) -> bool:
        """Take note of whether `value`, that of a node, is of numbers, and bitwise `native`, the baseline's own."""
        is_own = self.observed.get(node.name) is value and value.dtype is native.dtype
        if not is_own or not torch.equal(value, native):
            return False
        if value.is_floating_point() and not is_finite(value):
            return False
        self._same.add(node.name)
        return value.is_floating_point()

    def reads_same(self, node: Node) -> bool:
        """Whether all that an op reads is bitwise the baseline's own, and read as it is."""
        if self.operands or self.rounded:
            return False
        return all(
            source.name in self._same
            or (source.name not in self.observed and source.name in self.constant)
            or (source.op == "call_function" and not is_tensor_node(source) and self.reads_same(source))
            for source in node.all_input_nodes
        )

    def accumulate(self, how: Accumulation) -> None:
        """Take products to be summed so from the next case on; kernels stay those of the candidate's runtime."""
        self.accumulation = replace(how, kernels=self.accumulation.kernels)

    def of(self, node: Node) -> Any:
        """Return the candidate's value of a node, or a weight as the program has it.

        Raises:
            NoCounterpart: It has none.
        """
        for known in (self.observed, self._weights, self._made_of_weights):
            if node.name in known:
                return known[node.name]
        is_constant = node.name in self.constant
        is_made = is_tensor_node(node) and not is_constant and not self._is_derived(node)
        if node.op != "call_function" or is_made:
            raise NoCounterpart(node.name)
        # Sizes, the lists that a split returns, views, and what is made of weights alone.
        args, kwargs = self.arguments(node)
        value = target_of(node)(*args, **kwargs)
        (self._made_of_weights if is_constant else self.observed)[node.name] = value
        return value

    def arguments(self, op: Node, *, are_narrowed: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the candidate fed to its op, weights as the program has them, or narrowed to its own dtype.

        Raises:
            NoCounterpart: Part of it was not observed.
        """

        def read(node: Node) -> Any:
            value = self.of(node)
            return value.to(self.dtype) if are_narrowed and is_real(value) and node.name in self.constant else value

        found: tuple[tuple[Any, ...], dict[str, Any]] = torch.fx.node.map_arg((op.args, dict(op.kwargs)), read)
        return found

    def as_read(self, op: Node, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """Return the arguments of a product as the candidate's kernel reads them, and what gives room for ties.

        The second are arguments of the same op, whose result bounds how far the first may be another by reading; None
        where the kernel reads what it is given.
        """
        reader = self.operands.get(op.name)
        if reader is None:
            return args, None
        read = {
            place: reader(value)
            for place, (source, value) in enumerate(zip(op.args, args, strict=True))
            if is_real(value) and isinstance(source, Node) and source.name not in self.constant
        }
        values = [read[place].values if place in read else value for place, value in enumerate(args)]
        return tuple(values), _room(op, values, {place: found.slack for place, found in read.items()})

    def lacks_inputs(self, node: Node) -> bool:
        """Whether a tensor that the op reads was not observed; lists and sizes are what they are made of."""
        for source in node.all_input_nodes:
            if source.op != "call_function" or source.name in self.constant or source.name in self.observed:
                continue
            if (is_tensor_node(source) and not self._is_derived(source)) or self.lacks_inputs(source):
                return True
        return False

    def _is_derived(self, node: Node) -> bool:
        return self.derive_views and is_view(node)

    def roundoff(self, op: Node, result: torch.Tensor) -> Roundoff:
        """Return how the candidate may have rounded the inputs and the result of an op."""
        of_inputs: set[torch.dtype] = set()
        of_weights: set[torch.dtype] = set()
        for source in op.all_input_nodes:
            value = self.observed.get(source.name)
            if source.name in self.constant or source.op == "placeholder":
                weight = self._weights.get(source.name)
                if weight is not None and self.dtype is not None and _is_finer(weight.dtype, self.dtype):
                    of_weights.add(self.dtype)
            elif is_real(value):
                of_inputs.add(value.dtype)
        if not self.compiled or reads_memory(op, result.shape, self.wide_operands):
            of_inputs = set()
        of_inputs |= {dtype for source in op.all_input_nodes for dtype in self._to_come(source)}
        if op.name in self.rounded:  # a table of results is looked up by what is read, rounded
            of_inputs.add(self.rounded[op.name])
        how = self.accumulation if traits_of(op).reads_memory else FLOAT32_SUMS
        return Roundoff(
            unit_roundoff(result.dtype),
            max([how.u_operands, *map(unit_roundoff, of_inputs)]),
            max(map(unit_roundoff, of_weights), default=0.0),
            smallest_precise(result.dtype),
            how.u_sums,
            max(map(smallest_precise, of_inputs | of_weights), default=0.0),
            self.accumulation.kernels.error(op_name(op), result.dtype),
        )

    def _to_come(self, source: Node) -> set[torch.dtype]:
        """Dtype of an input that the baseline rounds and the candidate keeps finer: it may round it later."""
        value = self.observed.get(source.name)
        if not is_real(value) or not is_tensor_node(source):
            return set()
        own: torch.dtype = source.meta["val"].dtype
        is_of_a_finer_model = self.dtype is not None and _is_finer(self.dtype, own)
        return {own} if _is_finer(value.dtype, own) and not is_of_a_finer_model else set()

    def roundoff_of_inputs(self, op: Node) -> float:
        """Return the unit roundoff of the coarsest tensor that the candidate fed to an op; 0 for none."""
        values = (self.observed.get(source.name) for source in op.all_input_nodes)
        return max((unit_roundoff(value.dtype) for value in values if is_real(value)), default=0.0)


def _is_finer(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and unit_roundoff(dtype) < unit_roundoff(other)


def _room(op: Node, values: Sequence[Any], slack: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
    """Return arguments of a product whose result is how far it may be another, with `slack` for what it reads."""
    some: Any = slice(None)
    if op_name(op) == "linear" and 0 in slack:
        # Nearly all are far from a tie, and a weight in float64 is the most that the judgement of a product costs.
        some = slack[0].reshape(-1, slack[0].shape[-1]).any(0).nonzero()[:, 0]

    def of(place: int, value: Any) -> Any:
        if place in slack:
            return slack[place][..., some].double()
        if not is_real(value):
            return value
        return value[..., some].double().abs() if value.dim() > 1 else torch.zeros_like(value, dtype=torch.float64)

    return tuple(of(place, value) for place, value in enumerate(values))
