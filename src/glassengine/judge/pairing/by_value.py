"""Pair the ops of two programs that are written differently, by what they compute.

    probe       the candidate runs two steps; all its tensors are available
    predict     node by node, the baseline's op in float64 on the candidate's own inputs of that op
    find        the tensor of the candidate that is the prediction up to rounding, in any arrangement; of several,
                what the same op makes of the same. What it comes from cannot be made of it, and what is below follows
                from it no worse than from the prediction
    look ahead  nothing is: the candidate does not have this tensor (it is written with other ops), or has it wrong. If
                on every way to the results the two have a tensor in common again, it is right as far as it matters
    go on       where they have none, a tensor is wrong: which one, what comes next tells (see `find_wrong_tensor`)

A node without a counterpart keeps its prediction, so that what is below it is predicted from the last tensors that both
sides have: a region, judged where it ends (see `regions`). Results of the programs are counterparts by name or order,
for any values. Names are no evidence: of two tensors that are equal otherwise, the one in the same place is taken.

Predictions are compared loosely, as far as rounding within a region goes; the verdict has a finer measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Node

from glassengine.judge.cases import Case
from glassengine.judge.pairing.candidate_tensors import (
    CandidateTensor,
    ProbeStep,
    Values,
    is_telling,
    numbers_of,
    probe,
    shapes_of,
)
from glassengine.judge.pairing.find_wrong_tensor import WrongTensorSearch, keeps
from glassengine.judge.pairing.program_pairs import PairingTrial, ProgramPairs, UnknownValue
from glassengine.judge.site_pairs import (
    SitePair,
    difference,
    next_below,
    origin_of,
    pair_sites,
    passes_on,
    place_of,
    ports,
    reads_counterparts,
    sibling_of,
)
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program

_TELLING = 2
"""A tensor and the prediction are distinguished by an op below that follows this many times closer from one of them."""
_AHEAD = 12
"""How many ops below a node are asked whether they follow from it."""
_TIGHT = 4
"""Unit roundoffs by which tensors differ below a region that is right; a mistake below the noise leaves more."""
_MOST_LOOKS = 24
"""How often the tensors ahead are examined again, once after each wrong tensor."""


class Counterparts:
    """The pairs of two programs, found on steps of the candidate.

    Args:
        baseline: With weights.
        candidate: With weights.
        steps: What the candidate was given and made.
    """

    def __init__(self, baseline: Program, candidate: Program, steps: Sequence[ProbeStep]) -> None:
        self._baseline = baseline
        self._known = ProgramPairs(baseline, candidate, steps)
        self._search = WrongTensorSearch(self._known)
        self._places: dict[str, int] = {}
        self._wrong: dict[str, CandidateTensor] = {}
        self._also_wrong: set[str] = set()
        self._layers = _of_layers(baseline), _of_layers(candidate)

    @torch.no_grad()
    def find(self) -> dict[str, SitePair]:
        """Return the pairs, by node of the baseline."""
        nodes: list[Node] = [
            node for node in self._baseline.graph.nodes if node.op != "output" and "_assert" not in str(node.target)
        ]
        self._places = {node.name: place for place, node in enumerate(nodes)}
        start, looks = 0, 0
        while start < len(nodes):
            # What comes after is a look ahead: it stands if nothing before it turns out to be wrong.
            self._also_wrong.clear()
            passed = [place for place in range(start, len(nodes)) if not self._visit(nodes[place])]
            looks += 1
            start = self._first_wrong(nodes, passed, is_last=looks >= _MOST_LOOKS)
        return self._known.pairs

    def _first_wrong(self, nodes: Sequence[Node], passed: Sequence[int], *, is_last: bool) -> int:
        """Settle the first node that the candidate has wrong, take back what is below; return where to go on."""
        explained = self._explained()
        for place in passed:
            node = nodes[place]
            if node.name in self._known.counterparts:
                continue
            apart, proposed = explained.get(node.name), self._known.proposal(node)
            turned = proposed if proposed is not None and self._known.is_turned(node, proposed) else None
            if self._is_number(node):
                turned = None
            elif turned is None or node.name in self._explained(turned):
                continue
            is_asked = not passes_on(origin_of(node, self._known.counterparts))
            if passes_on(node) and (apart is not None or is_asked):
                # What makes its values was asked before.
                continue
            if turned is not None:
                found = [(node, turned)]
            else:
                predicted = self._known.predictions.values[node.name]
                found = self._search.wrong(node, predicted, proposed, meets=apart is not None)
            is_turned = any(self._known.is_turned(*pair) for pair in found)
            # An error below the noise: what reads the tensor is right as it is.
            is_hidden = apart is not None and apart <= _TIGHT and not is_turned
            if found and not is_hidden and not is_last:
                start = min(self._places[other.name] for other, _ in found)
                for later in nodes[start:]:
                    self._known.take_back(later)
                self._known.tensors.taken = {seen.name for seen in self._known.counterparts.values()}
                self._wrong |= {other.name: seen for other, seen in found}
                return start
            for other, seen in found:
                self._known.settle(other, seen)
        return len(nodes)

    def _is_number(self, node: Node) -> bool:
        """Whether a node computes floating numbers that could be predicted."""
        known = self._known.predictions.values.get(node.name)
        return is_tensor_node(node) and known is not None and all(value.is_floating_point() for value in known)

    def _explained(self, of: CandidateTensor | None = None) -> dict[str, float]:
        """Return the nodes on whose every way to a result there is a tensor that both sides have, none of them wrong.

        Node -> how far apart these tensors are, in unit roundoffs. Where one of the candidate's is given, the tensors
        are made `of` it, and have the same axes: of a difference that is turned, much is the right one transposed.
        """
        known, agreeing = self._known, self._known.agreeing
        if of is not None:
            made_of, own = known.tensors.ancestors, 1 << known.tensors.order[of.name]
            seen = {name: known.counterparts[name] for name in agreeing}
            agreeing = {n: agreeing[n] for n, one in seen.items() if one.how is None and made_of[one.name] & own}
        explained: dict[str, float] = {}
        for node in reversed(self._baseline.graph.nodes):
            if node.op == "output" or node.name in known.results or node.name in self._also_wrong:
                continue
            users = [user.name for user in node.users if "_assert" not in str(user.target)]
            meets = [agreeing.get(user, explained.get(user)) for user in users]
            met = [distance for distance in meets if distance is not None]
            if len(met) == len(meets):
                explained[node.name] = max(met, default=0.0)
        return explained

    def _visit(self, node: Node) -> bool:
        """Predict a node and pair it by its value; return whether it needs, or has, no counterpart by another way."""
        known = self._known.predictions
        try:
            predicted = known.predict(node, known.trial({}))
        except UnknownValue:
            same = self._known.same_op(node) or self._known.proposal(node)
            if same is not None:
                self._known.settle(node, same)
            return True
        known.values[node.name] = predicted
        if not is_tensor_node(node):
            return True
        self._known.roundoff(node)
        if node.name in self._wrong:
            self._known.settle(node, self._wrong[node.name])
            return True
        counterpart = self._counterpart(node, predicted)
        if counterpart is None:
            wrong = self._wrong_in_layer(node, predicted)
            if wrong is not None:
                self._known.settle(node, wrong)
                self._also_wrong.add(node.name)
            return wrong is not None or self._is_as_its_source(node, predicted)
        distance = self._apart(node, counterpart, predicted)
        if distance is not None:
            self._known.agreeing[node.name] = distance
        self._known.settle(node, counterpart)
        return True

    def _wrong_in_layer(self, node: Node, predicted: Values) -> CandidateTensor | None:
        """Return the tensor that is wrong here as one is in the same place of another layer; None if there is none.

        Without this, a mistake in every layer takes one look ahead for each layer.
        """
        ours = self._layers[0].get(node.name, ())
        other = next((name for name in ours if name in self._wrong), None)
        if other is None or not self._is_number(node):
            return None
        theirs = self._layers[1].get(self._wrong[other].name, ())
        if len(theirs) != len(ours):
            return None
        seen = CandidateTensor(theirs[ours.index(node.name)], self._wrong[other].how)
        is_free = seen.name in self._known.tensors.nodes and seen.name not in self._known.tensors.taken
        return seen if is_free and self._search.is_wrong(node, predicted, seen) else None

    def _is_as_its_source(self, node: Node, predicted: Values) -> bool:
        """Whether a view is the counterpart of what it views: the candidate made the tensor in this shape at once."""
        source = node.args[0] if passes_on(node) and node.args else None
        known = self._known.counterparts.get(source.name) if isinstance(source, Node) else None
        return known is not None and self._apart(node, CandidateTensor(known.name), predicted) is not None

    def _apart(self, node: Node, seen: CandidateTensor, predicted: Values) -> float | None:
        """Return how far a tensor is from a prediction, in unit roundoffs; None if that is not rounding."""
        if shapes_of(self._known.tensors.values(seen)) != shapes_of(predicted):
            return None
        distance = self._known.tensors.distance(seen, predicted)
        if not all(value.is_floating_point() for value in [*predicted, *self._known.tensors.values(seen)]):
            return None if distance else 0.0
        is_rounding = distance <= self._known.allowed(node, seen.name)
        return distance / self._known.unit(node, seen.name) if is_rounding else None

    def _counterpart(self, node: Node, predicted: Values) -> CandidateTensor | None:
        if traits_of(node).is_arbitrary:
            return self._known.same_op(node) or self._known.proposal(node)
        result = self._known.results.get(node.name)
        if result is not None and result in self._known.tensors.nodes:
            return CandidateTensor(result)
        is_one_number = max(numbers_of(predicted)) > 1 and not is_telling(predicted)
        if is_one_number or not all(value.is_floating_point() for value in predicted):
            return self._same_choice(node, predicted)
        if not any(bool(value.isfinite().any()) for value in predicted):
            # NaN is like all NaN.
            return self._known.same_op(node) or self._known.proposal(node)
        return self._closest(node, predicted)

    def _same_choice(self, node: Node, predicted: Values) -> CandidateTensor | None:
        """Return the counterpart of integers, a mask, one number: too alike for values alone to say which is which."""
        names = {name: seen.name for name, seen in self._known.counterparts.items()}
        read = [self._known.counterparts.get(source.name) for source in node.all_input_nodes]
        # A choice among tensors of other dimensions has others, too: its own are not evidence.
        is_arranged = any(seen is not None and seen.how is not None for seen in read)
        same = self._known.same_op(node, predicted if is_arranged else None)
        sibling = sibling_of(node, names, self._known.tensors.nodes)
        beside = None if sibling is None else CandidateTensor(sibling)
        for known in filter(None, (same, self._known.proposal(node), beside)):
            if known.name not in self._known.tensors.taken and self._known.tensors.distance(known, predicted) == 0:
                return known
        return None if same is not None and self._is_of_another(node, same) else same

    def _is_of_another(self, node: Node, seen: CandidateTensor) -> bool:
        """Whether the candidate has fewer such views of a tensor, and its own is another one of the baseline's."""
        theirs = self._known.tensors.nodes[seen.name]
        ours, there = (
            [one for one in op.graph.find_nodes(op=op.op, target=op.target) if origin_of(one) is origin_of(op)]
            for op in (node, theirs)
        )
        is_other = len(there) < len(ours) and difference(node, theirs) is not None
        return is_other and any(difference(one, theirs) is None for one in ours)

    def _closest(self, node: Node, predicted: Values) -> CandidateTensor | None:
        """Return the tensor that is the prediction up to rounding, and that what is below `node` follows from."""
        close = self._known.close(node, predicted)
        found = next((seen for seen in close if self._is_followed(node, predicted, seen)), None)
        if found is None:
            return None
        theirs = self._known.tensors.nodes[found.name]
        source = theirs.args[0] if traits_of(theirs).casts else None
        # What is rounded in one place and goes on unrounded in another is the unrounded tensor.
        goes_on = isinstance(source, Node) and any(not traits_of(user).casts for user in source.users)
        unrounded = next((seen for seen in close if isinstance(source, Node) and seen.name == source.name), None)
        return unrounded if goes_on and unrounded is not None else found

    def _is_followed(self, node: Node, predicted: Values, seen: CandidateTensor) -> bool:
        """Whether what is below `node` follows from the tensor no worse than from the prediction.

        A tensor that is near the prediction by chance (a residual stream that a layer hardly changes) is found by this.
        """
        if self._known.reads_the_same(node, seen.name):
            return True
        allowed = self._known.allowed(node, seen.name)
        predictions = self._known.predictions.trial({node.name: predicted})
        replaced = self._known.predictions.trial({node.name: self._known.tensors.values(seen)})
        made_of = self._known.tensors.ancestors[seen.name]
        for below in next_below(node, _AHEAD):
            of_it = self._nearest(below, replaced, made_of, allowed)
            if of_it <= _TIGHT * self._known.unit(node, seen.name) and not keeps(below):
                return True
            without = self._nearest(below, predictions, 1 << self._known.tensors.order[seen.name], allowed)
            if min(without, of_it) > allowed:
                continue  # what the candidate has below is neither: which of two strangers is nearer says nothing
            if without * _TELLING < of_it:
                return False
            if of_it * _TELLING < without:
                return True
        return True

    def _nearest(self, node: Node, env: PairingTrial, besides: int, allowed: float) -> float:
        """Return how near any tensor is to what `node` makes of `env`, its own roundoff at least.

        Infinite beyond `_TELLING` times `allowed`: a tensor that is farther decides nothing.
        """
        try:
            predicted = self._known.predictions.value(node, env)
        except UnknownValue:
            return math.inf
        if not is_tensor_node(node) or not all(value.is_floating_point() for value in predicted):
            return math.inf
        tensors = self._known.tensors
        alike = list(tensors.alike(predicted, _TELLING * allowed, besides))
        near = (max(tensors.distance(seen, predicted, beside_padding=False), tensors.unit(seen.name)) for seen in alike)
        return min(near, default=math.inf)


def pair_programs(baseline: Program, candidate: Program, cases: Sequence[Case]) -> dict[str, SitePair]:
    """Return baseline node -> pair; programs of the same ops in the same order pair without being run."""
    pairs, ours, theirs = pair_sites(baseline, candidate)
    counterparts = {pair.baseline.node: pair.candidate.node for pair in pairs}
    left, right = baseline.nodes, candidate.nodes
    names = ports(baseline), ports(candidate)
    are_files = baseline.onnx is not None and candidate.onnx is not None
    other_ops = {a for a, b in counterparts.items() if left[a].target != right[b].target}
    is_alike = not ours and not theirs and (are_files or not other_ops) and _are_apart(other_ops, left)
    if is_alike and all(reads_counterparts(left[a], right[b], counterparts, names) for a, b in counterparts.items()):
        return {pair.baseline.node: pair for pair in pairs}
    return Counterparts(baseline, candidate, probe(candidate, cases)).find()


def _of_layers(program: Program) -> dict[str, Sequence[str]]:
    """Return for each op those in its place in all layers, itself among them, in the order of the graph."""
    sites = {node.name: program.sites.op_of(node.name) for node in program.graph.nodes}
    alike: dict[str, list[str]] = {}
    for name, site in sites.items():
        alike.setdefault(name if site is None else place_of(site.name, site.source), []).append(name)
    return {name: names for names in alike.values() for name in names if len(names) > 1}


def _are_apart(nodes: Collection[str], graph: Mapping[str, Node]) -> bool:
    """Whether no two of these nodes are neighbors: what is written with other ops in another order takes two of them.

    One op alone instead of another one makes the same, or is wrong, even if a maximum after it hides the difference.
    """
    beside = (other for name in nodes for other in (*graph[name].all_input_nodes, *graph[name].users))
    return not any(other.name in nodes for other in beside)
