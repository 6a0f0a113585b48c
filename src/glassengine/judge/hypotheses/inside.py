"""Inside of a branch, a loop or a function of both sides: which op of it makes something else from the same inputs.

A function of an ONNX file is judged by its results. Where these are wrong, and where the two sides differ in a branch
that no input took, both are interpreted once more in float64, on the same inputs, and what their ops make is compared:
an op of the baseline is wrong if no op of the candidate makes what it makes, and none makes what anything below it
makes. So a right body written with other ops is not a difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.trial import FAILS
from glassengine.judge.replay.values import called
from glassengine.numerics.float64 import is_real, retarget, target_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.onnx.control import LABEL, NAME, Step, Tracer
from glassengine.program.onnx.function import Composite, thresholds_of
from glassengine.program.representation.naming import op_name

_ROUNDINGS = 8.0
"""Two values are one, computed in different ways, if they are apart by so many roundings of the coarser weights."""
_EXACT = 2.0**-40
"""The same where nothing was rounded: both sides run in float64, and their weights are what they are."""
_OTHERWISE = "its ops make the same, and its results are put together in another way"
_ROWS, _APART, _SAME_LEAF = 1024, 1e-3, 1e-5
"""Values that trees are tried on, their relative distance from a threshold, and that of results that are the same."""
_MOST_SHOWN = 4
"""Elements of a tensor that is shown with its numbers."""

Known = Callable[[Node], Any]
"""Gives the value of a node; raises KeyError where there is none."""


@torch.no_grad()
def inside_of(ours: Node, theirs: Node, known: tuple[Known, Known], dtypes: Collection[torch.dtype]) -> Inside | None:
    """Return where the functions part that two nodes are results of; None where these are none, or do not part.

    Args:
        ours: Of the baseline.
        theirs: Its counterpart.
        known: Gives values of the baseline's program, and of the candidate's.
        dtypes: Floating dtypes of both.
    """
    ops = called(ours)[0], called(theirs)[0]
    if not all(isinstance(op.target, Composite) for op in ops) or ops[0].target != ops[1].target:
        return None
    try:
        left, right = (_traced(op, value) for op, value in zip(ops, known, strict=True))
    except (KeyError, *FAILS):
        return None
    if not left.steps:
        return None
    found = _apart(left, right, _ROUNDINGS * max(map(unit_roundoff, dtypes), default=_EXACT))
    if found is None:
        # Less than the rounding of a weight matters only if something is known to be wrong.
        found = _apart(left, right, _EXACT)
        return found if found is not None and found.is_taken else None
    return found


@dataclass(frozen=True)
class Inside:
    """Where two functions part.

    Attributes:
        text: What is different, in words.
        is_taken: Whether the input led there.
    """

    text: str
    is_taken: bool


@dataclass(frozen=True)
class _Run:
    """A function that ran: its name, its ops and its results."""

    name: str
    steps: Sequence[Step]
    results: tuple[Tensor, ...]
    is_whole: bool


def _traced(op: Node, known: Known) -> _Run:
    """Return what a function made of what it is given, in float64; raises KeyError where that is not known."""

    def value(node: Node) -> Any:
        try:
            return known(node)
        except KeyError:
            if node.op != "call_function":
                raise
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
        return target_of(node)(*args, **kwargs)

    assert isinstance(op.target, Composite)
    args, kwargs = pytree.tree_map(retarget, torch.fx.node.map_arg((op.args, dict(op.kwargs)), value))
    tracer = Tracer()
    found = pytree.tree_leaves(op.target.rounded(tracer)(*args, **kwargs))
    results = tuple(leaf for leaf in found if isinstance(leaf, Tensor))
    return _Run(op.target.__name__, tracer.steps, results, tracer.is_whole)


def _apart(left: _Run, right: _Run, apart: float) -> Inside | None:
    names = [[step.label.partition(" ")[2] or step.node.name for step in run.steps] for run in (left, right)]
    if names[0] == names[1] and any(LABEL in step.node.meta for step in left.steps):
        # One file is the other one, edited: each op has its counterpart in its place.
        pairs = enumerate(zip(left.steps, right.steps, strict=True))
        number = next((number for number, (a, b) in pairs if not _all_same(a.made, b.made, apart)), None)
        if number is not None:
            return _described(left, right, number, number)
        return None if _all_same(left.results, right.results, apart) else Inside(_OTHERWISE, True)
    of_left, of_right = _paired(left, right, apart)
    for is_taken in (True, False):
        place = _first(left, of_left, is_taken)
        if place is not None:
            return _described(left, right, place, _first(right, of_right, is_taken))
    return None if _all_same(left.results, right.results, apart) else Inside(_of_results(left, right), True)


def _paired(left: _Run, right: _Run, apart: float) -> tuple[set[int], set[int]]:
    """Return the places of steps of each run that make what a step of the other one makes."""
    known: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, step in enumerate(right.steps):
        known[_kind(step.made)].append(place)
    sizes = [_size(step.made) for step in right.steps]
    pairs = []
    for place, step in enumerate(left.steps):
        size = _size(step.made)
        for other in known.get(_kind(step.made), ()):
            is_like = abs(sizes[other] - size) <= 2 * apart * max(size, sizes[other])
            theirs = right.steps[other]
            if is_like and step.is_taken == theirs.is_taken and _all_same(step.made, theirs.made, apart):
                pairs.append((place, other))
    return {place for place, _ in pairs}, {other for _, other in pairs}


def _first(run: _Run, paired: Collection[int], is_taken: bool) -> int | None:
    """Return the place of the first step of whose results nothing has a counterpart, nor what is made of them."""
    # By identity.
    made_by = {id(tensor): place for place, step in enumerate(run.steps) for tensor in step.made}
    meets: set[int] = set()
    for place in reversed(range(len(run.steps))):
        step = run.steps[place]
        # Values that are so many and so different are made twice by chance only if they mean the same.
        is_telling = place in paired and any(is_real(made) and torch.unique(made).numel() > 2 for made in step.made)
        if place in meets or is_telling:
            meets |= {place, *(made_by[id(tensor)] for tensor in step.read if id(tensor) in made_by)}
    for place, step in enumerate(run.steps):
        if place not in paired and place not in meets and step.made and step.is_taken == is_taken:
            return place
    return None


def _described(left: _Run, right: _Run, place: int, other: int | None) -> Inside:
    step, theirs = left.steps[place], None if other is None else right.steps[other]
    label = _label(step)
    if theirs is None:
        said = _of_results(left, right)
    elif step.node.target != theirs.node.target:
        said = f"{label} in the baseline, {_label(theirs)} in the candidate"
    else:
        said = f"{label}: {_of_arguments(step, theirs) or 'makes something else from the same inputs'}"
    branch = "" if step.is_taken else " in the branch that no input takes"
    return Inside(f"inside of {left.name}{branch}: {said}", step.is_taken)


def _label(step: Step) -> str:
    return step.label if LABEL in step.node.meta else op_name(step.node)


def _of_results(left: _Run, right: _Run) -> str:
    """Say how two runs differ whose ops make the same."""
    ours, theirs = (Counter(step.node for step in run.steps if step.is_taken) for run in (left, right))
    if ours and theirs and max(ours.values()) != max(theirs.values()) and left.is_whole and right.is_whole:
        return (
            f"it goes round {max(ours.values())} times in the baseline, {max(theirs.values())} times in the candidate"
        )
    kinds = [Counter(op_name(node) for node in found) for found in (ours, theirs)]
    for name in kinds[0].keys() | kinds[1].keys():
        if not kinds[1][name] or not kinds[0][name]:
            return f"{name} is only {'in the baseline' if kinds[0][name] else 'in the candidate'}"
    return _OTHERWISE


def _of_arguments(ours: Step, theirs: Step) -> str | None:
    """Say which argument of two calls of one op is another: a number, an attribute, a weight of the body."""
    found = []
    read = (list(_leaves(ours)), list(_leaves(theirs)))
    forms = [[isinstance(leaf, Node) for _, leaf in leaves] for leaves in read]
    if forms[0] != forms[1]:
        return "it has other inputs or attributes in the candidate"
    tensors = zip(ours.read, theirs.read, strict=False)
    for (name, a), (_, b) in zip(*read, strict=True):
        if not isinstance(a, Node):
            if a != b:
                found.append(f"{name}: {a} in the baseline, {b} in the candidate")
            continue
        x, y = next(tensors, (None, None))
        if x is None or y is None or (x.shape == y.shape and _is_same(x, y, _EXACT)):
            continue
        what = str(a.meta.get(NAME, name))
        if max(x.numel(), y.numel()) <= _MOST_SHOWN:
            here, there = _numbers(x, y)
            found.append(f"{what}: {here} in the baseline, {there} in the candidate")
        else:
            found.append(f"{what} is another in the candidate")
    return "; ".join(found) or None


def _leaves(step: Step) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument as the graph has it; what has none, by its place."""
    flat, _ = pytree.tree_flatten_with_path((step.node.args, dict(step.node.kwargs)))
    for path, leaf in flat:
        keys = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
        if leaf is not None and not isinstance(leaf, torch.dtype):
            yield keys[1] if keys[0] == "1" else f"input {keys[1]}", leaf


def _numbers(*tensors: Tensor) -> list[str]:
    """Return tensors with as many digits as tell them apart."""
    found: list[str] = []
    for digits in (5, 7, 9, 17):
        values = [[f"{value:.{digits}g}" for value in tensor.double().flatten().tolist()] for tensor in tensors]
        found = [own[0] if len(own) == 1 else f"[{', '.join(own)}]" for own in values]
        if len(set(found)) == len(found):
            break
    return found


def _kind(made: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.is_floating_point()) for tensor in made)


def _size(made: Sequence[Tensor]) -> float:
    return sum(float(tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).sum()) for tensor in made)


def _all_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], apart: float) -> bool:
    return len(ours) == len(theirs) and all(_is_same(a, b, apart) for a, b in zip(ours, theirs, strict=True))


def _is_same(ours: Tensor, theirs: Tensor, apart: float) -> bool:
    if ours.shape != theirs.shape:
        return False
    a, b = ours.double(), theirs.double()
    if not ours.is_floating_point() or not theirs.is_floating_point():
        return torch.equal(a, b)
    size = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=apart, atol=apart * size, equal_nan=True)


def trees_differ(ours: Node, theirs: Node) -> str | None:
    """Return what to say of two calls of trees that make different results of some values; None where none do.

    Values are around all thresholds of both: the inputs of a check reach few of the leaves.
    """
    here, there = thresholds_of(ours.target), thresholds_of(theirs.target)
    if not here or not there:
        return None
    probe = _around([*here, *there])
    calls: list[tuple[Any, dict[str, Any]]] = [(node.target, dict(node.kwargs)) for node in (ours, theirs)]
    try:
        found = [pytree.tree_leaves(target(probe, **kwargs)) for target, kwargs in calls]
    except FAILS:
        return None
    for one, other in zip(*found, strict=False):
        if not is_real(one) or not isinstance(other, Tensor):
            continue  # of labels two may have as many votes
        rows = len(probe)
        if one.shape == other.shape:
            apart = (one.double() - other.double()).abs().reshape(rows, -1).amax(1)
            rows = int((apart > _SAME_LEAF * max(float(one.double().abs().max()), 1e-30)).sum())
        if rows:
            return f"the trees differ: {rows} of {len(probe)} rows around their thresholds end in another leaf"
    return None


def _around(thresholds: list[tuple[int, float]]) -> torch.Tensor:
    """Return rows whose values are a little below or above thresholds of their features."""
    generator = torch.Generator().manual_seed(0)
    width = max(feature for feature, _ in thresholds) + 1
    columns = []
    for feature in range(width):
        own = [value for other, value in thresholds if other == feature] or [0.0]
        values = torch.tensor(own)[torch.randint(len(own), (_ROWS,), generator=generator)]
        sign = torch.randint(2, (_ROWS,), generator=generator) * 2.0 - 1
        columns.append(values + sign * _APART * values.abs().clamp(min=1e-2))
    return torch.stack(columns, 1)
