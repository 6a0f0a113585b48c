"""Pairs the op sites of two programs, and their results; walks the ops between the tensors that both have.

Within each call of each module the two op sequences are aligned (longest matching blocks, first by op, shape and
literal arguments, then by op and shape), so that an extra op of one side shifts no name. Results of the
programs are counterparts by name, and what one op left over feeds is fed by its counterpart: an op that was replaced by
another one still has one. The fingerprint says whether a pair is computed the same way; it is kept with the pair, not
required, because a mistake changes it.

Two implementations need not call alike what they return: `logits` is `softmax_1` in an ONNX file, and has no name where
a module returns a tensor. A result that went unpaired would go unjudged, and the last op of a model with it.
"""

from __future__ import annotations

import heapq
import inspect
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.arrangements import Arrangement
from glassengine.numerics.float64 import is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import STATE
from glassengine.sites import Site

_NEAR = 0.1
"""Distance of two results that may be the same one, relative to its size; whether it is wrong is judged later."""
_SOON = 4
"""Steps below a tensor within which what is done later is done."""
_OTHER_VALUES = frozenset({"_conj", "_neg_view"})
"""Views whose elements are other ones than those of what they are views of."""
_AS_NEAR = 4.0
"""Results whose distances differ by no more than this factor are as near as each other: both may be rounding."""


_NUMBER = re.compile(r"(?<![^.@])\d+(?![^.@:/])")


@dataclass(frozen=True)
class SitePair:
    """One op of the baseline and its counterpart. `difference` describes arguments that are written differently.

    `method` is "name+fingerprint", "name" (same place in the same module call), "output" (same result of the program),
    "consumer" (both feed the same argument of a pair) or "content" (what they compute). `arrangement` says how the
    candidate's tensor becomes one of the baseline's dimensions, where these differ.
    """

    baseline: Site
    candidate: Site
    method: str
    difference: str | None
    arrangement: Arrangement | None = None


def pair_sites(baseline: Program, candidate: Program) -> tuple[list[SitePair], list[Site], list[Site]]:
    """Return (pairs, op sites only in the baseline, op sites only in the candidate), in graph order."""
    left, right = _by_call(baseline), _by_call(candidate)
    nodes = baseline.nodes, candidate.nodes
    by_node: dict[str, SitePair] = {}
    for call, ours in left.items():
        for a, b in _align(ours, right.get(call, []), nodes):
            method = "name+fingerprint" if a.fingerprint == b.fingerprint else "name"
            by_node[a.name] = SitePair(a, b, method, difference(nodes[0][a.node], nodes[1][b.node]))
    _pair_outputs(baseline, candidate, by_node)
    _pair_by_consumer(baseline, candidate, by_node)
    taken = {pair.candidate.name for pair in by_node.values()}
    ops = [site for site in baseline.sites if site.kind == "op"]
    pairs = [by_node[site.name] for site in ops if site.name in by_node]
    only_left = [site for site in ops if site.name not in by_node]
    only_right = [site for site in candidate.sites if site.kind == "op" and site.name not in taken]
    return pairs, only_left, only_right


def _pair_outputs(baseline: Program, candidate: Program, pairs: dict[str, SitePair]) -> None:
    """An op behind the last one of a result (a clamp, say) is what that result has become."""
    for name, node in baseline.output_nodes.items():
        ours, theirs = baseline.sites.op_of(node), candidate.sites.op_of(candidate.output_nodes.get(name))
        if ours is None or theirs is None:
            continue
        known = pairs.get(ours.name)
        if known is None or known.candidate.name != theirs.name:
            how = difference(baseline.node(ours.node), candidate.node(theirs.node))
            pairs[ours.name] = SitePair(ours, theirs, "output", how)


def _pair_by_consumer(baseline: Program, candidate: Program, pairs: dict[str, SitePair]) -> None:
    """Pair what is left over with what feeds the same argument of a counterpart, last ops first."""
    counterpart = {pair.baseline.node: candidate.node(pair.candidate.node) for pair in pairs.values()}
    taken = {pair.candidate.node for pair in pairs.values()}
    for node in reversed(baseline.graph.nodes):
        ours = baseline.sites.op_of(node.name)
        if ours is None or ours.name in pairs:
            continue
        for user in node.users:
            if user.name not in counterpart:
                continue
            theirs = _fed(user, node, counterpart[user.name])
            # A draw is no counterpart of what is computed.
            is_alike = theirs is not None and traits_of(theirs).is_arbitrary == traits_of(node).is_arbitrary
            site = candidate.sites.op_of(theirs.name) if theirs is not None and is_alike else None
            if site is not None and site.node not in taken and _kind(site)[1:] == _kind(ours)[1:]:
                counterpart[node.name] = there = candidate.node(site.node)
                pairs[ours.name] = SitePair(ours, site, "consumer", difference(node, there))
                taken.add(site.node)
                break


def _fed(user: Node, node: Node, counterpart: Node) -> Node | None:
    """Return the argument of `counterpart` that stands where `user` has `node`."""
    ours, theirs = (pytree.tree_flatten((n.args, dict(n.kwargs)))[0] for n in (user, counterpart))
    if len(ours) != len(theirs):
        return None
    fed = theirs[ours.index(node)]
    return fed if isinstance(fed, Node) else None


def _by_call(program: Program) -> dict[str, list[Site]]:
    table: dict[str, list[Site]] = {}
    for site in program.sites:
        if site.kind == "op":
            table.setdefault(site.name.rpartition("/")[0], []).append(site)
    return table


def _align(
    ours: Sequence[Site], theirs: Sequence[Site], nodes: tuple[dict[str, Node], dict[str, Node]]
) -> list[tuple[Site, Site]]:
    strict = [[(*_kind(s), _literals(nodes[side][s.node])) for s in sites] for side, sites in enumerate((ours, theirs))]
    if len(ours) == len(theirs) and all(_kind(a)[1:] == _kind(b)[1:] for a, b in zip(ours, theirs, strict=True)):
        # An op that another one took the place of; but no other order, in which more of the ops are the same.
        num_replaced = sum(a.op != b.op for a, b in zip(ours, theirs, strict=True))
        blocks = SequenceMatcher(None, [s.op for s in ours], [s.op for s in theirs], autojunk=False)
        if num_replaced <= len(ours) - sum(block.size for block in blocks.get_matching_blocks()):
            return list(zip(ours, theirs, strict=True))
    pairs: list[tuple[Site, Site]] = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, strict[0], strict[1], autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += zip(ours[i1:i2], theirs[j1:j2], strict=True)
        elif tag == "replace":
            loose = [[_kind(s) for s in part] for part in (ours[i1:i2], theirs[j1:j2])]
            for block in SequenceMatcher(None, loose[0], loose[1], autojunk=False).get_matching_blocks():
                for k in range(block.size):
                    pairs.append((ours[i1 + block.a + k], theirs[j1 + block.b + k]))
    return pairs


def _kind(site: Site) -> tuple[Any, ...]:
    """What two ops must share to be counterparts: another precision is one difference, another shape is another op."""
    return site.op, site.shape, "float" if "float" in site.dtype else site.dtype


def _literals(node: Node) -> str:
    return str([_literal(a) for a in node.args] + [(k, _literal(v)) for k, v in sorted(node.kwargs.items())])


def _literal(value: Any) -> Any:
    if isinstance(value, Node):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in value]
    return str(value)


def difference(ours: Node, theirs: Node) -> str | None:
    """Describe literal arguments that differ, e.g. "scale: 0.25 in the baseline, 0.5 in the candidate"."""
    if ours.target != theirs.target:
        return f"op: {ours.target} in the baseline, {theirs.target} in the candidate"
    names = argument_names(ours.target)
    schema = getattr(ours.target, "_schema", None)
    defaults = {one.name: _literal(one.default_value) for one in schema.arguments} if schema else {}

    def bound(node: Node) -> dict[str, Any]:
        positional = {names[i] if i < len(names) else str(i): _literal(a) for i, a in enumerate(node.args)}
        return defaults | positional | {key: _literal(value) for key, value in node.kwargs.items()}

    a, b = bound(ours), bound(theirs)
    differing = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    if not differing:
        return None
    return "; ".join(f"{k}: {_shown(a, k)} in the baseline, {_shown(b, k)} in the candidate" for k in differing)


def argument_names(target: Any) -> list[str]:
    """Return the names of an op's positional arguments, in order; that of any number of tensors is the last."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        # An op of an ONNX file is a function of ours.
        parameters = inspect.signature(getattr(target, "function", target)).parameters.values()
    except (TypeError, ValueError):
        return []
    open_ended = [place for place, one in enumerate(parameters) if one.kind is one.VAR_POSITIONAL]
    return [one.name for one in parameters][: open_ended[0] + 1 if open_ended else None]


def _shown(arguments: dict[str, Any], name: str) -> str:
    text = str(arguments.get(name))
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return "default" if text in ("None", "[]") else text


def paired_results(baseline: Program, candidate: Program) -> dict[str, str]:
    """Return node of `baseline` -> node of `candidate` that makes the same result.

    Caches go together by name alone, and the rest in order only where both sides have as many left.
    """
    # What a program remembers for its next step is no result.
    left, right = (
        {name: node for name, node in program.output_nodes.items() if not name.startswith(STATE)}
        for program in (baseline, candidate)
    )
    paired = {node: right[name] for name, node in left.items() if name in right}
    ours = [node for name, node in left.items() if name not in right and name not in baseline.caches.values()]
    theirs = [node for name, node in right.items() if name not in left and name not in candidate.caches.values()]
    both = (ours, baseline), (theirs, candidate)
    if len(ours) == len(theirs):
        paired |= in_order(*({name: program.node(name).meta["val"] for name in names} for names, program in both))
    return paired


def in_order(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return which results of unrelated names belong together: name of the one side -> of the other.

    As many on both sides, and floats in the places of floats: by place. Else each goes to the first free one that is
    like it: of its shape, of its number of elements, or at least floating as it is. A single result of either side that
    is like none goes to the first.

    Args:
        ours: Name -> result, or the fake of one.
        theirs: Likewise.
    """
    if len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
        if all(is_real(ours[a]) == is_real(theirs[b]) for a, b in pairs):
            return dict(pairs)
    paired: dict[str, str] = {}
    is_one = min(len(ours), len(theirs)) == 1
    likes = (_shape, torch.Tensor.numel, is_real) if is_one or len(ours) == len(theirs) else (_shape, torch.numel)
    for like in likes:
        for name, value in ours.items():
            if name in paired or not isinstance(value, torch.Tensor):
                continue
            free = [(other, made) for other, made in theirs.items() if other not in paired.values()]
            alike = (o for o, made in free if is_real(made) == is_real(value) and like(made) == like(value))
            other = next(alike, None)
            if other is not None:
                paired[name] = other
    return paired if paired or not is_one else {next(iter(ours)): next(iter(theirs))}


def by_value(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return which results of unrelated names belong together: those near each other, the others as `in_order` says.

    A port may return the states of all layers where the baseline returns the last. Of equal ones it is the last, which
    all layers have made. Where both sides return as many, a result in the same place comes before one about as near.

    Args:
        ours: Name -> result, or the fake of one.
        theirs: Name -> result.
    """
    apart: dict[tuple[str, str], float] = {}
    for name, value in ours.items():
        for other, made in reversed(list(theirs.items())):
            both = type(value) is torch.Tensor and is_real(value) and is_real(made)
            if both and _shape(value) == _shape(made):
                error = float((made.double() - value.double()).norm())
                apart |= {(name, other): error} if error <= _NEAR * float(value.double().norm()) else {}
    paired: dict[str, str] = {}
    for name, other in zip(ours, theirs, strict=True) if len(ours) == len(theirs) else ():
        nearest = min((error for (one, _), error in apart.items() if one == name), default=math.inf)
        if apart.get((name, other), math.inf) <= _AS_NEAR * nearest < math.inf:
            paired[name] = other
    for name, other in sorted(apart, key=apart.__getitem__):
        if name not in paired and other not in paired.values():
            paired[name] = other
    left = {name: value for name, value in ours.items() if name not in paired}
    unpaired = {name: made for name, made in theirs.items() if name not in paired.values()}
    return paired | (in_order(left, unpaired) if left and unpaired else {})


def _shape(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape)


def ports(program: Program) -> dict[str, str]:
    """Return placeholder -> name of the input."""
    return {port.node: port.name for port in program.inputs}


def operands_of(node: Node) -> list[Node]:
    """Return the nodes among the arguments of an op, in their order; one that it reads twice comes twice."""
    return [leaf for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, Node)]


def region_of(node: Node, found: Collection[str]) -> tuple[list[Node], list[Node]]:
    """Return the ops that `node` is made by from what has counterparts, itself last, and what these ops read of that.

    Args:
        node: An op.
        found: Names of nodes that have counterparts, `node` among them or not.
    """
    ops: list[Node] = []
    ends: list[Node] = []
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        known = waiting.pop()
        if known in seen or isinstance(known.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
            continue
        seen.add(known)
        if known is not node and known.name in found:
            ends.append(known)
        elif known.op == "call_function":
            ops.append(known)
            waiting += reversed(known.all_input_nodes)
    return ops[::-1], ends


def walk(
    start: Iterable[Node], following: Callable[[Node], Iterable[Node]], depth: int | None = None
) -> Iterator[Node]:
    """Yield the nodes that at most `depth` steps lead to, nearest first, each once, without those at the start."""
    layer = list(start)
    known = set(layer)
    while layer and depth != 0:
        layer = list(dict.fromkeys(other for node in layer for other in following(node) if other not in known))
        known.update(layer)
        yield from layer
        depth = None if depth is None else depth - 1


def up(node: Node, depth: int | None = None) -> Iterator[Node]:
    """Yield the nodes that `node` is made of, nearest first, up to `depth` steps above it; None for all."""
    return walk([node], lambda one: one.all_input_nodes, depth)


def down(start: Iterable[Node], within: Container[Node] | None = None, depth: int | None = None) -> Iterator[Node]:
    """Yield the nodes that are made of some nodes, nearest first, of a region only where one is given."""
    return walk(start, lambda one: (user for user in one.users if within is None or user in within), depth)


def ancestors(node: Node, depth: int | None = None) -> set[Node]:
    """Return the nodes that `node` is made of, up to `depth` steps above it; None for all."""
    return set(up(node, depth))


def passes_on(node: Node) -> bool:
    """Whether a node makes no values of its own: a cast, a view or a copy."""
    traits = traits_of(node)
    return traits.casts or traits.kind in ("copy", "reshape") or (is_view(node) and op_name(node) not in _OTHER_VALUES)


def passed_on(node: Node) -> Iterator[Node]:
    """Yield the nodes whose values a node passes on, the nearest first."""
    while passes_on(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def origin_of(node: Node, known: Collection[str] = ()) -> Node:
    """Return the node whose values a node passes on: itself, where it makes its own; nothing beyond what is `known`."""
    while passes_on(node) and node.args and isinstance(node.args[0], Node) and node.args[0].name not in known:
        node = node.args[0]
    return node


def readers_of(node: Node, is_passed: Callable[[Node], bool] | None = None) -> list[Node]:
    """Return the ops that read the values of a node: of what passes these on (`passes_on`), those that read that."""
    through = is_passed or passes_on
    below = walk([node], lambda one: one.users if one is node or through(one) else ())
    return [one for one in below if one.op == "call_function" and not through(one)]


def maker_of(node: Node) -> Node | None:
    """Return the op of several results that a value is one of: the norm, whose result is the first."""
    return node.all_input_nodes[0] if op_name(node) == "getitem" else None


def passed_by(node: Node, there: Node, counterparts: Mapping[str, str]) -> Node:
    """Return the first op of the region that makes `node`, of which `there` is what goes in.

    Where none reads that, it is the op that makes `node`: the norm, whose result is the first of several.
    """
    ops, _ = region_of(node, counterparts)
    makers = (op for op in ops if not passes_on(op))
    sources = ((op, {_name_there(source, counterparts) for source in op.all_input_nodes}) for op in makers)
    return next((op for op, names in sources if there.name in names), maker_of(node) or node)


def done_later(node: Node, there: Node, counterparts: Mapping[str, str]) -> Node | None:
    """Return the candidate's op that does what `node` does with its other operands, but to what is made after others.

    Args:
        node: Of the baseline, an op of one or several tensors.
        there: What the candidate has of it: the counterpart of one of them, which passes it by.
        counterparts: Node of the baseline -> node of the candidate; weights have one name.
    """
    node = passed_by(node, there, counterparts)
    others = {_name_there(source, counterparts) for source in node.all_input_nodes} - {there.name}
    if len(others) == len(node.all_input_nodes):
        return None
    for op in _unpaired(node, down([there], depth=_SOON), counterparts):
        sources = {source.name for source in op.all_input_nodes}
        if others < sources and there.name not in sources:
            return op
    return None


def done_earlier(node: Node, there: Node, counterparts: Mapping[str, str]) -> Node | None:
    """Return the candidate's op above `there`, the counterpart of `node`, that does the same earlier in the stream."""
    own = {source: _name_there(source, counterparts) for source in node.all_input_nodes}
    for op in _unpaired(node, up(there, _SOON), counterparts) if there.target is not node.target else ():
        sources = {source.name for source in op.all_input_nodes}
        later = [source for source, name in own.items() if name not in sources]
        above = {counterparts.get(one.name, one.name) for source in later for one in ancestors(source)}
        if 0 < len(later) < len(own) and sources - set(own.values()) <= above:
            return op
    return None


def _name_there(node: Node, counterparts: Mapping[str, str], depth: int = _SOON) -> str:
    """Return the candidate's name of a tensor, or of the one that ops without counterparts make it of; empty without.

    Weights have one name.
    """
    if node.op != "call_function" or node.name in counterparts:
        return counterparts.get(node.name, node.name)
    made_of = {_name_there(one, counterparts, depth - 1) for one in node.all_input_nodes} if depth else set()
    return made_of.pop() if len(made_of) == 1 else ""


def _unpaired(node: Node, ops: Iterable[Node], counterparts: Mapping[str, str]) -> Iterator[Node]:
    """Yield those ops of the candidate that do what `node` does, and are the counterpart of no such op."""
    known = {counterparts.get(one.name) for one in node.graph.find_nodes(op=node.op, target=node.target)}
    return (op for op in ops if op.target is node.target and op.name not in known)


def partners_of(node: Node) -> list[tuple[Node, Node]]:
    """Return the ops that read what a node makes, each with another node of which it reads what that makes."""
    found = [(op, origin_of(source)) for op in readers_of(node) for source in op.all_input_nodes]
    return [(op, other) for op, other in dict.fromkeys(found) if other is not node and other.op == "call_function"]


def next_below(node: Node, most: int) -> list[Node]:
    """Return the nearest ops below a node that read its values, in the order of the graph, at most so many."""
    found: list[Node] = []
    seen, waiting = {node}, [node]  # a heap: nodes compare by their places in the graph
    while waiting and len(found) <= most:
        following = heapq.heappop(waiting)
        found.append(following)
        for user in following.users:
            is_op = user.op == "call_function" and "_assert" not in str(user.target)
            if is_op and user not in seen and not traits_of(user).reads_sizes:
                seen.add(user)
                heapq.heappush(waiting, user)
    return found[1:]


def rounded_to(node: Node) -> set[torch.dtype]:
    """Return the coarser dtypes that a node's value is cast to."""
    own = node.meta["val"].dtype
    casts = {user.meta["val"].dtype for user in node.users if traits_of(user).casts}
    return {dtype for dtype in casts if dtype.is_floating_point and unit_roundoff(dtype) > unit_roundoff(own)}


def sibling_of(node: Node, counterparts: Mapping[str, str], theirs: Mapping[str, Node]) -> str | None:
    """Return the candidate's counterpart of one result of an op by that of another: indices beside the values chosen.

    Args:
        node: Of the baseline.
        counterparts: Node of the baseline -> counterpart.
        theirs: The candidate's nodes by name.
    """
    if op_name(node) != "getitem":
        return None
    op = node.all_input_nodes[0]
    for beside in op.users:
        known = theirs.get(counterparts.get(beside.name, ""))
        if known is None or op_name(known) != "getitem" or known.all_input_nodes[0].target != op.target:
            continue
        of_both = (user for user in known.all_input_nodes[0].users if op_name(user) == "getitem")
        return next((user.name for user in of_both if user.args[1] == node.args[1] and user.name in theirs), None)
    return None


def reads_counterparts(
    ours: Node, theirs: Node, counterparts: Mapping[str, str], names: tuple[Mapping[str, str], Mapping[str, str]]
) -> bool:
    """Whether two nodes read counterparts, with any results; weights count as such.

    Args:
        ours: Of the baseline.
        theirs: Of the candidate.
        counterparts: Node -> counterpart.
        names: Placeholder -> input, of both programs.
    """
    operands = operands_of(ours), operands_of(theirs)
    if len(operands[0]) != len(operands[1]):
        return False
    for a, b in zip(*operands, strict=True):
        if a.op == "placeholder":
            if b.op != "placeholder" or names[0].get(a.name) != names[1].get(b.name):
                return False
        elif is_tensor_node(a) and counterparts.get(a.name) != b.name:
            return False
    return True


def place_of(site: str, source: str | None) -> str:
    """Return what the sites of one place in repeated layers have in common: `layers.*.mlp/mul.0`."""
    path, _, op = site.rpartition("/")
    place = _NUMBER.sub("*", path or op)
    if not path:
        return place
    if place != path or source is None:
        return f"{place}/{op}"
    return f"{path}/{op.partition('.')[0]} in {source}"
