"""Pair the op sites of two programs.

Within each call of each module the two op sequences are aligned (longest matching blocks, first by op, shape and
literal arguments, then by op and shape), so that an extra op of one side shifts no name. Results of the
programs are counterparts by name, and what one op left over feeds is fed by its counterpart: an op that was replaced by
another one still has one. The fingerprint says whether a pair is computed the same way; it is kept with the pair, not
required, because a mistake changes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.arrangements import Arrangement
from glassengine.program.representation.program import Program
from glassengine.sites import Site


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
    nodes = ({n.name: n for n in baseline.graph.nodes}, {n.name: n for n in candidate.graph.nodes})
    found: dict[str, SitePair] = {}
    for call, ours in left.items():
        theirs = right.get(call, [])
        for a, b in _align(ours, theirs, nodes):
            method = "name+fingerprint" if a.fingerprint == b.fingerprint else "name"
            found[a.name] = SitePair(a, b, method, difference(nodes[0][a.node], nodes[1][b.node]))
    _pair_outputs(baseline, candidate, nodes, found)
    _pair_by_consumer(baseline, candidate, nodes, found)
    taken = {pair.candidate.name for pair in found.values()}
    ops = [site for site in baseline.sites if site.kind == "op"]
    pairs = [found[site.name] for site in ops if site.name in found]
    only_left = [site for site in ops if site.name not in found]
    only_right = [site for site in candidate.sites if site.kind == "op" and site.name not in taken]
    return pairs, only_left, only_right


def _pair_outputs(
    baseline: Program, candidate: Program, nodes: tuple[dict[str, Node], dict[str, Node]], found: dict[str, SitePair]
) -> None:
    """An op behind the last one of a result (a clamp, say) is what that result has become."""
    for name, node in baseline.output_nodes.items():
        ours, theirs = _op_site(baseline, node), _op_site(candidate, candidate.output_nodes.get(name))
        if ours is None or theirs is None:
            continue
        known = found.get(ours.name)
        if known is None or known.candidate.name != theirs.name:
            how = difference(nodes[0][ours.node], nodes[1][theirs.node])
            found[ours.name] = SitePair(ours, theirs, "output", how)


def _pair_by_consumer(
    baseline: Program, candidate: Program, nodes: tuple[dict[str, Node], dict[str, Node]], found: dict[str, SitePair]
) -> None:
    """Pair what is left over with what feeds the same argument of a counterpart, last ops first."""
    counterpart = {pair.baseline.node: nodes[1][pair.candidate.node] for pair in found.values()}
    taken = {pair.candidate.node for pair in found.values()}
    for node in reversed(baseline.graph.nodes):
        ours = _op_site(baseline, node.name)
        if ours is None or ours.name in found:
            continue
        for user in node.users:
            if user.name not in counterpart:
                continue
            theirs = _fed(user, node, counterpart[user.name])
            site = None if theirs is None else _op_site(candidate, theirs.name)
            if site is not None and site.node not in taken and _kind(site)[1:] == _kind(ours)[1:]:
                found[ours.name] = SitePair(ours, site, "consumer", difference(node, nodes[1][site.node]))
                counterpart[node.name] = nodes[1][site.node]
                taken.add(site.node)
                break


def _fed(user: Node, node: Node, counterpart: Node) -> Node | None:
    """Return the argument of `counterpart` that stands where `user` has `node`."""
    ours, theirs = (pytree.tree_flatten((n.args, dict(n.kwargs)))[0] for n in (user, counterpart))
    if len(ours) != len(theirs):
        return None
    fed = theirs[ours.index(node)]
    return fed if isinstance(fed, Node) else None


def _op_site(program: Program, node: str | None) -> Site | None:
    return next((site for site in program.sites.by_node.get(node or "", ()) if site.kind == "op"), None)


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
    """Describe literal arguments that differ, e.g. "scale: 0.25 here, 0.5 in the candidate"."""
    if ours.target != theirs.target:
        return f"op: {ours.target} here, {theirs.target} in the candidate"
    names = argument_names(ours.target)

    def bound(node: Node) -> dict[str, Any]:
        positional = {names[i] if i < len(names) else str(i): _literal(a) for i, a in enumerate(node.args)}
        return positional | {key: _literal(value) for key, value in node.kwargs.items()}

    a, b = bound(ours), bound(theirs)
    differing = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    if not differing:
        return None
    return "; ".join(f"{k}: {_shown(a, k)} here, {_shown(b, k)} in the candidate" for k in differing)


def argument_names(target: Any) -> list[str]:
    """Return the names of an op's arguments, in order."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        # An op of an ONNX file is a function of ours.
        return list(inspect.signature(getattr(target, "function", target)).parameters)
    except (TypeError, ValueError):
        return []


def _shown(arguments: dict[str, Any], name: str) -> str:
    text = str(arguments.get(name, "default"))
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return text
