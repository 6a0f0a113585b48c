"""Keeps what is known of two programs while they are paired: tensors, weights and predictions, and the pairs."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.pairing.candidate_tensors import (
    CandidateTensor,
    CandidateTensors,
    ProbeStep,
    Values,
    ancestors_of,
    is_telling,
    shapes_of,
)
from glassengine.judge.pairing.weights import SameWeights
from glassengine.judge.replay.values import predicted_in_float64
from glassengine.judge.site_pairs import (
    SitePair,
    difference,
    origin_of,
    pair_sites,
    paired_results,
    passes_on,
    ports,
    readers_of,
    reads_counterparts,
    rounded_to,
)
from glassengine.numerics.arrangements import Arrangement
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.kinds import in_kind
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program

_ROUNDINGS = 16
"""Unit roundoffs by which a tensor may differ from its prediction: rounding of a region, not of one op."""
_LEAST = 2e-5
"""Of the same: differences of numbers of one size amplify the rounding of float32."""
MOST_FOREIGN = 2
"""Weights that a node is not made with, and its counterpart, which is wrong, may be."""
_CLOSER = 8
"""What the same op makes of the same is passed over for a tensor that is this many times closer to the prediction."""


class ProgramPairs:
    """Pairs of two programs and what they rest on.

    Args:
        baseline: With weights.
        candidate: With weights.
        steps: What the candidate was given and made.

    Attributes:
        order: Baseline node -> place in the graph.
        tensors: The candidate's tensors.
        predictions: Of the baseline's nodes.
        weights: Weights that are the same.
        results: Node of a result -> the candidate's node of that result.
        counterparts: Baseline node -> the candidate's tensor, arranged.
        agreeing: Baseline nodes whose counterparts are what was predicted -> how far from that, in unit roundoffs.
        pairs: Baseline node -> pair.
    """

    def __init__(self, baseline: Program, candidate: Program, steps: Sequence[ProbeStep]) -> None:
        self._baseline, self._candidate = baseline, candidate
        self.tensors = CandidateTensors(candidate, steps)
        self.predictions = Predictions(baseline, steps)
        self.order = self.predictions.order
        self.weights = SameWeights(baseline, candidate)
        self.results = paired_results(baseline, candidate)
        self._proposed = {pair.baseline.node: pair for pair in pair_sites(baseline, candidate)[0]}
        self._ports = ports(baseline), ports(candidate)
        self._roundoff: dict[str, float] = {}
        self.counterparts: dict[str, CandidateTensor] = {}
        self.predictions.counterparts = self.counterparts
        self.agreeing: dict[str, float] = {}
        self.pairs: dict[str, SitePair] = {}

    def reads_the_same(self, node: Node, counterpart: str) -> bool:
        """Whether the candidate's op is the same and reads the counterparts of what `node` reads."""
        theirs = self.tensors.nodes[counterpart]
        if node.target != theirs.target:
            return False
        names = {
            source.name: self.counterparts[source.name].name
            for source in node.all_input_nodes
            if source.name in self.counterparts
        }
        return reads_counterparts(node, theirs, names, self._ports) and self.weights.agree(node, theirs)

    def same_op(self, node: Node, predicted: Values | None = None) -> CandidateTensor | None:
        """Return what the candidate's same op makes of the counterparts of what `node` reads, where there is one.

        Args:
            node: Of the baseline.
            predicted: Its value, to arrange what is found; None leaves it as it is.
        """
        names: dict[str, None] = {}
        proposed = self.proposal(node)
        for source in node.all_input_nodes:
            known = self.counterparts.get(source.name)
            theirs = self.tensors.all_nodes.get(known.name) if known is not None else None
            if source.op == "placeholder":
                theirs = self.tensors.inputs.get(self._ports[0].get(source.name, ""))
            for user in [] if theirs is None else theirs.users:
                if user.name in self.tensors.nodes and self.reads_the_same(node, user.name):
                    names[user.name] = None
        if not node.all_input_nodes and proposed is not None and self.reads_the_same(node, proposed.name):
            names[proposed.name] = None
        free = [name for name in names if name not in self.tensors.taken]
        free = [name for name in free if difference(node, self.tensors.nodes[name]) is None] or free
        name = proposed.name if proposed is not None and proposed.name in free else free[0] if len(free) == 1 else None
        if name is None or predicted is None:
            return None if name is None else CandidateTensor(name)
        return self.tensors.likeliest(name, predicted, self.hows())

    def foreign(self, node: Node, names: Iterable[str]) -> dict[str, int]:
        """Return for tensors of the candidate with how many weights they are made that `node` is not made with.

        One wrong weight is a mistake; several are another layer. Of a weight that is read in several passes, a larger
        share of its readers is another pass: it counts as several.
        """
        above, once = self.predictions.ancestors[node.name], 0
        shared: list[tuple[float, int, int]] = []
        for ours, theirs in self._readers:
            if not theirs:
                continue
            own, number, is_shared = (above & ours).bit_count(), ours.bit_count(), ours.bit_count() > 1
            if not own and not is_shared and theirs.bit_count() == 1:
                once |= theirs
            elif own < number:
                # Either side may read it oftener for the same: in parts, or in a layer that the other lacks.
                most = max(own, own / number * theirs.bit_count())
                shared.append((most, theirs, MOST_FOREIGN + 1 if is_shared else 1))
        found = {}
        for name in names:
            made_of = self.tensors.ancestors[name]
            others = sum(number for most, theirs, number in shared if (made_of & theirs).bit_count() > most)
            found[name] = (made_of & once).bit_count() + others
        return found

    @cached_property
    def _readers(self) -> list[tuple[int, int]]:
        """Of each weight that both sides have, as bits, the ops of the baseline that read it, and the candidate's.

        The candidate's are 0 where none of its ops reads the weight.
        """
        found: dict[tuple[str, ...], list[int]] = {}
        for weight in self._baseline.weights():
            same = tuple(self.weights.as_stored(weight))
            both = found.setdefault(same, [0, 0])
            for user in readers_of(self._baseline.node(weight)):
                both[0] |= 1 << self.order[user.name]
            for user in (user for name in same for user in readers_of(self.tensors.all_nodes[name])):
                both[1] |= 1 << self.tensors.order[user.name]
        return [(ours, theirs) for same, (ours, theirs) in found.items() if same and ours]

    def of_other_ops(self, node: Node) -> int:
        """Return, as bits, the candidate's ops that alone read a weight of another op, where that of `node` is unread.

        The op is missing then, and none of them is wrong in its place.
        """
        own = 1 << self.order[node.name]
        if not any(ours & own and not theirs for ours, theirs in self._readers):
            return 0
        alone = (theirs for ours, theirs in self._readers if not ours & own and theirs.bit_count() == 1)
        return functools.reduce(operator.or_, alone, 0)

    def proposal(self, node: Node) -> CandidateTensor | None:
        """Return the tensor of the same place in a module of the same name."""
        pair = self._proposed.get(node.name)
        if pair is None or pair.candidate.node not in self.tensors.nodes or pair.candidate.node in self.tensors.taken:
            return None
        return CandidateTensor(pair.candidate.node)

    def close(
        self, node: Node, predicted: Values, instead: Sequence[CandidateTensor] = (), *, beside_padding: bool = True
    ) -> list[CandidateTensor]:
        """Return the tensors that are the prediction up to rounding and not yet a counterpart, best first.

        `instead` are tensors that take the place of inputs: neither they nor what they are made of can be made of them.
        """
        ranked = []
        own = node.meta["val"].dtype
        coarser = rounded_to(node)
        proposed = self.proposal(node)
        names = [source.name for source in node.all_input_nodes]
        inputs = [self.counterparts[name].name for name in names if name in self.counterparts]
        made_of = 0
        for name in [*inputs, *(seen.name for seen in instead)]:
            made_of |= self.tensors.ancestors[name]
        computes = not passes_on(node)
        near = self.tensors.close(
            predicted, lambda name: self.allowed(node, name), made_of, beside_padding=beside_padding
        )
        is_turned = proposed is not None and self.is_turned(node, proposed)
        for distance, seen in near:
            theirs = self.tensors.nodes[seen.name]
            if is_turned and proposed != seen:
                continue  # a difference with its operands exchanged is itself transposed, or that of another layer
            if theirs.meta["val"].dtype in coarser:
                # It is what the cast below makes.
                continue
            if computes and origin_of(theirs).name in inputs:
                # What goes in, rounded: too coarse to show that the op is not in it.
                continue
            if seen.how is not None:
                is_square = shapes_of(self.tensors.values(CandidateTensor(seen.name))) == shapes_of(predicted)
                if not is_telling(predicted, is_turned=is_square):
                    continue
            is_same = self.reads_the_same(node, seen.name)
            is_proposed = proposed is not None and proposed.name == seen.name
            size = max(distance, 2 * self.unit(node, seen.name)) * (1 if is_same else _CLOSER)
            rank = (
                theirs.meta["val"].dtype is not own,
                seen.how is not None,
                size,
                op_name(theirs) != op_name(node),
                not is_proposed,
                self.tensors.order[seen.name],
            )
            ranked.append((rank, seen))
        return [seen for _, seen in sorted(ranked, key=lambda item: item[0])]

    def is_turned(self, node: Node, seen: CandidateTensor) -> bool:
        """Whether the candidate's op is the same, but reads the counterparts of its two operands in exchange."""
        theirs = self.tensors.nodes[seen.name]
        if node.target is not theirs.target or traits_of(node).kind not in ("term", "factor"):
            return False
        known = [self.counterparts.get(source.name) for source in node.all_input_nodes]
        read = [seen.name for seen in known if seen is not None and seen.how is None]
        theirs_read = [source.name for source in theirs.all_input_nodes]
        return len(read) == 2 and read != theirs_read and read == theirs_read[::-1] and not traits_of(node).commutes

    def settle(self, node: Node, seen: CandidateTensor) -> None:
        """Make a tensor of the candidate the counterpart of a node."""
        ours, theirs = self._baseline.sites.op_of(node.name), self._candidate.sites.op_of(seen.name)
        if ours is None or theirs is None or seen.name not in self.tensors.nodes:
            return
        self.counterparts[node.name] = seen
        self.tensors.taken.add(seen.name)
        own: torch.dtype = node.meta["val"].dtype
        self.predictions.values[node.name] = [in_kind(value, own) for value in self.tensors.values(seen)]
        # A candidate that keeps unrounded what the baseline rounds may round it later.
        is_finer = own.is_floating_point and self.tensors.unit(seen.name) < unit_roundoff(own)
        self._roundoff[node.name] = unit_roundoff(own) if is_finer else 0.0
        known = self._proposed.get(node.name)
        if known is not None and known.candidate.node == seen.name and seen.how is None:
            self.pairs[node.name] = known
            return
        is_same = seen.how is None and self.reads_the_same(node, seen.name)
        how = difference(node, self.tensors.nodes[seen.name]) if is_same else None
        self.pairs[node.name] = SitePair(ours, theirs, "content", how, seen.how)

    def take_back(self, node: Node) -> None:
        """Forget what is known of a node; `tensors.taken` is left to the caller."""
        self.counterparts.pop(node.name, None)
        self.pairs.pop(node.name, None)
        self.predictions.values.pop(node.name, None)
        self._roundoff.pop(node.name, None)
        self.agreeing.pop(node.name, None)

    def roundoff(self, node: Node) -> None:
        """Work out the unit roundoff of a node that is not visited yet: of what its region has rounded so far.

        Where its inputs were found it is that of the node alone.
        """
        if node.name not in self._roundoff:
            own: torch.dtype = node.meta["val"].dtype
            inputs = [self._roundoff.get(source.name, 0.0) for source in node.all_input_nodes]
            self._roundoff[node.name] = max([unit_roundoff(own) if own.is_floating_point else 0.0, *inputs])

    def hows(self) -> list[Arrangement]:
        """Return the arrangements of the tensors found so far, the most frequent first."""
        counts = Counter(seen.how for seen in self.counterparts.values() if seen.how is not None)
        return [how for how, _ in counts.most_common()]

    def is_near(self, node: Node, seen: CandidateTensor, predicted: Values) -> bool:
        """Whether a tensor is what is predicted of `node` up to rounding."""
        if shapes_of(self.tensors.values(seen)) != shapes_of(predicted):
            return False
        return self.tensors.distance(seen, predicted, beside_padding=False) <= self.allowed(node, seen.name)

    def allowed(self, node: Node, name: str) -> float:
        """How far a tensor may be from what is predicted of `node`."""
        return max(_ROUNDINGS * self.unit(node, name), _LEAST)

    def unit(self, node: Node, name: str) -> float:
        """Unit roundoff of the coarser of `node`, with its region, and the candidate's tensor."""
        return max(self._roundoff[node.name], self.tensors.unit(name))


class UnknownValue(Exception):
    """The value of a node is unknown: an input of it is, or the op does not take it."""


class PairingTrial(dict[str, Values]):
    """Values that take the place of known ones, for a while, and what was computed with them.

    Attributes:
        replaced: Nodes that were given a value, as the bits of their places.
    """

    replaced: int = 0


class Predictions:
    """Values of a baseline's nodes.

    Args:
        program: The baseline, with weights.
        steps: What the candidate was given.

    Attributes:
        order: Node -> place in the graph.
        ancestors: Node -> itself and what it is made of, as the bits of their places.
        values: Node -> its value in each step: the counterpart's where it has one, else what was predicted.
        counterparts: Nodes whose values are the candidate's own.
    """

    def __init__(self, program: Program, steps: Sequence[ProbeStep]) -> None:
        self._program, self._steps = program, steps
        self._weights = program.weights()
        self._ports = ports(program)
        self.order = {node.name: place for place, node in enumerate(program.graph.nodes)}
        self.ancestors = ancestors_of(program)
        self.values: dict[str, Values] = {}
        self.counterparts: Collection[str] = ()

    def trial(self, values: Mapping[str, Values]) -> PairingTrial:
        """Return values that take the place of what is known of some nodes, and of what is below them."""
        found = PairingTrial(values)
        for name in values:
            found.replaced |= 1 << self.order[name]
        return found

    def predict(self, node: Node, env: PairingTrial) -> Values:
        """Return the value of a node in each step, in float64.

        Args:
            node: Of the baseline.
            env: Values that take the place of known ones; what is computed on the way is added.

        Raises:
            UnknownValue: It cannot be predicted.
        """
        if node.op in ("placeholder", "get_attr"):
            return [self._given(node, step) for step in self._steps]
        results = []
        for index in range(len(self._steps)):

            def value(source: Node, index: int = index) -> Any:
                return self.value(source, env)[index]

            try:
                results.append(predicted_in_float64(node, value))
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
                raise UnknownValue from error
        return results

    def value(self, node: Node, env: PairingTrial) -> Values:
        """Return a value that is known, or predict it."""
        if node.name not in env:
            # What was predicted from a value that another one takes the place of does not hold.
            holds = node.name in self.counterparts or not self.ancestors[node.name] & env.replaced
            known = self.values.get(node.name) if holds else None
            env[node.name] = self.predict(node, env) if known is None else known
        return env[node.name]

    def _given(self, node: Node, step: ProbeStep) -> Any:
        if node.op == "get_attr":
            return getattr(self._program.exported.graph_module, str(node.target))
        if node.name in self._weights:
            return self._weights[node.name]
        return step.inputs.get(self._ports.get(node.name, ""))
