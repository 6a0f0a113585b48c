"""Pair the ops of two programs that are written differently, by what they compute.

    align       `compare.pairing` says what stands in the same place: a proposal
    probe       the candidate runs two steps; all its tensors are at hand
    predict     node by node, the baseline's op in float64 on the candidate's own inputs of that op
    find        the tensor of the candidate that is the prediction up to rounding; of several, the proposal. What it
                comes from cannot be made of it, and what is below follows from it no worse than from the prediction
    pass over   nothing is: the candidate does not have this tensor (it is written with other ops), or has it wrong.
                What comes next tells: the ops below it follow from the prediction, or from a tensor of the candidate

A node that is passed over keeps its prediction, so that what is below it is predicted from the last tensors that both
sides have: a region, judged where it ends (see `regions`). A tensor that only what comes next speaks for is a
counterpart too: there the error is. Results of the programs are counterparts by name or order, whatever they hold.

Predictions are compared loosely, as far as rounding within a region goes; the verdict has a finer measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.compare.operation import CASTS, MOVES, RANDOM, UNDEFINED
from glassengine.compare.pairing import SitePair, pair_sites
from glassengine.compare.verdict import unit_roundoff
from glassengine.diagnose.between import (
    next_below,
    origin_of,
    partners_of,
    passes_on,
    reads_the_same,
    region_of,
    rounded_to,
    sibling_of,
)
from glassengine.diagnose.candidate_tensors import CandidateTensors, Values, shapes_of
from glassengine.diagnose.float64 import retarget, target_of
from glassengine.diagnose.paired_results import paired_results, ports
from glassengine.diagnose.probe import ProbeStep
from glassengine.program.naming import is_tensor_node, op_name
from glassengine.program.outputs import is_view
from glassengine.program.program import Program
from glassengine.sites import Site

_ROUNDINGS = 16
"""Unit roundoffs by which a tensor may differ from its prediction: rounding of a region, not of one op."""
_LEAST = 2e-5
"""Of the same: differences of numbers of one size amplify the rounding of float32."""
_CLOSER = 8
"""The proposal is passed over for a tensor that is this many times closer to the prediction."""
_TELLING = 2
"""A tensor and the prediction are told apart by an op below that follows this many times closer from one of them."""
_AHEAD = 12
"""How many ops below a node are asked whether they follow from it."""
_AHEAD_OF_TWO = 6
"""The same below an op of whose inputs two are tried at once."""
_TRIALS = 20
"""How many tensors of the candidate are tried in the place of one that has no counterpart: a norm by hand makes ten."""
_TRIALS_OF_TWO = 10
"""The same of each of two that are tried at once."""
_MOST_TRIED = 20_000
"""Ops predicted to no avail before none is tried any more: the two programs have nothing in common."""


class Unknown(Exception):
    """The value of a node cannot be told: an input of it cannot, or the op does not take it."""


class Counterparts:
    """The pairs of two programs, found on steps of the candidate.

    Args:
        baseline: With weights.
        candidate: With weights.
        steps: What the candidate was given and made.

    Attributes:
        pairs: Baseline node -> pair.
    """

    def __init__(self, baseline: Program, candidate: Program, steps: Sequence[ProbeStep]) -> None:
        self._baseline, self._candidate, self._steps = baseline, candidate, steps
        self._weights = baseline.weights()
        self._order = {node.name: index for index, node in enumerate(baseline.graph.nodes)}
        self._tensors = CandidateTensors(candidate, steps)
        self._proposed = {pair.baseline.node: pair for pair in pair_sites(baseline, candidate)[0]}
        self._values: dict[str, Values] = {}
        self._found: dict[str, str] = {}
        self._roundoff: dict[str, float] = {}
        self._results = paired_results(baseline, candidate)
        self._num_tried = 0
        self._ports = ports(baseline), ports(candidate)
        self.pairs: dict[str, SitePair] = {}

    @torch.no_grad()
    def find(self) -> dict[str, SitePair]:
        """Return the pairs, by node of the baseline."""
        for node in self._baseline.graph.nodes:
            if node.op == "output" or "_assert" in str(node.target):
                continue
            try:
                predicted = self._predict(node, {})
            except Unknown:
                if node.name in self._proposed:
                    self._settle(node, self._proposed[node.name].candidate.node)
                continue
            self._values[node.name] = predicted
            if node.op == "call_function" and is_tensor_node(node):
                self._roundoff[node.name] = self._roundoff_of(node)
                counterpart = self._counterpart(node, predicted)
                if counterpart is not None:
                    self._settle(node, counterpart)
        return self.pairs

    def _counterpart(self, node: Node, predicted: Values) -> str | None:
        proposed = self._proposal(node)
        if op_name(node) in RANDOM | UNDEFINED:
            return proposed
        result = self._results.get(node.name)
        if result is not None and result in self._tensors.nodes:
            return result
        if not all(value.is_floating_point() for value in predicted):
            # Integers and masks are too alike for their values to say which is which.
            known = proposed or sibling_of(node, self._found, self._tensors.nodes)
            is_free = known is not None and known not in self._tensors.taken
            agrees = is_free and self._tensors.distance(str(known), predicted) == 0
            return known if agrees or self._has_same_inputs(node, proposed) else None
        return self._closest(node, predicted) or self._contradicting(node, predicted, proposed)

    def _proposal(self, node: Node) -> str | None:
        pair = self._proposed.get(node.name)
        if pair is None or pair.candidate.node not in self._tensors.nodes or pair.candidate.node in self._tensors.taken:
            return None
        return pair.candidate.node

    def _closest(self, node: Node, predicted: Values) -> str | None:
        """Return the tensor that is the prediction up to rounding, and that what is below `node` follows from."""
        close = self._close(node, predicted)
        found = next((name for name in close if self._is_followed(node, predicted, name)), None)
        if found is None:
            return None
        theirs = self._tensors.nodes[found]
        source = theirs.args[0] if op_name(theirs) in CASTS else None
        # What is rounded in one place and goes on unrounded in another is the unrounded tensor.
        goes_on = isinstance(source, Node) and any(op_name(user) not in CASTS for user in source.users)
        return source.name if goes_on and isinstance(source, Node) and source.name in close else found

    def _close(
        self, node: Node, predicted: Values, instead: Sequence[str] = (), *, beside_padding: bool = True
    ) -> list[str]:
        """Return the tensors that are the prediction up to rounding and nobody's counterpart yet, best first.

        `instead` are tensors that take the place of inputs: neither they nor what they are made of can be made of them.
        """
        ranked = []
        own = node.meta["val"].dtype
        coarser = rounded_to(node)
        pair = self._proposed.get(node.name)
        inputs = [self._found[source.name] for source in node.all_input_nodes if source.name in self._found]
        made_of = 0
        for name in [*inputs, *instead]:
            made_of |= self._tensors.ancestors[name]
        computes = not passes_on(node)
        for name in self._tensors.alike(predicted, made_of):
            theirs = self._tensors.nodes[name]
            if theirs.meta["val"].dtype in coarser:
                # It is what the cast below makes.
                continue
            if computes and origin_of(theirs).name in inputs:
                # What goes in, rounded: too coarse to show that the op is not in it.
                continue
            distance = self._tensors.distance(name, predicted, beside_padding=beside_padding)
            if distance <= self._allowed(node, name):
                handicap = 1 if pair is not None and pair.candidate.node == name else _CLOSER
                other_dtype = theirs.meta["val"].dtype is not own
                least = 2 * self._unit(node, name)
                rank = max(distance, least) * handicap, op_name(theirs) != op_name(node), self._tensors.order[name]
                ranked.append(((other_dtype, *rank), name))
        return [name for _, name in sorted(ranked)]

    def _is_followed(self, node: Node, predicted: Values, name: str) -> bool:
        """Whether what is below `node` follows from the tensor no worse than from the prediction.

        A tensor that is near the prediction by chance (a residual stream that a layer hardly changes) is told by this.
        """
        if self._has_same_inputs(node, name):
            return True
        predictions: dict[str, Values] = {node.name: predicted}
        replaced: dict[str, Values] = {node.name: self._tensors.values(name)}
        made_of = self._tensors.ancestors[name]
        for below in next_below(node, self._order, _AHEAD):
            without = self._nearest(below, predictions, 1 << self._tensors.order[name])
            of_it = self._nearest(below, replaced, made_of)
            if without * _TELLING < of_it:
                return False
            if of_it * _TELLING < without:
                return True
        return True

    def _nearest(self, node: Node, env: dict[str, Values], besides: int) -> float:
        """Return how near any tensor is to what `node` makes of `env`, its own roundoff at least."""
        self._num_tried += 1
        try:
            predicted = self._value(node, env)
        except Unknown:
            return math.inf
        if not is_tensor_node(node) or not all(value.is_floating_point() for value in predicted):
            return math.inf
        return min(
            (
                max(self._tensors.distance(name, predicted, beside_padding=False), self._tensors.unit(name))
                for name in self._tensors.alike(predicted, besides)
            ),
            default=math.inf,
        )

    def _contradicting(self, node: Node, predicted: Values, proposed: str | None) -> str | None:
        """Return the tensor that what is below `node` follows from, if it does not follow from the prediction."""
        below = next_below(node, self._order, _AHEAD)
        without, explained = self._first_to_follow(below, {node.name: predicted})
        if without is not None and self._first_to_follow(below, {node.name: predicted}, beside_padding=True)[0] is None:
            # Right but beside padding, where it is not made up for either.
            return next(iter(self._close(node, predicted, beside_padding=False)), None)
        tried: Iterable[str] = (
            self._to_try(node, predicted, proposed) if without != 0 else [proposed] if proposed else []
        )
        for name in tried:
            if self._num_tried > _MOST_TRIED:
                return None
            values = {node.name: self._tensors.values(name)}
            followed, by = self._first_to_follow(
                below[: _AHEAD if without is None else without + 1], values, instead=(name,)
            )
            # What follows from the prediction as well (of three terms, added in another order) does not contradict it.
            if followed is None or (by == explained and not self._has_same_inputs(node, name)):
                continue
            # An op that reads the same on both sides and makes something else is wrong, even if it drowns below.
            if without is None or followed < without or (name == proposed and self._has_same_inputs(node, name)):
                return name
        return self._contradicting_with_partner(node, predicted, proposed) if without is None else None

    def _contradicting_with_partner(self, node: Node, predicted: Values, proposed: str | None) -> str | None:
        """Return the tensor that, with another one for a node passed over before, an op that reads both follows from.

        Queries and keys that are rotated wrong are so together, and an attention follows from neither of them alone.
        """
        for op, other in partners_of(node):
            if other.name in self._found or other.name not in self._values or not other.meta["val"].is_floating_point():
                continue
            below = [op, *next_below(op, self._order, _AHEAD)][:_AHEAD_OF_TWO]
            tried = self._to_try(node, predicted, proposed), self._to_try(other, self._values[other.name], None)
            for name, beside in itertools.product(*(list(itertools.islice(names, _TRIALS_OF_TWO)) for names in tried)):
                values = {node.name: self._tensors.values(name), other.name: self._tensors.values(beside)}
                if name == beside or self._num_tried > _MOST_TRIED:
                    continue
                if self._first_to_follow(below, self._passed_on(other, values), (name, beside))[0] is not None:
                    self._settle(other, beside)
                    self._values.update(self._passed_on(other, {other.name: self._values[other.name]}))
                    return name
        return None

    def _passed_on(self, node: Node, env: dict[str, Values]) -> dict[str, Values]:
        """Return `env` with what was predicted of the views of `node`, predicted anew."""
        for user in node.users:
            if passes_on(user) and user.name in self._values:
                env[user.name] = self._predict(user, env)
                self._passed_on(user, env)
        return env

    def _to_try(self, node: Node, predicted: Values, proposed: str | None) -> Iterator[str]:
        shapes = shapes_of(predicted)
        seen = set()
        inputs = [self._found[source.name] for source in region_of(node, self._found)[1]]
        last = max((self._tensors.order[name] for name in inputs), default=0)
        behind = [
            n
            for n in self._tensors.by_shape.get(shapes, ())
            if self._tensors.order[n] > last and n not in self._tensors.taken
        ]
        # An op, or a region, that the candidate lacks: its input stands in its place.
        for name in [proposed, *inputs, *behind[:_TRIALS]]:
            if name is None or name in seen:
                continue
            seen.add(name)
            values = self._tensors.values(name)
            if shapes_of(values) == shapes and all(value.is_floating_point() for value in values):
                yield name

    def _first_to_follow(
        self,
        below: Sequence[Node],
        env: dict[str, Values],
        instead: Sequence[str] = (),
        *,
        beside_padding: bool = False,
    ) -> tuple[int | None, str | None]:
        """Return the index of the first op below that the candidate has a counterpart of, and that counterpart.

        With the tensors `instead` in place of nodes it must be one that computes, and changes them: every tensor can be
        moved, and to one that is made twice a small number can be added.
        """
        for index, node in enumerate(below):
            self._num_tried += 1
            try:
                predicted = self._predict(node, env)
            except Unknown:
                continue
            env[node.name] = predicted
            if not is_tensor_node(node) or not all(value.is_floating_point() for value in predicted):
                continue
            self._roundoff.setdefault(node.name, self._roundoff_of(node))
            keeps = op_name(node) in MOVES or is_view(node) or op_name(node) == "_to_copy"
            if instead and (keeps or any(self._is_near(node, name, predicted) for name in instead)):
                continue
            if close := self._close(node, predicted, instead, beside_padding=beside_padding):
                return index, close[0]
        return None, None

    def _predict(self, node: Node, env: dict[str, Values]) -> Values:
        """Return the value of a node in each step, in float64."""
        if node.op in ("placeholder", "get_attr"):
            return [self._given(node, step) for step in self._steps]
        results = []
        for index in range(len(self._steps)):

            def value(source: Node, index: int = index) -> Any:
                return self._value(source, env)[index]

            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
            args, kwargs = pytree.tree_map(retarget, (args, kwargs))
            try:
                results.append(target_of(node)(*args, **kwargs))
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
                raise Unknown from error
        return results

    def _value(self, node: Node, env: dict[str, Values]) -> Values:
        for known in (env, self._values):
            if node.name in known:
                return known[node.name]
        env[node.name] = self._predict(node, env)
        return env[node.name]

    def _given(self, node: Node, step: ProbeStep) -> Any:
        if node.op == "get_attr":
            return getattr(self._baseline.exported.graph_module, str(node.target))
        if node.name in self._weights:
            return self._weights[node.name]
        return step.inputs.get(self._ports[0].get(node.name, ""))

    def _settle(self, node: Node, counterpart: str) -> None:
        ours, theirs = _op_site(self._baseline, node.name), _op_site(self._candidate, counterpart)
        if ours is None or theirs is None or counterpart not in self._tensors.nodes:
            return
        self._found[node.name] = counterpart
        self._tensors.taken.add(counterpart)
        self._values[node.name] = self._tensors.values(counterpart)
        own: torch.dtype = node.meta["val"].dtype
        # A candidate that keeps unrounded what the baseline rounds may round it later.
        is_finer = own.is_floating_point and self._tensors.unit(counterpart) < unit_roundoff(own)
        self._roundoff[node.name] = unit_roundoff(own) if is_finer else 0.0
        known = self._proposed.get(node.name)
        same = known is not None and known.candidate.node == counterpart
        self.pairs[node.name] = known if known is not None and same else SitePair(ours, theirs, "content", None)

    def _roundoff_of(self, node: Node) -> float:
        """Unit roundoff of what a region has rounded so far; that of the node alone where its inputs were found."""
        own: torch.dtype = node.meta["val"].dtype
        inputs = [self._roundoff.get(source.name, 0.0) for source in node.all_input_nodes]
        return max([unit_roundoff(own) if own.is_floating_point else 0.0, *inputs])

    def _has_same_inputs(self, node: Node, counterpart: str | None) -> bool:
        """Whether the candidate's op is the same and reads the counterparts of what `node` reads."""
        if counterpart is None:
            return False
        return reads_the_same(node, self._tensors.nodes[counterpart], self._found, self._ports)

    def _is_near(self, node: Node, name: str, predicted: Values) -> bool:
        """Whether a tensor is what is predicted of `node` up to rounding."""
        if shapes_of(self._tensors.values(name)) != shapes_of(predicted):
            return False
        return self._tensors.distance(name, predicted, beside_padding=False) <= self._allowed(node, name)

    def _allowed(self, node: Node, name: str) -> float:
        """How far a tensor may be from what is predicted of `node`."""
        return max(_ROUNDINGS * self._unit(node, name), _LEAST)

    def _unit(self, node: Node, name: str) -> float:
        """Unit roundoff of the coarser of `node`, with its region, and the candidate's tensor."""
        return max(self._roundoff[node.name], self._tensors.unit(name))


def _op_site(program: Program, node: str) -> Site | None:
    return next((site for site in program.sites.by_node.get(node, ()) if site.kind == "op"), None)
