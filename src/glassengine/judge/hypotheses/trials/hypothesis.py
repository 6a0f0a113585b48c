"""One mistake that may have been made: what it is called, and what it changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.trial import Edit, Trial, TrialCall
from glassengine.judge.site_pairs import argument_names, passes_on
from glassengine.ops.traits import named
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_TAKING = frozenset({"getitem", "slice", "select", "narrow", "diagonal", "unfold"})
"""Ops that pass on a part of a tensor."""
_KERNEL = re.compile(r"^_*(?:native_)?|_legit.*$|_+$")
"""What names of kernels have beside the name of their op."""


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that may have been made.

    Attributes:
        kind: Of mistake.
        text: In words for people.
        edits: Nodes of the piece that it changes, and what they make instead.
        argument: Name of the literal that is another one; None where none is.
        values: Of this literal, or of a factor: here, in the candidate.
        axis: Of the tensor that it changes, where it is along one.
        lost: What is not read any more, which the candidate need not have at all.
        exchanged: Places of two arguments of one op that have changed places.
        made_in: Op of the baseline that the mistake is in, where that is none of the piece.
    """

    kind: Kind
    text: str
    edits: Mapping[Node, Edit]
    argument: str | None = None
    values: tuple[Any, Any] | None = None
    axis: int | None = None
    lost: Node | None = None
    exchanged: tuple[int, ...] = ()
    made_in: Node | None = None


@dataclass(frozen=True)
class Literal:
    """One non-tensor argument of an op, given or left to its default."""

    node: Node
    name: str
    value: Any
    place: int | str


def becoming(changed: Sequence[tuple[Literal, Any]]) -> Edit:
    """Return the edit that gives an op other values of some arguments."""

    def edit(call: TrialCall) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        positional = list(args)
        for literal, value in changed:
            if isinstance(literal.place, str):
                kwargs[literal.place] = value
            else:
                positional[literal.place] = value
        return call.target(*positional, **kwargs)

    return edit


def literals_of(node: Node) -> Iterator[Literal]:
    """Yield the non-tensor arguments of an op, defaults included."""
    names = argument_names(node.target)
    args, kwargs = bound(node.target, node.args, dict(node.kwargs))
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in items:
        if _is_literal(value):
            name = names[place] if isinstance(place, int) and place < len(names) else str(place)
            yield Literal(node, name, value, place)


def for_any_rank(literal: Literal, rank: int | None) -> Any:
    """Return an argument as it is for tensors of any number of dimensions: counted from the last one on."""
    value = literal.value
    if rank is not None and literal.name in ("dim", "dim0", "dim1") and isinstance(value, int):
        return value if value < 0 else value - rank
    while literal.name == "pad" and isinstance(value, (list, tuple)) and value and not any(value[-2:]):
        value = value[:-2]
    return value


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with every default filled in, as far as the op says which they are."""
    schema = getattr(target, "_schema", None)
    positional, named = list(args), dict(kwargs)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        has_default = argument.has_default_value()
        if argument.kwarg_only:
            if argument.name not in named and has_default:
                named[argument.name] = argument.default_value
        elif index >= len(positional):
            if argument.name not in named and not has_default:
                break
            positional.append(named.pop(argument.name) if argument.name in named else argument.default_value)
    return tuple(positional), named


def constants_of(nodes: Iterable[Node]) -> list[Any]:
    """Return the literal numbers, words and lists that some ops use, each once; without defaults."""
    found: list[Any] = []
    for leaf in (leaf for node in nodes for leaf in (*node.args, *node.kwargs.values())):
        if _is_literal(leaf) and not any(type(leaf) is type(known) and leaf == known for known in found):
            found.append(leaf)
    return found


def leaves_of(node: Node) -> list[Any]:
    """Return all arguments of an op, those in lists one by one."""
    return pytree.tree_leaves((node.args, dict(node.kwargs)))


def tensors_of(trial: Trial, node: Node) -> list[tuple[int, Node]]:
    """Return the tensor arguments of an op by place: those that stand alone and those of a list, in order."""
    return [
        (place, leaf)
        for place, leaf in enumerate(leaves_of(node))
        if isinstance(leaf, Node) and isinstance(trial.values.get(leaf), torch.Tensor)
    ]


def with_leaves(call: TrialCall, changed: Mapping[int, Any]) -> Any:
    """Return what an op makes with some of its arguments, counted as leaves, replaced."""
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    args, kwargs = pytree.tree_unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
    return call.target(*args, **kwargs)


def reading(changed: Mapping[int, Any]) -> Edit:
    """Return the edit by which an op reads other arguments, counted as leaves."""
    return lambda call: with_leaves(call, changed)


def shown(value: Any) -> str:
    """Return a literal as people write it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and value == sys.maxsize:
        return "the last one"
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def done_by(node: Node, number: Any = None) -> str:
    """Return what an op is called that may be missing: "gelu", "the division by 4"."""
    numbers, name = constants_of([node]) if number is None else [number], op_name(node)
    if named(name).kind != "factor" or len(numbers) != 1:
        return called(name)
    return f"the {'multiplication' if name == 'mul' else 'division'} by {shown(numbers[0])}"


def called(name: str) -> str:
    """Return what people call an op: "batch_norm" of `_native_batch_norm_legit_no_training`."""
    name = _KERNEL.sub("", name)
    return "attention" if name.startswith("scaled_dot_product") else name


def of_weight(name: str) -> str:
    """Leave out all but the module that has the weight, and the list that holds a numbered module."""
    parts = name.split(".")
    is_numbered = len(parts) > 2 and parts[-2].isdecimal()
    return ".".join(parts[-3 if is_numbered else -2 :])


def part_of(node: Node) -> Node:
    """Return the node whose values a node passes on, all of them: a part of a tensor is another one."""
    while passes_on(node) and op_name(node) not in _TAKING and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def whole_of(part: Node) -> Node | None:
    """Return the tensor that a node is one of several parts of, which one op makes; None of other nodes."""
    made = part.args[0] if op_name(part) == "getitem" else None
    is_part = isinstance(made, Node) and op_name(made) in ("split", "split_with_sizes", "chunk", "unbind")
    return made.all_input_nodes[0] if is_part and isinstance(made, Node) else None


def short(name: str, site: str) -> str:
    """Leave out the module of the flagged op, where another one is inside of it too."""
    path = site.rpartition("/")[0]
    if name.startswith(".:in"):
        return f"input {name.removeprefix('.:in').strip('.[]')}"
    return next((name.removeprefix(start) for start in ("./", f"{path}/", f"{path}.") if name.startswith(start)), name)


def _is_literal(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (int, float)) for item in value)
