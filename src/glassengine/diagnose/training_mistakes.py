"""Names the mistake in a wrong gradient or a wrong update, by trial.

A wrong gradient flows through a place of the forward: cut off, of another sign, counted twice. The gradients are a
linear function of the factor that multiplies the gradient of one read. One backward pass with the factor 0 gives both
coefficients, and with them the factor that fits the candidate's gradients best.

An update is repeated by the baseline's optimizer with one mistake at a time, until that makes what the candidate has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from glassengine.diagnose.training_run import (
    GRADIENT,
    LOSS,
    StepTaken,
    differentiated,
    is_backward,
    number_of,
    placeholder_name,
    repeat_update,
)
from glassengine.judge.hypotheses.trials.hypothesis import done_by, short
from glassengine.judge.hypotheses.trials.trial import FAILS
from glassengine.judge.site_pairs import SitePair
from glassengine.numerics.float64 import double, is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.representation.program import Program
from glassengine.results import Altered, Divergence, Hint, Kind, worst
from glassengine.results.hints import TRIED

EVIDENCE = "gradient"
_MOST_TRIED, _MOST_ELEMENTS = 48, 1_000_000_000
"""Reads that are tried, and elements of the forwards that their backwards go through."""
_ROUNDINGS, _MOST_LEFT, _APART = 2048.0, 0.02, 8.0
"""Roundings and share of a gradient that may be left, and how much farther off the right ones are."""
_WHOLE = 1e-3
_DETACH = torch.ops.aten.detach.default

_Read = tuple[Node, Node]
_CERTAIN, _NEARER = 4.0, 8.0
"""What explains leaves so few roundings, and is nearer than the right update by this factor."""
_LATE = 1e9
"""A step so late that no bias is left to correct."""
_KINDS: dict[str, Kind] = dict.fromkeys(("lr", "betas", "weight_decay", "momentum", "dampening", "maximize"), "scale")


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
        if begin is None:
            return one
        where = f"in the gradient of {done_by(begin)}"  # no op of the forward is another one
        hints = (replace(hint, text=f"{where}: {hint.text}", proven=False, line=None) for hint in one.hints)
        return replace(one, hints=tuple(hints))

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


@dataclass(frozen=True)
class _Mistake:
    kind: Kind
    text: str
    options: Mapping[str, Any] | None = None
    """Hyperparameters that every group has instead of its own."""
    factor: float = 1.0
    """Of the gradients."""
    is_late: bool = False


@dataclass
class Updates:
    """The baseline's optimizer, in float64, and the step of a run that it is tried on.

    Attributes:
        optimizer: Of a copy of the baseline; what it keeps is overwritten.
        names: Its parameters.
        step: Of the candidate's run.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[nn.Parameter, str]
    step: StepTaken

    def __post_init__(self) -> None:
        self._fitting: list[tuple[_Mistake, Mapping[str, Tensor]]] = []

    def explain(self, site: str, exact: Tensor, native: Tensor, theirs: Tensor) -> Hint | None:
        """Return the mistake with which the optimizer makes what the candidate made; None where none of these does.

        Args:
            site: "parameter:param" or "parameter:state.name".
            exact: The right result, float64.
            native: The same in the candidate's dtype.
            theirs: What the candidate's optimizer made.
        """
        exact, wrong = double(exact), double(theirs)
        name, _, what = site.partition(":")
        before = self.step.state[name].double()
        if what == "param" and torch.equal(wrong, before) and not torch.equal(exact, before):
            return Hint("stale", "the parameter is not updated", 1.0, evidence=TRIED, proven=True)
        size = max(float(exact.norm()), 1e-300)
        share = float((double(native) - exact).norm()) / size + unit_roundoff(theirs.dtype)
        rounding = share * max(size, float(wrong.norm()))
        of_right = float((wrong - exact).norm())
        known = [(mistake, made) for mistake, made in self._fitting if site in made]
        for mistake, made in (*known, *self._tried(site, exact, wrong, before)):
            left = float((made[site] - wrong).norm())
            if left <= _CERTAIN * rounding and left * _NEARER <= of_right:
                if (mistake, made) not in known:
                    self._fitting.append((mistake, made))
                rest = left / of_right if of_right else 0.0
                return Hint(mistake.kind, mistake.text, 1.0, evidence=TRIED, proven=True, unexplained=rest)
        return None

    def _tried(
        self, site: str, exact: Tensor, wrong: Tensor, before: Tensor
    ) -> Iterator[tuple[_Mistake, Mapping[str, Tensor]]]:
        for mistake in (*self._of_options(), *self._fitted(site, exact, wrong, before)):
            made = self._made(mistake)
            if made is not None and site in made:
                yield mistake, made

    def _of_options(self) -> Iterator[_Mistake]:
        """Yield: the options that the candidate's optimizer says it has, else one that is turned around or left out."""
        first = self.optimizer.param_groups[0]
        theirs = next(iter(self.step.options.values()), {})
        differing = {key: theirs[key] for key in first if key in theirs and number_of(first[key]) != theirs[key]}
        if differing:
            text = "; ".join(
                f"{key}: {first[key]} in the baseline, {value} in the candidate" for key, value in differing.items()
            )
            yield _Mistake(kind_of_option(next(iter(differing))), text, differing)
        for key, value in first.items():
            if isinstance(value, bool) and key not in ("foreach", "fused", "capturable", "differentiable"):
                what = "taken off the weights" if value else "added to the gradients"
                text = f"{key} is {'not ' if value else ''}on in the candidate"
                text = (
                    f"the weight decay is {what} in the baseline, not in the candidate"
                    if key.startswith("decoupled")
                    else text
                )
                yield _Mistake(kind_of_option(key), text, {key: not value})
            elif isinstance(value, float) and value and key in ("weight_decay", "momentum"):
                yield _Mistake("scale", f"{key} is missing: {value:g} in the baseline", {key: 0.0})
        if "betas" in first:
            yield _Mistake("scale", "the bias correction is missing", is_late=True)

    def _fitted(self, site: str, exact: Tensor, wrong: Tensor, before: Tensor) -> Iterator[_Mistake]:
        """Yield: another learning rate, and gradients of another size, by the number that fits."""
        rate = self.optimizer.param_groups[0].get("lr")
        if site.endswith(":param") and isinstance(rate, float):
            factor = _along(exact - before, wrong - before)
            if factor is not None:
                text = (
                    f"the update is {factor:.6g} times as large: a learning rate of {rate * factor:.6g}, not {rate:g}"
                )
                yield _Mistake("scale", text, {"lr": rate * factor})
        beside = self._made(_Mistake("scale", "", factor=2.0))
        if beside is not None and site in beside:
            slope = _along(beside[site] - exact, wrong - exact)
            for factor in () if slope is None else (1 + slope, abs(1 + 3 * slope) ** 0.5):  # of a sum, of squares
                yield _Mistake("scale", f"gradients are {factor:.6g} times as large when they arrive", factor=factor)

    def _made(self, mistake: _Mistake) -> dict[str, Tensor] | None:
        """Return parameters and memory after the update with a mistake, by site; None where it cannot be made."""
        step, groups = self.step, self.optimizer.param_groups
        kept = [dict(group) for group in groups]
        scaled = {name: None if g is None else g.double() * mistake.factor for name, g in step.gradients.items()}
        memory = {name: dict(values) for name, values in step.memory.items()}
        if mistake.is_late:
            memory = {name: self._late(name, memory.get(name, {})) for name in step.gradients}
        try:
            for group in groups:
                group.update(mistake.options or {})
            self.optimizer.state.clear()
            changed = replace(step, gradients=scaled, memory=memory)
            parameters, kept_by_name = repeat_update(self.optimizer, dict(self.names), changed, double)
        except (KeyError, RuntimeError, TypeError, ValueError):
            return None
        finally:
            for group, options in zip(groups, kept, strict=True):
                group.update(options)
        tensors = {f"{name}:param": value.double() for name, value in parameters.items()}
        for name, values in kept_by_name.items():
            tensors |= {
                f"{name}:state.{key}": value.double() for key, value in values.items() if isinstance(value, Tensor)
            }
        return tensors

    def _late(self, name: str, memory: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(self.step.state[name])
        kept = memory or {"exp_avg": zeros, "exp_avg_sq": zeros}
        return {**kept, "step": torch.tensor(_LATE)}


def kind_of_option(name: str) -> Kind:
    """Return the kind of the mistake that a hyperparameter is another one."""
    return "eps" if name == "eps" else _KINDS.get(name, "other")


def _along(one: Tensor, other: Tensor) -> float | None:
    """Return the factor by which a tensor comes nearest to another one; None of zeros."""
    power = float(one.square().sum())
    factor = float((one * other).sum()) / power if power else 0.0
    return factor or None
