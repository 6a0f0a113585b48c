"""Tensors that differ, and that the next ops take back for any values: written in another gauge, and no mistake.

A port may center what it writes to a residual stream, since every layer norm takes the mean off again; it may order
heads or hidden units otherwise, turn the basis of the stream, or scale queries up and keys down. That the results agree
does not prove it: these inputs may not excite a mistake. So both programs are run in float64, node by node side by
side, on made-up values. Where the two have the same product, both go on from another one, the same for both: of another
size, so that an epsilon or a limit shows; masks have places turned over. Where they differ, each goes on from its own.
If they meet again on every way to a result, whatever the values, what lies between is the same function. The op where
they meet must show a small random difference: a maximum, or a much larger term of a sum, only hides one.

A whole number that differs, and a table that is made of constants alone (turned by another position), prove nothing:
what they are may count in the next step. A tensor that hardly differs proves nothing, either: the rounding of weights
may hide it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.replay.values import DOES_NOT_FIT, NoCounterpart, predicted_in_float64
from glassengine.judge.site_pairs import SitePair, ancestors, difference, operands_of, ports
from glassengine.numerics.float64 import double, is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.mask_values import is_below
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program

TAKEN_BACK = "written in another gauge: what reads it takes that back, for any values"

_SIZES = (1.0, 10.0, 0.1, 1e-4, 1e3)
"""Of made-up values: an epsilon shows in small ones, a limit in large ones, a softmax in those between.

The usual size comes first: most mistakes show there, and end the search.
"""
_ROUNDINGS = 4
"""A row that differs by this many times what other roundings of the weights make is not the same."""
_PLAINLY = 16
"""What is taken back was this many times beyond that."""
_MOST_ALONE = 64
"""Origins that are tried one by one, beside mistakes."""
_FEW_ALONE = 8
"""Of more origins than these, those of one place in several layers are taken for one mistake."""
_SMALL = 0.01
"""Relative size of a difference that shows where a value is read, and not where a maximum leaves it out."""
_HUGE = 1e30
_MOST_DRAWN = 65_521
"""Normal numbers that are drawn for a value: a prime, so that no two rows or images are of the same ones."""


@torch.no_grad()
def taken_back(
    baseline: Program,
    candidate: Program,
    pairs: Mapping[str, SitePair],
    inputs: Mapping[str, Tensor],
    origins: Mapping[str, str],
    wrong_results: Collection[str] = (),
) -> set[str]:
    """Return the nodes of the baseline whose tensors differ by a gauge.

    Args:
        baseline: With weights.
        candidate: With weights.
        pairs: Baseline node -> pair.
        inputs: Of one step, caches among them, whose sizes are taken.
        origins: Node that introduces what differs -> its place, which layers have in common. With mistakes among them
            each is tried with all others given; if the first of a place is none, those of other layers are not tried.
        wrong_results: Result nodes of the baseline that differ on the inputs of the check: what alone can have made one
            of them wrong is not taken back.
    """
    guilty = guilty_of(baseline, origins, wrong_results)
    asked = [one for one in origins if one not in guilty]
    if wrong_results and not asked:
        return set()
    two = _Two(baseline, candidate, pairs, inputs)
    found = None if wrong_results else two.apart(set())
    if found is None and 1 < len(origins) <= _MOST_ALONE:
        found, failed = set(), set[str]()
        for one in asked:
            made = None if origins[one] in failed else two.apart(origins.keys() - {one})
            found |= made or set()
            failed |= {origins[one]} if made is None else set()
        if not found and len(asked) > 2:  # of two, each was the one mistake already
            places: dict[str, set[str]] = {}
            for one in asked:
                places.setdefault(origins[one], set()).add(one)
            alone = [{one} for one in asked if len(asked) <= _FEW_ALONE and len(places[origins[one]]) > 1]
            found = next(filter(None, (two.apart(guilty | some) for some in [*places.values(), *alone])), None)
    return found or set()


def guilty_of(baseline: Program, origins: Collection[str], wrong_results: Collection[str]) -> set[str]:
    """Return the origins that are a wrong result, or alone above one."""
    found = set(origins).intersection(wrong_results)
    for result in wrong_results:
        above = {node.name for node in ancestors(baseline.node(result))} | {result}
        if len(own := above.intersection(origins)) == 1:
            found |= own
    return found


class _Two:
    """Two programs side by side."""

    def __init__(
        self,
        baseline: Program,
        candidate: Program,
        pairs: Mapping[str, SitePair],
        inputs: Mapping[str, Tensor],
    ) -> None:
        self._programs = baseline, candidate
        self._pairs = pairs
        self._inputs, self._weights = inputs, baseline.weights()
        self._theirs = candidate.nodes
        self._tables = _tables(baseline)
        self._equal_weights: dict[tuple[Node, Node], bool] = {}
        self._operands: dict[Node, list[tuple[Node, Node]] | None] = {}
        floats = [w.dtype for one in self._programs for w in one.weights().values() if w.is_floating_point()]
        self._unit = max(map(unit_roundoff, [torch.float32, *floats]))

    def apart(self, given: Collection[str]) -> set[str] | None:
        """Return the nodes whose values differ, though all results are the same; None if some are not.

        Args:
            given: Nodes whose values are taken to be the same, where what they read is.
        """
        found: set[str] = set()
        self._shows: dict[str, bool] = {}
        for seed, size in enumerate(_SIZES):
            try:
                differing = self._differing(size, torch.Generator().manual_seed(seed), given)
            except (*DOES_NOT_FIT, KeyError, TypeError, NotImplementedError):
                return None
            if differing is None:
                return None
            if given and not differing and seed == 0:
                # The origins that are not given make the same on both sides: nothing can be taken back.
                return found
            found |= differing
        return found if all(self._shows.values()) else None

    def _differing(self, size: float, generator: torch.Generator, given: Collection[str]) -> set[str] | None:
        """Return the nodes whose values differ for made-up values of one size; None if results do, too."""
        made_up = {name: _made_up(value, size, generator) for name, value in self._inputs.items()}
        ours, theirs = (_Values(program, made_up) for program in self._programs)
        rounded = _Values(self._programs[0], made_up, lambda value: _changed(value, self._unit, generator))
        results = set(self._programs[0].output_nodes.values())
        far: dict[Node, float] = {}  # how far a value is apart, through nodes without counterpart
        found: set[str] = set()
        for node in self._programs[0].graph.nodes:
            if node.op in ("output", "placeholder", "get_attr") or "_assert" in str(node.target):
                continue
            value = ours.of(node)
            behind = max((far.get(source, 0.0) for source in node.all_input_nodes), default=0.0)
            pair = self._pairs.get(node.name)
            own = None if pair is None else self._theirs[pair.candidate.node]
            if own is None or pair is None or not is_tensor_node(node) or traits_of(node).is_arbitrary:
                far[node] = behind
                if node.name in results and (behind or node.op == "call_function"):
                    return None
                continue
            if pair.arrangement is None and self._is_same(node, own, (ours.made, theirs.made)):
                other = theirs.made[own] = value
            else:
                other = theirs.of(own)
            if pair.arrangement is not None:
                other = pair.arrangement.apply(other, value.shape)
            if node.name in given:  # a mistake beside the gauge, which the right op may take back
                other = self._called(node, theirs) if behind else value
            apart = _apart(value, other)
            least = _ROUNDINGS * self._unit
            if behind or apart > least:
                least = max(least, _ROUNDINGS * _apart(value, rounded.of(node)))
            # Of one that hardly differs it is not known whether it is taken back, or hidden by something larger.
            if apart > least or 0.0 < behind < _PLAINLY * least:
                if node.name in results or not value.is_floating_point() or node in self._tables:
                    return None
                far[node] = max(apart, least)
                found.add(node.name)
                continue
            if behind and not self._shows.get(node.name):
                self._shows[node.name] = _shows(ours, node, far, least, generator)
            is_used = any(user in theirs.made for user in own.users)
            if pair.arrangement is None and not is_used:
                other = _made_up(value, size, generator, like=True) if self._is_free(node) else value
                ours.made[node] = theirs.made[own] = other
            rounded.made[node] = ours.made[node]
        return found

    def _is_same(self, ours: Node, theirs: Node, values: tuple[Mapping[Node, Any], Mapping[Node, Any]]) -> bool:
        """Whether both call one op on the same values: its result need not be computed twice."""
        if ours not in self._operands:
            self._operands[ours] = _operands_alike(ours, theirs)
        operands = self._operands[ours]
        return operands is not None and all(self._are_equal(one, other, values) for one, other in operands)

    def _are_equal(self, ours: Node, theirs: Node, values: tuple[Mapping[Node, Any], Mapping[Node, Any]]) -> bool:
        one, other = values[0].get(ours), values[1].get(theirs)
        if one is other:
            return one is not None
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return isinstance(one, int | float) and one == other
        if ours.name not in self._weights:
            return False
        if (ours, theirs) not in self._equal_weights:
            self._equal_weights[ours, theirs] = one.dtype is other.dtype and torch.equal(one, other)
        return self._equal_weights[ours, theirs]

    def _is_free(self, node: Node) -> bool:
        """Whether the result may be anything: of a product or a table, and not a norm, or shares that add up to one."""
        reads_matrix = any(self._weights[s.name].dim() > 1 for s in node.all_input_nodes if s.name in self._weights)
        return reads_matrix or traits_of(node).multiplies or node.meta["val"].dtype is torch.bool

    def _called(self, node: Node, theirs: _Values) -> Any:
        """Return what the baseline's op makes of what the candidate has; None where it lacks some of that."""

        def read(source: Node) -> Any:
            pair = self._pairs.get(source.name)
            if source.op != "call_function":
                return self._weights[source.name]
            if pair is None or pair.arrangement is not None:
                raise NoCounterpart(source.name)
            return theirs.of(self._theirs[pair.candidate.node])

        try:
            return predicted_in_float64(node, read)
        except (NoCounterpart, KeyError):
            return None


def _operands_alike(ours: Node, theirs: Node) -> list[tuple[Node, Node]] | None:
    """Return what two calls of one op read in the places of each other; None where the calls differ."""
    if len(ours.args) != len(theirs.args) or list(ours.kwargs) != list(theirs.kwargs):
        return None
    if difference(ours, theirs) is not None:
        return None
    operands = operands_of(ours), operands_of(theirs)
    return list(zip(*operands, strict=True)) if len(operands[0]) == len(operands[1]) else None


class _Values:
    """The values of one program in float64, each made when it is asked for.

    Args:
        program: With weights.
        inputs: By name.
        changed: Changes a weight, or a view of one, that an op reads.

    Attributes:
        made: Node -> value; may be replaced.
    """

    def __init__(
        self, program: Program, inputs: Mapping[str, Tensor], changed: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._changed = changed
        weights = program.weights()
        named = {node: inputs[name] for node, name in ports(program).items() if name in inputs}
        known = weights | named
        self._module = program.exported.graph_module
        self.made: dict[Node, Any] = {
            node: known[node.name] for node in program.graph.find_nodes(op="placeholder") if node.name in known
        }
        self._of_weights = {node for node in self.made if node.name in weights}
        for node in program.graph.nodes:
            if is_view(node) and node.args[0] in self._of_weights:
                self._of_weights.add(node)

    def of(self, node: Node) -> Any:
        """Return the value of a node."""
        waiting = [node]
        while waiting:
            one = waiting[-1]
            missing = [source for source in one.all_input_nodes if source not in self.made]
            if one not in self.made and not missing:
                self.made[one] = self._compute(one)
            waiting = [*waiting, *missing] if missing else waiting[:-1]
        return self.made[node]

    def with_source(self, node: Node, source: Node, value: Tensor) -> Any:
        """Return what the value of a node would be with another value of one of its sources."""
        other = copy.copy(self)
        other.made = {source: value}
        waiting = [node]
        while waiting:
            for read in waiting.pop().all_input_nodes:
                known = self.made.get(read)
                if isinstance(known, Tensor):
                    other.made.setdefault(read, known)
                else:  # several results, of which one may come from another value
                    waiting.append(read)
        return other.of(node)

    def _compute(self, node: Node) -> Any:
        if node.op == "placeholder":
            raise KeyError(node.name)
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        return predicted_in_float64(node, self.made.__getitem__ if is_view(node) else self._read)

    def _read(self, node: Node) -> Any:
        value = self.made[node]
        is_weight = node in self._of_weights and is_real(value)
        return self._changed(value) if is_weight and self._changed is not None else value


def _shows(values: _Values, node: Node, far: Mapping[Node, float], least: float, generator: torch.Generator) -> bool:
    """Return whether a small random difference of each source that differs shows, at most as large as that one."""
    for source in _tensors_read(node):
        value = values.of(source)
        if far.get(source) and is_real(value):
            changed = _changed(value, min(far[source], _SMALL), generator)
            if _apart(values.of(node), values.with_source(node, source, changed)) <= least:
                return False
    return True


def _tensors_read(node: Node) -> Iterator[Node]:
    """Yield the tensors that a node reads, through nodes that have several results."""
    for source in node.all_input_nodes:
        if is_tensor_node(source):
            yield source
        else:
            yield from _tensors_read(source)


def _tables(program: Program) -> set[Node]:
    """Return the nodes that are made of constants, whole numbers and vectors alone: neither activation nor matrix."""
    weights = program.weights()
    found: set[Node] = set()
    for node in program.graph.nodes:
        value = weights[node.name] if node.name in weights else node.meta.get("val")
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if node.op == "placeholder":
            is_table = not is_float or (node.name in weights and value.squeeze().dim() < 2)
        else:
            is_table = all(source in found for source in node.all_input_nodes)
        if is_table:
            found.add(node)
    return found


def _made_up(value: Tensor, size: float, generator: torch.Generator, *, like: bool = False) -> Any:
    """Return another value of the same shape.

    Args:
        value: As it is; a given one, or the result of an op.
        size: Of floating numbers.
        generator: Of what is made up.
        like: Whether signs, and what is no number, stay: it may be a sum of squares, or a mask.
    """
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return value
    if value.is_floating_point():
        noise = _normal(value, generator)
        return _like(value, noise, size) if like else noise * size
    turned = torch.rand(value.shape, generator=generator) < 0.3
    turned[..., 0] = False  # something has to be left of a mask
    if value.dtype is torch.bool:
        return value ^ turned
    if like or value.dim() < 2 or bool((value < 0).any()):
        return value
    # The other number of a mask, another token of a vocabulary.
    most = max(2, int(value.max()) + 1)
    step = 1 + torch.randint(most - 1, value.shape, generator=generator)
    return torch.where(turned, (value + step) % most, value)


def _like(value: Tensor, noise: Tensor, size: float) -> Tensor:
    wide = double(value)
    counts = wide.isfinite() & (wide.abs() < _HUGE)
    scale = float(wide[counts].square().mean().sqrt()) if bool(counts.any()) else 0.0
    return torch.where(counts, wide * (0.5 * noise).exp() * (size / scale), wide) if scale else wide


def _normal(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers in the shape of a value; those of a large one repeat themselves."""
    drawn = _drawn(value, generator)
    number = value.numel()
    return drawn.repeat(-(-number // _MOST_DRAWN))[:number].view(value.shape) if number else drawn.view(value.shape)


def _changed(value: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return a floating value in float64, with its numbers changed by a normal share of themselves."""
    changed = value.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    factors = 1 + share * _drawn(value, generator)
    for part in torch.split(changed.view(-1), _MOST_DRAWN):  # a large weight would take four times its size
        part.mul_(factors[: len(part)])
    return changed


def _drawn(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(min(value.numel(), _MOST_DRAWN), generator=generator, dtype=torch.float64)


def _apart(ours: Any, theirs: Any) -> float:
    """Return how far two values are apart: the largest relative difference of a row; infinity for other kinds."""
    if ours is theirs:
        return 0.0
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return math.inf
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return 0.0 if torch.equal(ours, theirs) else math.inf
    left, right = double(ours.detach()), double(theirs.detach())
    if not (is_below(left, _HUGE) and is_below(right, _HUGE)):
        same = (
            (left == right) | (left.isnan() & right.isnan()) | ((left < -_HUGE) & (right < -_HUGE))
        )  # all of it hides
        usual = (left.abs() < _HUGE) & (right.abs() < _HUGE)
        if not bool((same | usual).all()):
            return math.inf
        left, right = (torch.where(usual, value, 0.0) for value in (left, right))
    if not left.numel():
        return 0.0
    error, rows = ((x.square().mean(-1).sqrt() if x.dim() else x.abs()) for x in (left - right, left))
    floor = 1e-2 * float(rows.square().mean().sqrt())
    return float((error / rows.clamp(min=max(floor, 1e-300))).max())
