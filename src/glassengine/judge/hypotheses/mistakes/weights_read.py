"""Mistakes in weights: others are read, in another order, or several of them as one.

A checkpoint is converted by hand: queries, keys and values are put together head by head, where the port takes them
apart one after the other. Each of the products is wrong then, and none of them alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.mistakes.arguments import base_of, of_another_base
from glassengine.judge.hypotheses.mistakes.tensor_roles import is_taken_apart, shape_of
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, leaves_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import FAILS, Edit, factor_between
from glassengine.judge.site_pairs import passes_on
from glassengine.numerics.float64 import in_double, is_real, retarget, target_of
from glassengine.numerics.orders import called, order_between
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_LEAST_SAME, _ROUNDINGS = 2.0**-22, 16.0
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LEAST_ROW, _MOST_ROWS = 32, 8
"""Of a weight whose levels are counted."""
_PASSES, _PASSES_OF_SAME = 60, 6
"""How often a weight is read to say how it is related to another one, and to see that it is none."""
_EXCHANGED = ("with its halves exchanged", "0 and 1 are exchanged", "1 and 2 are exchanged", "0 and 2 are exchanged")
"""How it is put that a weight of several parts has two of them in each other's place."""
_SAME = 2.0**-7
"""Weights in another precision are the same."""
_MOST_LEFT = 0.5
"""Share of a difference that a factor may leave."""
_PASSES_OF_ROWS = 24
"""How often a weight is read where its rows are looked for in another one."""


def weights(question: Question) -> Iterator[Hypothesis]:
    """Yield: a weight of the op is another one on the candidate's side, and how the two are related.

    What either side makes of weights alone counts as one: the product of a weight norm that the other side has folded.
    The number of differing elements comes last: it fits any mistake in a weight.
    """
    trial, same = question.trial, _same(question)
    read = {node: question.label(node) for node in trial.inputs if node.name in question.weights}
    ours = read | {node: label for node, label in _made_of(trial.ops, read) if _joins(node)}
    theirs, others = _all_of_theirs(question), _of_model(question)
    counted = []
    for node, label in ours.items():
        value = _in_float64(trial.values[node])
        for name, tensor in theirs if is_real(value) else ():
            forms = list(_as_ours(value, tensor))
            if forms and _is_same(value, forms[0], same):
                continue  # a square one that is the same as it is, is not a transposed one that differs
            trial.budget.spend_passes(_PASSES_OF_SAME * len(forms), value)
            for held in (form for form in forms if not _is_same(value, form, same)):
                trial.budget.spend_passes(_PASSES, value)
                kind, text = _words(question, node, relation(label, name, value, held, others, same))
                found = Hypothesis(kind, text, {node: held})
                if kind != "other":
                    yield found
                elif node in read:
                    counted.append(found)
    yield from counted


def _in_float64(value: torch.Tensor) -> torch.Tensor:
    """Return a weight, or a table of whole numbers, in float64; flags and complex numbers as they are."""
    return value if value.dtype is torch.bool or value.is_complex() else value.double()


def _words(question: Question, node: Node, found: tuple[Kind, str]) -> tuple[Kind, str]:
    """Return how a weight differs: parts that have changed places are two weights, queries for keys, say."""
    is_exchanged = found[1].endswith(_EXCHANGED) and is_taken_apart(question, node)
    return ("swapped", found[1]) if is_exchanged else found


def _all_of_theirs(question: Question) -> list[tuple[str, torch.Tensor]]:
    """Return what the candidate's ops read as weights and make of these alone, by the name of the largest weight."""
    values = {name: tensor.detach() for name, tensor in question.their_weights.items()}
    found = [(name, wide) for name, tensor in values.items() if is_real(wide := _in_float64(tensor))]
    sources = {node for op in question.theirs for node in op.all_input_nodes}
    named = {node: question.held[node.name] for node in sources if node.name in question.held}
    made: dict[Node, Any] = {node: retarget(values[name]) for node, name in named.items() if name in values}
    for op, name in _made_of(question.theirs, named):
        try:
            arguments = torch.fx.node.map_arg((op.args, dict(op.kwargs)), made.__getitem__)
            args, kwargs = pytree.tree_map(retarget, arguments)
            made[op] = in_double(op, target_of(op))(*args, **kwargs)
        except (KeyError, *FAILS):
            continue
        if _joins(op) and is_real(made[op]):
            found.append((name, made[op]))
    return found


def _made_of(ops: Sequence[Node], weights: Mapping[Node, str]) -> list[tuple[Node, str]]:
    """Return the ops that read weights alone, in order, each as "op of" the largest of these."""
    found, made = dict(weights), []
    for op in ops:
        if op.all_input_nodes and all(source in found for source in op.all_input_nodes):
            found[op] = found[max(op.all_input_nodes, key=lambda one: math.prod(shape_of(one)))]
            made.append((op, f"{op_name(op).strip('_')} of {found[op]}"))
    return made


def _joins(op: Node) -> bool:
    """Whether an op makes one weight of several; a result of one alone is described as that op."""
    return len(op.all_input_nodes) > 1 and not passes_on(op)


def _of_model(question: Question) -> dict[str, torch.Tensor]:
    """Return what else could have been read that is a weight, by the last parts of its name."""
    parts = [name.split(".") for name in question.model]
    ends = {".".join(own[place:]) for own in parts for place in range(len(own))}
    return {name: tensor for name, tensor in question.others.items() if name in ends}


def every_weight(question: Question) -> Iterator[Hypothesis]:
    """Yield: several weights of an op are others, each in the place in which the candidate's op of that name reads it.

    The gates of a recurrence in another order, say: in its matrices and in its biases.
    """
    trial, others, same = question.trial, _of_model(question), _same(question)
    for node in trial.ops:
        alike = [theirs for theirs in question.theirs if theirs.target is node.target]
        if len(alike) != 1:
            continue
        edits: dict[Node, Edit] = {}
        described: dict[str, tuple[Kind, str]] = {}
        for ours, theirs in zip(leaves_of(node), leaves_of(alike[0]), strict=False):
            own = question.held.get(theirs.name) if isinstance(theirs, Node) and isinstance(ours, Node) else None
            if own is None or ours.name not in question.weights or not is_real(trial.values[ours]):
                continue
            value = trial.values[ours]
            held = next(_as_ours(value, question.their_weights[own].detach().double()), None)
            trial.budget.spend_passes(_PASSES_OF_SAME, value)
            if held is not None and not _is_same(value, held, same):
                trial.budget.spend_passes(_PASSES, value)
                edits[ours] = held
                described[own] = _words(question, ours, relation(question.label(ours), own, value, held, others, same))
        if len(edits) > 1:
            first, *rest = described
            text = f"{described[first][1]}; {', '.join(name.rpartition('.')[2] for name in rest)} with it"
            yield Hypothesis(described[first][0], text, edits)


def another_module(question: Question) -> Iterator[Hypothesis]:
    """Yield: all weights of the piece are those of another layer, or of another module of the same kind: a norm."""
    held = [node for node in question.trial.inputs if node.name in question.full]
    names = [question.full[node.name] for node in held]
    modules = {module for name in question.model for module in _modules_of(name)}
    paths = _modules_of(names[0]) if len(held) > 1 else []
    owners = [own for own in paths if all(name.startswith(f"{own}.") for name in names)]
    for own in owners:
        alike = [other for other in modules - {own} if other + names[0].removeprefix(own) in question.model]
        around = set(_modules_of(f"{own}."))
        for other in sorted(alike, key=lambda other: (-len(around.intersection(_modules_of(f"{other}."))), other)):
            values = [question.model.get(other + name.removeprefix(own)) for name in names]
            edits = {n: v.detach().double() for n, v in zip(held, values, strict=True) if v is not None}
            if [v.shape for v in edits.values()] == [question.trial.values[n].shape for n in held]:
                what = "layer" if _NUMBER.sub("", other) == _NUMBER.sub("", own) else "module"
                # A list of layers has no weights of its own: its layer is named.
                read = ".".join([other, *itertools.takewhile(str.isdigit, owners[-1].removeprefix(own).split(".")[1:])])
                yield Hypothesis("swapped", f"the weights of another {what} are read: of {read}", edits)


def _modules_of(name: str) -> list[str]:
    """Return the paths of the modules that a weight is in, the outermost first."""
    return list(itertools.accumulate(name.split(".")[:-1], lambda path, part: f"{path}.{part}"))


def relation(
    name: str,
    own: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    other_weights: Mapping[str, torch.Tensor],
    same: float = _SAME,
) -> tuple[Kind, str]:
    """Return (kind, words) for how the candidate's weight differs from the baseline's of the same op.

    Args:
        name: Of the baseline's weight.
        own: The candidate's name of it.
        ours: float64.
        theirs: float64, same shape.
        other_weights: The baseline's other weights by name.
        same: Share of its size by which a number may differ.
    """
    there = name if f".{own}".endswith(f".{name}") else f"{own} (here {name})"
    alike = ((n, t.detach().double()) for n, t in other_weights.items() if n != name and t.shape == ours.shape)
    twin = next((n for n, tensor in alike if _is_same(tensor, theirs)), None)
    if twin is not None and (own.endswith(twin) or twin.endswith(own)):
        return "swapped", f"{own} is read instead of {name}"
    if twin is not None:
        return "swapped", f"{there} holds the weight of {twin}"
    if not bool(theirs.any()):
        return ("bias missing" if ours.dim() == 1 else "other"), f"{there} is zero"
    for axis in range(ours.dim()):
        order = order_between(ours, theirs, axis, _SAME)
        if order is not None:
            kind, how = called(order)
            what = ("rows", "columns")[axis] if ours.dim() == 2 else "elements" if ours.dim() == 1 else f"axis {axis}"
            if bool((order.diff() == -1).all()) and ours.dim() > 2:
                return kind, f"{there}: kernel flipped along axis {axis}"
            return kind, f"{there}: {what} {how}"
    spatial = tuple(range(2, ours.dim()))
    if len(spatial) > 1 and _is_same(ours.flip(spatial), theirs):
        return "permuted", f"{there}: kernel flipped"
    for a in range(ours.dim()):
        for b in range(a):
            if ours.shape[a] == ours.shape[b] and _is_same(ours.transpose(a, b), theirs):
                return "transposed", f"{there}: transposed (axes {b} and {a})"
        for first, last, where in ((ours, theirs, "later"), (theirs, ours, "earlier")):
            rest, start = (tensor.narrow(a, at, max(0, ours.shape[a] - 1)) for tensor, at in ((first, 1), (last, 0)))
            if ours.shape[a] > 2 and _is_same(rest, start) and not _is_same(rest, first.narrow(a, 0, rest.shape[a])):
                return "permuted", f"{there} begins one {where} along axis {a}"
    factor = factor_between(ours, theirs)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if torch.equal(ours.float().to(dtype).double(), theirs):
            return "dtype", f"{there} is rounded to {str(dtype).removeprefix('torch.')}"
    if ours.numel() == 1:
        return "scale", f"{there} is {float(theirs):.6g}, not {float(ours):.6g}"
    offset, allowed = float((theirs - ours).mean()), _MOST_LEFT * float((theirs - ours).norm())
    changed = {f"scaled by {factor:.6g}": ours * factor, f"the baseline's plus {offset:.6g}": ours + offset}
    for text, made in changed.items():
        # A change of the weight explains most of a difference: a factor of 0.99994 need not.
        if _is_same(made, theirs, same) and float((theirs - made).norm()) <= allowed:
            return "scale", f"{there} is {text}"
    here, other = base_of(ours), base_of(theirs)
    if here is not None and other is not None:
        return "position", of_another_base(here, other)
    levels = _levels(theirs)
    if levels is not None and (_levels(ours) or levels + 1) > levels:
        return "dtype", f"{there} has {levels} levels in a row: it is quantized"
    apart = (ours - theirs).abs()
    count = int((~(apart <= _SAME * ours.abs())).sum())
    if count:
        place = int(apart.nan_to_num().argmax())
        most = f"{float(theirs.flatten()[place]):.4g} for {float(ours.flatten()[place]):.4g}"
        return "other", f"{there} differs in {count} of {ours.numel()} elements ({most})"
    share = float((apart / ours.abs().clamp_min(1e-300)).max())
    return "dtype", f"{there} differs by {share:.2g} of a number at most: it was rounded"


def _levels(weight: torch.Tensor) -> int | None:
    """Return how many values a row of a quantized weight has at most; None where it has too many to be one."""
    if weight.dim() < 2 or weight[0].numel() < _LEAST_ROW or not bool(weight.isfinite().all()):
        return None
    rows = weight[:_MOST_ROWS].reshape(min(len(weight), _MOST_ROWS), -1)
    levels = max(int(torch.unique(row).numel()) for row in rows)
    return levels if 2 < levels <= min(256, rows.shape[1] // 2) else None


def _as_ours(ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a weight of the candidate in the shape of the baseline's: as it is, transposed, with other axes of one."""
    if theirs.shape == ours.shape:
        yield theirs
    if theirs.dim() == 2 and theirs.T.shape == ours.shape:
        yield theirs.T
    if theirs.shape != ours.shape and theirs.squeeze().shape == ours.squeeze().shape:
        yield theirs.reshape(ours.shape)
    # A table without its first rows, or its last ones, beside those: the port keeps them elsewhere.
    missing = [a - b for a, b in zip(ours.shape, theirs.shape, strict=False)]
    differing = [axis for axis, number in enumerate(missing) if number]
    if ours.dim() == theirs.dim() > 1 and len(differing) == 1 and missing[differing[0]] in (1, 2):
        (axis,) = differing
        yield torch.cat([ours.narrow(axis, 0, missing[axis]), theirs], axis)
        yield torch.cat([theirs, ours.narrow(axis, theirs.shape[axis], missing[axis])], axis)


def _is_same(ours: torch.Tensor, theirs: torch.Tensor, same: float = _SAME) -> bool:
    if ours.shape != theirs.shape:
        return False
    scale = float(ours.abs().max()) if ours.numel() else 0.0
    return bool(((ours - theirs).abs() <= same * ours.abs() + min(1e-6, same) * scale).all())


def _same(question: Question) -> float:
    """Return by how much weights may differ that are the same: as much as the op rounds."""
    return min(_SAME, max(_LEAST_SAME, _ROUNDINGS * question.noise))


def packed(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the candidate keeps as one weight has the rows of several of the baseline's in another order."""
    trial = question.trial
    edits: dict[Node, Edit] = {}
    told: list[tuple[Kind, str]] = []
    products: set[Node] = set()
    # Matrices first: the biases are those of their products.
    for name, tensor in sorted(question.their_weights.items(), key=lambda item: -item[1].dim()):
        held = _held_apart(question, tensor, products) if is_real(tensor) else []
        if not held or any(node in edits for node in held):
            continue
        theirs, ours = tensor.detach().double(), torch.cat([trial.values[node] for node in held])
        trial.budget.spend_passes(_PASSES_OF_ROWS, ours)
        order = order_between(ours, theirs, 0, _SAME)
        if order is None:
            continue
        products.update(user for node in held for user in node.users if user in trial.values)
        sizes = [trial.values[node].shape[0] for node in held]
        kind, how = called(order)
        labels = ", ".join(question.label(node) for node in held)
        told.append(("swapped" if _are_exchanged(order, sizes) else kind, f"{name} holds the rows of {labels} {how}"))
        edits |= zip(held, torch.split(theirs, sizes), strict=True)
    if told:
        yield Hypothesis(*told[0], edits)


def _held_apart(question: Question, theirs: torch.Tensor, products: Collection[Node]) -> list[Node]:
    """Return the weights of the piece that have the rows of one of the candidate's, in the order in which they run.

    Of biases, only those of `products`, which read matrices that have been found.
    """
    values = question.trial.values
    order = {op: place for place, op in enumerate(question.trial.ops)}
    found = [
        node
        for node in question.trial.inputs
        if node.name in question.weights and is_real(values[node])
        if values[node].dim() == theirs.dim() > 0 and values[node].shape[1:] == theirs.shape[1:]
        if theirs.dim() > 1 or any(user in products for user in node.users)
    ]
    found.sort(key=lambda node: min((order[user] for user in node.users if user in order), default=0))
    return found if len(found) > 1 and sum(len(values[node]) for node in found) == len(theirs) else []


def _are_exchanged(order: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether whole weights have changed places: keys stand where queries should."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    blocks = torch.split(order, list(sizes))
    return all(int(block[0]) in starts and bool((block.diff() == 1).all()) for block in blocks)
