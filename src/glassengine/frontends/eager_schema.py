"""What the schema of an operation says about compiling its calls one by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

Place = int | str
"""Where an argument stands: its position, or its name where it is given by keyword."""

_NUMERIC = {"Tensor", "number", "Optional[number]"}
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
_UNCOUNTED = {"profiler", "prim", "inductor", "c10d", "_c10d_functional"}
RANDOM = "random numbers are torch's own, so that a seed means the same"


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
    """

    op: OpOverload
    computes: bool
    obstacle: str
    numeric: frozenset[Place]
    written: frozenset[Place]
    returned: tuple[tuple[str, int] | None, ...]
    dropout: tuple[str, int] | None

    def is_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws random numbers."""
        if self.dropout is None:
            return False
        return bool(argument(self.dropout, args, kwargs))


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
    dropout = None
    for place, described in zip(places, schema.arguments, strict=True):
        if str(described.type) in _NUMERIC:
            numeric.update(place)
        if described.name == "dropout_p":
            dropout = place
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
        or op._overloadpacket.__name__ in _UNWRITTEN
        or op.namespace in _UNCOUNTED
    )
    return Operation(
        op,
        computes,
        _obstacle(op, dropout is not None),
        frozenset(numeric),
        frozenset(written),
        tuple(returned),
        dropout if torch.Tag.nondeterministic_seeded in op.tags else None,
    )


def _obstacle(op: OpOverload, can_do_without_dropout: bool) -> str:
    if torch.Tag.nondeterministic_seeded in op.tags and not can_do_without_dropout:
        return RANDOM
    if torch.Tag.dynamic_output_shape in op.tags:
        return "the shape of its result depends on values"
    if torch.Tag.data_dependent_output in op.tags or not all(
        isinstance(result.type, torch.TensorType) or str(result.type) == "List[Tensor]" for result in op._schema.returns
    ):
        return "its result is a plain value"
    if any(given.kwarg_only and given.alias_info is not None for given in op._schema.arguments):
        return "it writes to out="
    return ""
