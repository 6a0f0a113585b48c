"""Names the place of the forward through which a wrong gradient flows: cut off, of another sign, counted twice.

The gradients are a linear function of the factor that multiplies the gradient of one read. One backward pass with the
factor 0 gives both coefficients, and with them the factor that fits the candidate's gradients best.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.diagnose.training.gradient_graph import GRADIENT, LOSS, differentiated, is_backward, placeholder_name
from glassengine.diagnose.training.run import StepTaken
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.hypotheses.trials.hypothesis import article, short
from glassengine.judge.hypotheses.trials.trial import FAILS, is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.representation.program import Program
from glassengine.results import Altered, Divergence, Hint, worst

EVIDENCE = "gradient"
_MOST_TRIED, _MOST_ELEMENTS = 48, 1_000_000_000
"""Reads that are tried, and elements of the forwards that their backwards go through."""
_ROUNDINGS, _MOST_LEFT, _APART = 2048.0, 0.02, 8.0
"""Roundings and share of a gradient that may be left, and how much farther off the right ones are."""
_WHOLE = 1e-3
_DETACH = torch.ops.aten.detach.default

_Read = tuple[Node, Node]


def explained(
    found: Sequence[Divergence],
    programs: tuple[Program, Program],
    pairs: Mapping[str, SitePair],
    taken: StepTaken,
    given: Mapping[str, Tensor],
) -> list[Divergence]:
    """Return what is wrong in a step whose loss is right, the first of the backward with the mistake of its gradients.

    Args:
        found: In the order of the graph.
        programs: Of baseline and candidate, as `gradient_program` makes them.
        pairs: By node of the baseline.
        taken: The candidate's step.
        given: Inputs of the step, by name.
    """
    backward = [one for one in found if one.level == "backward"]
    first = next((one for one in backward if one.verdict == worst(one.verdict for one in backward)), None)
    nodes = {node.name: node for node in programs[0].graph.nodes}

    begins = {id(one): nodes.get(differentiated(nodes[one.node or ""]) or "") for one in backward}
    begin = begins.get(id(first))
    named = None if first is None or begin is None else _named(first, begin, programs, pairs, taken, given)
    if named is not None:
        return [*(one for one in found if one.level != "backward"), named]  # it explains every gradient

    def as_hint(one: Divergence) -> Divergence:
        begin = begins.get(id(one))
        return one if begin is None else replace(one, hints=tuple(_of_backward(hint, begin) for hint in one.hints))

    return [as_hint(one) for one in found]


def _named(
    found: Divergence,
    begin: Node,
    programs: tuple[Program, Program],
    pairs: Mapping[str, SitePair],
    taken: StepTaken,
    given: Mapping[str, Tensor],
) -> Divergence | None:
    """Return the first wrong op of a backward with its mistake, in the lines of the forward; None if it has none."""
    program, theirs = programs
    baseline_nodes = {pair.candidate.node: node for node, pair in pairs.items()}
    cut = [node for node in theirs.graph.nodes if node.target is _DETACH and not _is_copy(node)]
    detached = {baseline_nodes.get(user.name) for node in cut for user in node.users}
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    forward = [node for node in order if node.op == "call_function" and not is_backward(_label(program, node))]
    reads = [(source, reader) for reader in forward for source in reader.all_input_nodes]
    reads.sort(key=lambda read: (read[1].name not in detached, abs(order[read[1]] - order[begin])))
    try:
        made = _mistake(program, reads, taken, given, found.site)
    except FAILS:
        made = None
    if made is None:
        return None
    hint, reader = made
    pair = pairs.get(reader.name)
    source = _line(program, reader)
    there = found.candidate_source if pair is None else pair.candidate.source
    return replace(found, source=source or found.source, candidate_source=there, hints=(hint,))


def _of_backward(hint: Hint, begin: Node) -> Hint:
    """Return a hint that says of which gradient it is: no op of the forward is another one."""
    return replace(hint, text=f"in the gradient of {article(begin)}: {hint.text}", proven=False, line=None)


def _mistake(
    program: Program, reads: Sequence[_Read], taken: StepTaken, given: Mapping[str, Tensor], site: str
) -> tuple[Hint, Node] | None:
    """Return the hint of the read whose gradient makes the candidate's gradients with another factor, and its op."""
    factors: dict[_Read, float] = {}
    loss, trained, tried = _forward(program, reads, taken, given, factors)

    def gradients() -> list[Tensor]:
        made = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), made, strict=True)]

    zeros = (torch.zeros_like(tensor) for tensor in trained.values())
    theirs = [zero if (g := taken.gradients[name]) is None else g for name, zero in zip(trained, zeros, strict=True)]
    right = gradients()
    sizes = [max(float(a.norm()), float(b.norm())) for a, b in zip(right, theirs, strict=True)]
    roundoff = max(unit_roundoff(tensor.dtype) for tensor in theirs)
    most = [min(_ROUNDINGS * roundoff, _MOST_LEFT) * max(size, _WHOLE * max(sizes)) for size in sizes]
    for cut in _cuts(program, tried):
        factors.update(dict.fromkeys(cut, 0.0))
        without = gradients()
        factors.clear()
        flows = [a - b for a, b in zip(right, without, strict=True)]
        power = sum(float(flow.double().square().sum()) for flow in flows)
        wanted = [a - b for a, b in zip(theirs, without, strict=True)]
        factor = (
            sum(float((a.double() * b).sum()) for a, b in zip(flows, wanted, strict=True)) / power if power else 1.0
        )
        factor = round(factor) if abs(factor - round(factor)) < _WHOLE else factor
        left = [float((a - factor * b).norm()) for a, b in zip(wanted, flows, strict=True)]
        of_right = sum(float((a - b).norm()) for a, b in zip(right, theirs, strict=True))
        if factor != 1 and all(a <= b for a, b in zip(left, most, strict=True)) and sum(left) * _APART < of_right:
            source, reader = cut[0]
            parameters = {placeholder_name(name): name for name in trained}
            copied = source.all_input_nodes[0].name if _is_copy(source) else ""
            names = [short(_label(program, node), site.replace(":backward", "")).removeprefix("./") for node in cut[0]]
            names[0] = parameters.get(copied, names[0])
            is_of_tensor = len({source for source, _ in cut}) < len(cut)
            text = _text(names[0], "what reads it" if is_of_tensor else names[1], factor)
            text += "" if is_of_tensor or len(cut) == 1 else f", in {len(cut)} places"
            change = Altered(ops=(_label(program, source),), baseline=1.0, candidate=float(factor))
            kind: Any = "scale" if factor else "other"
            return Hint(kind, text, 1.0, EVIDENCE, proven=True, change=change, unexplained=sum(left) / of_right), reader
    return None


def _text(source: str, reader: str, factor: float) -> str:
    if not factor:
        return f"{source} is detached before {reader}: no gradient flows back"
    flow = f"the gradient from {reader} to {source}"
    return f"{flow} has the other sign" if factor == -1 else f"{flow} is {factor:.6g} times the right one"


def _cuts(program: Program, reads: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
    """Yield each read, then all reads of one tensor together, then those of one line: in every pass of a loop."""
    yield from ([read] for read in reads)
    of_tensor, of_line = defaultdict[Any, list[_Read]](list), defaultdict[Any, list[_Read]](list)
    for source, reader in reads:
        of_tensor[source].append((source, reader))
        line = (_line(program, reader), reader.target, reader.all_input_nodes.index(source))
        of_line[line].append((source, reader))
    yield from (group for source, group in of_tensor.items() if 1 < len(group) == len(source.users))
    yield from (group for (line, *_), group in of_line.items() if line is not None and len(group) > 1)


def _line(program: Program, node: Node) -> str | None:
    return next((site.source for site in program.sites.by_node.get(node.name, ()) if site.kind == "op"), None)


def _is_copy(node: Node) -> bool:
    """Whether a node is a parameter or an input as the step takes it."""
    return node.target is _DETACH and node.all_input_nodes[0].op == "placeholder"


def _label(program: Program, node: Node) -> str:
    site = next(iter(program.sites.by_node.get(node.name, ())), None)
    return node.name if site is None else site.name


def _forward(
    program: Program,
    reads: Sequence[_Read],
    taken: StepTaken,
    given: Mapping[str, Tensor],
    factors: Mapping[_Read, float],
) -> tuple[Tensor, dict[str, Tensor], list[_Read]]:
    """Run the forward with a gate in every read that is tried; return loss, parameters and these reads."""
    (end,) = [node for node in program.graph.nodes if node.name == program.output_nodes[LOSS]]
    while end.target is _DETACH:
        (end,) = end.all_input_nodes
    names = [name.removesuffix(GRADIENT) for name in program.output_nodes if name != LOSS]
    trained = {name: taken.state[name].detach().requires_grad_() for name in names}
    known = {**program.weights(), **given, **{placeholder_name(name): tensor for name, tensor in trained.items()}}
    size = sum(value.numel() for node in program.graph.nodes if isinstance(value := node.meta.get("val"), Tensor))
    wanted = list(reads)[: min(_MOST_TRIED, max(_MOST_ELEMENTS // max(size, 1), 1))]
    gated, tried, values = set(wanted), list[_Read](), dict[Node, Any]()
    with torch.enable_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                values[node] = known.get(node.name)
                continue

            def read(source: Node, node: Node = node) -> Any:
                value = values[source]
                if (source, node) not in gated or not is_real(value) or not value.requires_grad:
                    return value
                tried.append((source, node))
                return _Gate.apply(value, factors, (source, node))  # type: ignore[no-untyped-call]

            args, kwargs = (torch.fx.node.map_arg(given, read) for given in (node.args, node.kwargs))
            values[node] = args[0] if _is_copy(node) else node.target(*args, **kwargs)
            if node is end:
                break
    return values[end], trained, sorted(set(tried), key=wanted.index)


class _Gate(torch.autograd.Function):
    """Passes a tensor on, and its gradient times a factor that may change from backward to backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: Mapping[_Read, float], read: _Read) -> Tensor:
        ctx.factor = lambda: factors.get(read, 1.0)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor(), None, None
