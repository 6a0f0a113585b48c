"""What the schema of an operation says about compiling its calls one by one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from glassengine.ops.traits import traits_of_target

Place = int | str
"""Where an argument stands: its position, or its name where it is given by keyword."""

_NUMERIC = {"Tensor", "number", "Optional[number]", "float", "Optional[float]", "List[number]", "List[float]"}
_SHAPING = {"arange", "range"}  # operations whose numbers are sizes
_UNCOUNTED = {"profiler", "prim", "inductor", "c10d", "_c10d_functional"}
_RANDOM = "random numbers are torch's own, so that a seed means the same"
_DYNAMIC = "the shape of its result depends on values"
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Operation:
    """An operation, as far as its schema tells.

    Attributes:
        op: The operation.
        computes: Whether there is anything to compile: not for views, memory that nothing has written, bookkeeping.
        obstacle: Why no call of it can be compiled; "" where one may be.
        numeric: Names and positions of arguments in which a number is a value, and no choice such as a dimension.
        written: Names and positions of arguments that are written to.
        returned: For each result: name and position of the argument that is written to and returned, or None.
        dropout: Name and position of the probability without which a call has nothing random about it, or None.
        indices: Name and position of indices that give the result a shape that depends on values if one is a mask.
    """

    op: OpOverload
    computes: bool
    obstacle: str
    numeric: frozenset[Place]
    written: frozenset[Place]
    returned: tuple[tuple[str, int] | None, ...]
    dropout: tuple[str, int] | None
    indices: tuple[str, int] | None

    def obstacle_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why a call with these arguments cannot be compiled; "" where it may be."""
        if self.dropout is not None and argument(self.dropout, args, kwargs):
            return _RANDOM
        if self.indices is not None:
            found = argument(self.indices, args, kwargs) or ()
            if any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in found):
                return _DYNAMIC
        return self.obstacle


def argument(place: tuple[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call by name and position; None where it is left out."""
    name, position = place
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def examine(op: OpOverload) -> Operation:
    """Return what the schema of `op` says."""
    schema = op._schema
    places = [(argument.name, index) for index, argument in enumerate(schema.arguments)]
    numeric: set[Place] = set()
    written: set[Place] = set()
    owners: dict[str, tuple[str, int]] = {}
    dropout = indices = None
    for place, described in zip(places, schema.arguments, strict=True):
        if str(described.type) in _NUMERIC and op._overloadpacket.__name__ not in _SHAPING:
            numeric.update(place)
        if described.name == "dropout_p":
            dropout = place
        if described.name == "indices" and torch.Tag.dynamic_output_shape in op.tags:
            indices = place
        if described.alias_info is not None and described.alias_info.is_write:
            written.update(place)
            owners.update(dict.fromkeys(described.alias_info.before_set, place))
    returned = []
    for result in schema.returns:
        aliases = result.alias_info.before_set if result.alias_info is not None else ()
        returned.append(next((owners[alias] for alias in aliases if alias in owners), None))
    computes = not (
        op.is_view
        or torch.Tag.inplace_view in op.tags
        or traits_of_target(op).is_unwritten
        or op._overloadpacket.__name__ == "resize_"
        or op.namespace in _UNCOUNTED
    )
    return Operation(
        op,
        computes,
        _obstacle(op, has_dropout=dropout is not None, has_indices=indices is not None),
        frozenset(numeric),
        frozenset(written),
        tuple(returned),
        dropout if torch.Tag.nondeterministic_seeded in op.tags else None,
        indices,
    )


def _obstacle(op: OpOverload, *, has_dropout: bool, has_indices: bool) -> str:
    if torch.Tag.nondeterministic_seeded in op.tags and not has_dropout:
        return _RANDOM
    if torch.Tag.dynamic_output_shape in op.tags and not has_indices:
        return _DYNAMIC
    if torch.Tag.data_dependent_output in op.tags or not all(
        isinstance(result.type, torch.TensorType) or str(result.type) == "List[Tensor]" for result in op._schema.returns
    ):
        return "its result is a plain value"
    if any(given.kwarg_only and given.alias_info is not None for given in op._schema.arguments):
        return "it writes to out="
    return ""


def is_input_number(value: Any) -> bool:
    """Return whether a value is a number that an input of a graph, a tensor, can hold."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let torch not log, while the block foresees results, that arguments do not fit: ATen reports it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
