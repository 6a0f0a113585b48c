"""Plans the cut of weights: by the plan that the model brings along, or by its graph.

A plan of transformers names modules and what is cut of their weights: rows of what makes a cut result ("colwise": the
columns of the product), columns of what reads one ("rowwise"). Everything else follows (`lay_out`). Without one,
weights are found that can be cut so: products of the same tensor whose results flow, without a rank having to read
another one's, into products that add up terms. Attention heads, pieces of a fused weight and the halves of a gate are
respected by the rules for the ops between: where a cut would not fall on their borders, it is no such flow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import UsageError
from glassengine.program.parallel.placements import ShardPlacement, name_of, shape_of
from glassengine.program.parallel.rewrite import Layout, lay_out
from glassengine.program.representation.program import Program

_WEIGHT_AT = {"linear": 1, "addmm": 2, "mm": 1}
_SOURCE_AT = {"linear": 0, "addmm": 1, "mm": 0}
_OUT_AXIS = {"linear": 0, "addmm": 1, "mm": 1}
_PASSING = frozenset(
    ["view", "_unsafe_view", "reshape", "clone", "slice", "unsqueeze", "squeeze", "mul", "add", "to", "_to_copy"]
)
_FAR = 6


@dataclass(frozen=True)
class ShardPlan:
    """What is cut, where everything lies then, and what to say of it.

    Attributes:
        layout: Where everything lies.
        source: "model", of the model's own plan, or "graph".
        notes: What stays whole although the plan names it, and the like.
    """

    layout: Layout
    source: str
    notes: tuple[str, ...] = ()


def plan_ranks(program: Program, model_plan: Mapping[str, str] | None, ranks: int) -> ShardPlan:
    """Return what each of so many ranks has of every weight.

    Args:
        program: With weights.
        model_plan: Pattern of a module or parameter -> style, as in transformers; None or empty without one.
        ranks: How many share each layer.

    Raises:
        UsageError: No layer can be shared by so many.
    """
    weights, notes = _planned(program, model_plan or {}, ranks)
    source, whole = "model", bool(notes)
    layout = lay_out(program, weights, ranks)
    if layout.gathered:
        layout, more = _without_gathers(program, weights, ranks)
        notes, whole = [*notes, *more], True
    if whole or not weights:
        # Plans that name a fused weight have its result gathered; its pieces can be cut by themselves.
        other = lay_out(program, _derived(program, ranks), ranks)
        if not other.gathered and _bytes_cut(program, other) > _bytes_cut(program, layout):
            layout, source, notes = other, "graph", []
    if not any(step is not None and step.partial for step in layout.locals.values()):
        raise UsageError(
            f"no layer of this model can be shared by {ranks} ranks",
            got="; ".join(notes) or "no products of weights that can be cut between heads or columns",
            expected="numbers of heads and hidden sizes that are multiples of the number of ranks",
            hint="fewer ranks: --tensor-parallel 2; or stages of whole layers: --pipeline-parallel N",
        )
    return ShardPlan(layout, source, tuple(notes))


def _bytes_cut(program: Program, layout: Layout) -> int:
    return sum(value.nbytes for name, value in program.weights().items() if name in layout.inputs)


def _pattern(name: str) -> str:
    """Return a name with stars for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _planned(program: Program, plan: Mapping[str, str], ranks: int) -> tuple[dict[str, ShardPlacement], list[str]]:
    values, weights, notes = program.weights(), {}, []
    for placeholder, qualified in program.weight_names().items():
        name = _pattern(qualified.removeprefix("user."))
        module, _, own = name.rpartition(".")
        style = plan.get(name) or plan.get(module)
        cut = style and _cut(style, own, tuple(values[placeholder].shape))
        if not cut:
            continue
        if cut.fits(ranks):
            weights[placeholder] = cut
        else:
            size = " + ".join(map(str, cut.blocks))
            notes.append(f"{name} stays whole on every rank: {size} is not divisible by {ranks}")
    return weights, list(dict.fromkeys(notes))


def _cut(style: str, own: str, shape: tuple[int, ...]) -> ShardPlacement | None:
    """Return how a style cuts a parameter called `own`; None where it does not."""
    columns = "colwise" in style
    if not shape or (not columns and "rowwise" not in style):
        return None
    if style == "embedding_rowwise":
        axis = 0
    elif own == "bias" or len(shape) == 1:
        if not columns:
            return None
        axis = len(shape) - 1
    else:
        axis = len(shape) - (2 if columns else 1)
    size = shape[axis]
    halves = style.startswith("packed") and size % 2 == 0
    return ShardPlacement(axis, (size // 2, size // 2) if halves else (size,))


def _without_gathers(program: Program, weights: dict[str, ShardPlacement], ranks: int) -> tuple[Layout, list[str]]:
    """Leave weights whole whose cut results every rank would need whole: key/value heads fewer than ranks, say."""
    names = program.weight_names()
    kinds = {placeholder: _pattern(names[placeholder].removeprefix("user.")) for placeholder in weights}
    layout, notes = lay_out(program, weights, ranks), []
    better = True
    while layout.gathered and better:
        better = False
        for kind in dict.fromkeys(kinds[name] for name in weights):
            fewer = {name: cut for name, cut in weights.items() if kinds[name] != kind}
            tried = lay_out(program, fewer, ranks)
            if len(tried.gathered) < len(layout.gathered):
                layout, weights, better = tried, fewer, True
                if not any(kinds.get(name) == kind for name in tried.inputs):
                    notes.append(f"{kind} stays whole on every rank: {ranks} ranks cannot share its heads or columns")
    return layout, notes


def _derived(program: Program, ranks: int) -> dict[str, ShardPlacement]:
    placeholders = set(program.weights())
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in program.graph.nodes:
        kind = name_of(node) if node.op == "call_function" else ""
        if kind in _WEIGHT_AT and getattr(node.args[_WEIGHT_AT[kind]], "name", "") in placeholders:
            groups[_same(node.args[_SOURCE_AT[kind]])].append(node)
    derived: dict[str, ShardPlacement] = {}
    taken: set[str] = set()
    for products in groups.values():
        if any(_weight(node).name in taken for node in products):
            continue
        for cuts in (_whole_blocks(products), _fused_blocks(products)):
            if all(cut.fits(ranks) for cut in cuts.values()):
                layout = lay_out(program, cuts, ranks)
                if not layout.gathered and _ends_well(program, layout, products):
                    derived |= cuts
                    taken |= set(layout.inputs)
                    break
    return derived


def _same(node: Any) -> Any:
    """Return the tensor of which `node` is a view."""
    while (
        isinstance(node, Node) and node.op == "call_function" and name_of(node) in ("view", "slice", "clone", "alias")
    ):
        node = node.args[0]
    return node


def _weight(node: Node) -> Any:
    return node.args[_WEIGHT_AT[name_of(node)]]


def _whole_blocks(products: Iterable[Node]) -> dict[str, ShardPlacement]:
    cuts = {}
    for node in products:
        axis = _OUT_AXIS[name_of(node)]
        cuts[_weight(node).name] = ShardPlacement(axis, (int(shape_of(_weight(node))[axis]),))
    return cuts


def _fused_blocks(products: Iterable[Node]) -> dict[str, ShardPlacement]:
    """Cut each piece into which a result is split by itself."""
    cuts = _whole_blocks(products)
    for node in products:
        cut = cuts[_weight(node).name]
        layer = [node]
        for _ in range(_FAR):
            pieces = next((found for found in map(_pieces, layer) if sum(found) == sum(cut.blocks)), None)
            if pieces is not None:
                cuts[_weight(node).name] = ShardPlacement(cut.axis, pieces)
                break
            layer = [user for item in layer for user in item.users if name_of(user) in _PASSING]
    return cuts


def _pieces(node: Node) -> tuple[int, ...]:
    """Return the sizes into which the last axis of a tensor is taken apart; none where it is not."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return ()
    last = len(shape_of(node)) - 1
    for user in node.users:
        if name_of(user) in ("split", "split_with_sizes"):
            return tuple(int(piece.shape[-1]) for piece in user.meta["val"] if isinstance(piece.shape[-1], int))
    slices = [user for user in node.users if name_of(user) == "slice" and user.args[1] in (last, -1)]
    slices.sort(key=lambda user: user.args[2] if isinstance(user.args[2], int) else 0)
    return tuple(int(user.meta["val"].shape[-1]) for user in slices if isinstance(user.meta["val"].shape[-1], int))


def _ends_well(program: Program, layout: Layout, products: Iterable[Node]) -> bool:
    """Whether what is cut ends in sums of terms, or in a result."""
    results = {program.node(name) for name in program.output_nodes.values()}
    if all(node in results or not results.isdisjoint(node.users) for node in products):
        return True
    return any(step is not None and step.partial and not step.offset for step in layout.locals.values())
