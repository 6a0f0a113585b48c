"""Compares how two programs write an op: other ops or arguments need not make other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import counts_alone, is_of_rotation, is_placed
from glassengine.judge.hypotheses.trials.hypothesis import literals_of, shown
from glassengine.judge.sides.protocol import Side
from glassengine.judge.site_pairs import origin_of, passes_on, region_of, up
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.results import Kind

_MOST_ONE_SIDED = 4
_MASKING = frozenset({"masked_fill", "where", "tril", "triu"})
_CONDITIONS = frozenset(
    {"logical_not", "logical_and", "logical_or", "bitwise_not", "__and__", "__or__", "le", "lt", "ge", "gt"}
)
_MOST = 8
"""Ops of a region beyond which a list of them is not helpful."""


def written_differently(baseline: Program, side: Side) -> dict[str, tuple[str, str]]:
    """Return node of `baseline` -> (the side's own site, how its op differs), for the ops that do."""
    if side.program is None or side.program is baseline:
        return {}
    there = side.program.nodes
    said = {
        node: (pair.candidate.name, pair.difference or _telling(baseline.node(node), there[pair.candidate.node]))
        for node, pair in side.pairs.items()
    }
    return {node: (site, how) for node, (site, how) in said.items() if how}


def _telling(ours: Node, theirs: Node) -> str | None:
    """Return how two calls of one op differ in numbers, words and flags; dimensions are spelled in many ways."""
    if ours.target != theirs.target or passes_on(ours):
        return None
    said = []
    there = {literal.name: literal.value for literal in literals_of(theirs)}
    for literal in literals_of(ours):
        value = there.get(literal.name, literal.value)
        if (
            isinstance(literal.value, (float, str, bool))
            and type(value) is type(literal.value)
            and value != literal.value
        ):
            said.append(f"{literal.name}: {shown(literal.value)} in the baseline, {shown(value)} in the candidate")
    return "; ".join(said) or None


@dataclass(frozen=True)
class MissingOps:
    """Which ops only one side has.

    Attributes:
        text: Which, in words.
        is_one_sided: Whether the other side has all the rest of them, and nothing else.
        kind: Of mistake that it is to leave these out, or to have them.
    """

    text: str
    is_one_sided: bool
    kind: Kind


def left_out(baseline: Program, side: Side, name: str) -> MissingOps | None:
    """Return which ops only one side has where the node `name` of `baseline` is made, None where both have the same.

    Both sides are looked at from what is made of them up to the tensors that both have.
    """
    own, found = side.program, side.counterparts
    if own is None or own is baseline:
        return None
    node, target = baseline.nodes.get(name), own.nodes.get(found.get(name, ""))
    if node is None or target is None:
        return None
    above, ends = region_of(node, found)
    constants = [{node.name for node in weight_only_nodes(program)} for program in (baseline, own)]
    # What one side keeps as a buffer, the other may compute.
    ours = _names([one for one in above if one is node or one.name not in constants[0]])
    # What goes in has taken the place of what comes out.
    is_its_input = target.name in {found[end.name] for end in ends}
    region, their_ends = ([], []) if is_its_input else region_of(target, set(found.values()))
    made = origin_of(target, set(found.values()))
    theirs = _names([one for one in region if one in (target, made) or one.name not in constants[1]])
    if _is_another(node, ours, theirs, {found[end]: end for end in found}, their_ends):
        return None
    if Counter(ours) == Counter(theirs) or len(ours) == len(theirs) == 1 or max(len(ours), len(theirs)) > _MOST:
        return None
    text = f"the baseline has {_listed(ours, above)}, the candidate {_listed(theirs, region)}"
    missing, more = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    is_one_sided = not (missing and more)
    lone = [one for one in [*above, *region] if (missing + more).keys() & _names([one])]
    others = {name for one in lone if traits_of(one).rounding is not Rounding.ATTENTION for name in _names([one])}
    if any(only and others.isdisjoint(only) for only in (missing, more)):
        return None  # attention as one op or as several: so does a right port
    if is_one_sided and sum((missing or more).values()) > _MOST_ONE_SIDED:
        return None  # two tensors that have little to do with each other
    kind = _kind(lone) if is_one_sided else "other"
    if kind == "other" and _is_placing(baseline, node, above):
        kind = "position"
    return MissingOps(text, is_one_sided, kind)


def _is_placing(baseline: Program, node: Node, ops: Sequence[Node]) -> bool:
    """Whether all that some ops do is to turn by positions, or to make what turns."""
    stored = frozenset(baseline.weights())
    if is_placed(node, stored):
        return True
    acting = [op for op in ops if not passes_on(op) and not counts_alone(op, stored)]
    turning = [is_of_rotation(op) or (op is node and any(map(is_of_rotation, op.all_input_nodes))) for op in acting]
    return bool(acting) and all(turning)


def _is_another(
    node: Node, ours: Sequence[str], theirs: Sequence[str], partners: Mapping[str, str], ends: Sequence[Node]
) -> bool:
    """Whether a side that has no op here has one elsewhere: the pair is not one, and nothing is left out."""
    if not ours:
        return list(theirs) == [op_name(origin_of(node))]
    if theirs or not ends:
        return False
    above = {one.name for one in (node, *up(node))}
    return not any(partners[end.name] in above for end in ends)


def _kind(ops: Sequence[Node]) -> Kind:
    """Return the kind of mistake that it is to leave out, or to have, some ops."""
    traits = [traits_of(node) for node in ops]
    if traits and all(one.kind == "activation" for one in traits):
        return "activation"
    if traits and all(one.kind == "factor" for one in traits):
        return "scale"
    if traits and all(one.casts for one in traits):
        return "dtype"
    names = {op_name(node) for node in ops}
    return "mask" if names & _MASKING and names <= _MASKING | _CONDITIONS else "other"


def _names(ops: Sequence[Node]) -> list[str]:
    """Return what makes values: no views, no copies."""
    names = []
    for node in ops:
        if traits_of(node).casts:
            names.append(f"to {str(node.meta['val'].dtype).removeprefix('torch.')}")
        elif not passes_on(node) and op_name(node) != "getitem":
            names.append(op_name(node))
    return names


def _listed(names: Sequence[str], ops: Sequence[Node]) -> str:
    """Return names as a list; where nothing makes values, what takes some of them."""
    return ", ".join(names or [op_name(op) for op in ops if op_name(op) in ("select", "slice")]) or "nothing"
