"""Finds the wrong candidate tensor: the one whose value explains the ops below it.

Between the last tensors that two programs have in common and the next there is a mistake. A tensor of the candidate is
the counterpart of a node, wrong as it is, if the ops below the node make of it what the candidate has below it:

    same op       it is made by the same op, of the same tensors and weights
    near          it is close to the prediction, though too far for rounding
    weights       it is read by the op that has the weights of the op below
    inputs        an op, or a region, that the candidate lacks: its input stands in its place
    behind        any other one between the tensors that have counterparts, in the order of the graph

What follows must be made of the tensor in the candidate, too, and tensors that are right elsewhere are not tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Node

from glassengine.judge.pairing.candidate_tensors import CandidateTensor, Values, is_telling, shapes_of
from glassengine.judge.pairing.program_pairs import MOST_FOREIGN, ProgramPairs, UnknownValue
from glassengine.judge.site_pairs import next_below, origin_of, partners_of, passes_on, readers_of, region_of
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node, op_name

_AHEAD = 12
"""How many ops below a node are asked whether they follow from a tensor."""
_AHEAD_OF_TWO = 6
"""The same below an op of whose inputs two are tried at once."""
_TRIALS = 20
"""How many tensors of the candidate are tried instead of one without counterpart: a hand-written norm makes ten."""
_TRIALS_OF_TWO = 10
"""The same of each of two that are tried at once."""
_NEAR = 0.3
"""Distance, relative to the prediction, of a tensor that is a likely counterpart."""
_MOST_NEAR = 3
_WRITING = frozenset({"index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"})
"""Ops that add to the rows of their first argument, or write over them."""
_MOST_TRIED = 20_000
"""Ops predicted to no avail before none is tried any more: the two programs have nothing in common."""


class WrongTensorSearch:
    """Looks for the tensors that a candidate has wrong.

    Args:
        pairs: What is known of the two programs.
    """

    def __init__(self, pairs: ProgramPairs) -> None:
        self._pairs = pairs
        self._num_tried = 0

    def wrong(
        self, node: Node, predicted: Values, proposed: CandidateTensor | None, *, meets: bool
    ) -> list[tuple[Node, CandidateTensor]]:
        """Return the tensor that what is below `node` follows from, if it does not follow from the prediction.

        Args:
            node: That has no counterpart by its value.
            predicted: Its value.
            proposed: The tensor in the same place of a module of the same name.
            meets: Whether the two sides have tensors in common below, on every way to a result.

        Returns:
            Nodes with their counterparts: none, or `node`'s last.
        """
        pairs = self._pairs
        below = next_below(node, _AHEAD)
        first = 1 if meets else None
        following = list(itertools.islice(self._following(below, {node.name: predicted}), first))
        without, explained = following[0] if following else (None, None)
        padded = None if without is None else next(self._following(below, {node.name: predicted}, padded=True), None)
        if without is not None and padded is None:
            # Right but beside padding, where it is not made up for either. Equal rows look like another axis by chance.
            seen = next(iter(pairs.close(node, predicted, beside_padding=False)), None)
            return [] if seen is None or seen.how is not None else [(node, seen)]
        if without is None and meets:
            # Below a long region that is right as a whole; what follows from any one tensor in it does so by chance.
            return []
        same = pairs.same_op(node, predicted)
        if same is None and proposed is not None and pairs.is_turned(node, proposed):
            # A difference with its operands exchanged is itself transposed: what reads it follows from that.
            read = (pairs.counterparts.get(user.name) for user in node.users)
            same = proposed if any(one is not None and one.how is not None for one in read) else None
        needed = {index for index, _ in following if not keeps(below[index])}
        for seen in self._to_try(node, predicted, proposed) if without != 0 or not meets else filter(None, [same]):
            if self._num_tried > _MOST_TRIED:
                return []
            ahead = below[:without] if meets and seen != same else below
            found = self._following(ahead, {node.name: pairs.tensors.values(seen)}, (seen,))
            followed, by = next(found, (None, None))
            if followed is None or by is None:
                continue
            # An op that reads the same on both sides and makes something else is wrong, even if noise hides it below.
            if without is None or seen == same:
                return [(node, seen)]
            # What follows from the prediction as well (of three terms, added in another order) does not contradict it.
            contradicts = followed < without and by != explained
            if meets and not contradicts:
                continue
            all_of_it = {followed: by, **dict(found)}
            if self._comes_later(all_of_it, dict(following)):
                continue
            # Or all that follows from the prediction, and more, on a way on which the two meet no more.
            if contradicts or all_of_it.keys() > needed:
                return [(node, seen)]
        return self._with_partner(node, predicted, proposed) if without is None else []

    def is_wrong(self, node: Node, predicted: Values, seen: CandidateTensor) -> bool:
        """Whether a tensor is a wrong counterpart of `node`: the ops below follow from it, and not from the prediction.

        Where the same op makes the tensor of the same inputs, they may follow from the prediction as well.
        """
        values, below = self._pairs.tensors.values(seen), next_below(node, _AHEAD)
        if shapes_of(values) != shapes_of(predicted) or not any(self._following(below, {node.name: values}, (seen,))):
            return False
        is_same = seen == self._pairs.same_op(node, predicted)
        return is_same or not any(self._following(below, {node.name: predicted}))

    def _comes_later(
        self, of_another: Mapping[int, CandidateTensor], of_prediction: Mapping[int, CandidateTensor]
    ) -> bool:
        """Whether the candidate goes on from what follows from another tensor to what follows from the prediction.

        It scales scores where the baseline scales queries, say: the prediction holds, a few ops later.
        """
        tensors = self._pairs.tensors
        both = [(seen.name, of_prediction[index].name) for index, seen in of_another.items() if index in of_prediction]
        return any(one != other and tensors.ancestors[other] & 1 << tensors.order[one] for one, other in both)

    def _with_partner(
        self, node: Node, predicted: Values, proposed: CandidateTensor | None
    ) -> list[tuple[Node, CandidateTensor]]:
        """Return the tensor that, with another one for a node passed over before, an op that reads both follows from.

        Queries and keys that are rotated wrong are so together, and an attention follows from neither of them alone.
        """
        pairs = self._pairs
        for op, other in partners_of(node):
            known = pairs.predictions.values
            if other.name in pairs.counterparts or other.name not in known or not other.meta["val"].is_floating_point():
                continue
            if pairs.order[other.name] > pairs.order[node.name] or traits_of(op).rounding is Rounding.POINTWISE:
                # Any two terms make their sum.
                continue
            below = [op, *next_below(op, _AHEAD)][:_AHEAD_OF_TWO]
            tried = (
                self._to_try(node, predicted, proposed, each=1),
                self._to_try(other, known[other.name], None, each=1),
            )
            for seen, beside in itertools.product(*(list(itertools.islice(some, _TRIALS_OF_TWO)) for some in tried)):
                values = {node.name: pairs.tensors.values(seen), other.name: pairs.tensors.values(beside)}
                if seen == beside or self._num_tried > _MOST_TRIED:
                    continue
                if next(self._following(below, values, (seen, beside)), None) is not None:
                    return [(other, beside), (node, seen)]
        return []

    def _to_try(
        self, node: Node, predicted: Values, proposed: CandidateTensor | None, *, each: int | None = None
    ) -> Iterator[CandidateTensor]:
        """Yield the tensors that may replace a node, in at most `each` arrangements."""
        shapes = shapes_of(predicted)
        tried: set[CandidateTensor] = set()
        hows = self._pairs.hows()
        for some in self._likely(node, predicted, proposed):
            tensors = self._pairs.tensors
            if some.name not in tensors.nodes or _is_start(tensors.nodes[some.name]):
                continue
            # How a tensor is arranged is known of what is near, and of what has the dimensions of the baseline's.
            known = some.how is not None or shapes_of(tensors.values(some)) == shapes
            likely = tensors.arranged(some.name, predicted, hows)
            for seen in [some] if known else itertools.islice(likely, each):
                values = tensors.values(seen)
                is_float = all(value.is_floating_point() for value in values)
                if seen not in tried and is_float and shapes_of(values) == shapes:
                    tried.add(seen)
                    yield seen

    def _likely(self, node: Node, predicted: Values, proposed: CandidateTensor | None) -> Iterator[CandidateTensor]:
        """Yield the tensors that may replace a node, the likely ones first."""
        pairs, tensors = self._pairs, self._pairs.tensors
        yield from filter(None, [pairs.same_op(node, predicted)])
        if not is_telling(predicted):
            # A table of zeros, the start of a sum: any tensor that is added elsewhere could be added here.
            return
        near = tensors.near(predicted, _NEAR, pairs.hows())
        inputs = [pairs.counterparts[source.name].name for source in region_of(node, pairs.counterparts)[1]]
        read = self._read_with_weights(node)
        names = [name for name in read if name not in tensors.taken or name in inputs]
        last = max((tensors.order[name] for name in inputs), default=0)
        behind = [
            name for name in tensors.of_number(predicted) if tensors.order[name] > last and name not in tensors.taken
        ]
        own = [] if proposed is None else [proposed]
        known = {seen.name for seen in (*own, *near)}.union(names, inputs, behind) & tensors.nodes.keys()
        foreign, of_others = pairs.foreign(node, known), pairs.of_other_ops(node)

        def of_its_layer(name: str) -> bool:
            return foreign.get(name, 0) <= MOST_FOREIGN and not of_others >> tensors.order[name] & 1

        near = [seen for seen in near if of_its_layer(seen.name)][:_MOST_NEAR]
        behind = self._one_of_each(list(filter(of_its_layer, behind)), predicted)[:_TRIALS]
        others = map(
            CandidateTensor, dict.fromkeys([*(n for n in names if read[n] or of_its_layer(n)), *inputs, *behind])
        )
        yield from sorted([*own, *near, *others], key=lambda seen: foreign.get(seen.name, 0))

    def _one_of_each(self, names: Sequence[str], predicted: Values) -> list[str]:
        """Return of each tensor and its views and copies the one that is most like what is predicted."""
        tensors = self._pairs.tensors
        ours = shapes_of(predicted)
        best: dict[str, tuple[bool, bool, int, str]] = {}
        for name in names:
            theirs = shapes_of(tensors.values(CandidateTensor(name)))
            other_sizes = any(sorted(a or ()) != sorted(b or ()) for a, b in zip(theirs, ours, strict=True))
            rank = (theirs != ours, other_sizes, tensors.order[name], name)
            origin = origin_of(tensors.nodes[name]).name
            best[origin] = min(best.get(origin, rank), rank)
        return [name for *_, name in sorted(best.values(), key=lambda rank: rank[2])]

    def _read_with_weights(self, node: Node) -> dict[str, bool]:
        """Return what the candidate reads with the weights that the ops below `node` read, and if only one op does."""
        found: dict[str, bool] = {}
        for user in readers_of(node):
            readers = list(self._pairs.weights.readers(user))
            for source in (source for reader in readers for source in reader.all_input_nodes):
                for one in (origin_of(source), source):
                    found[one.name] = found.get(one.name, False) or len(set(readers)) == 1
        return found

    def _following(
        self,
        below: Sequence[Node],
        replaced: dict[str, Values],
        instead: Sequence[CandidateTensor] = (),
        *,
        padded: bool = False,
    ) -> Iterator[tuple[int, CandidateTensor]]:
        """Yield the places of ops below that the candidate has counterparts of, and these counterparts.

        With the tensors `instead` in place of nodes they must be made of them, by ops that compute, and change them:
        every tensor can be moved, and to one that is made twice a small number can be added.

        Args:
            below: Ops in the order of the graph.
            replaced: The values that they follow from.
            instead: The tensors that these are of.
            padded: Whether rows with padding count.
        """
        pairs, tensors = self._pairs, self._pairs.tensors
        env = pairs.predictions.trial(replaced)
        made_of = sum(1 << tensors.order[seen.name] for seen in instead)
        for index, node in enumerate(below):
            if not instead and node.name in pairs.agreeing:
                yield index, pairs.counterparts[node.name]
                continue
            self._num_tried += 1
            try:
                predicted = pairs.predictions.predict(node, env)
            except UnknownValue:
                continue
            env[node.name] = predicted
            if not is_tensor_node(node) or not all(value.is_floating_point() for value in predicted):
                continue
            pairs.roundoff(node)
            if instead and (keeps(node) or any(pairs.is_near(node, seen, predicted) for seen in instead)):
                continue
            if instead and not is_telling(predicted):
                continue
            close = pairs.close(node, predicted, instead, beside_padding=padded)
            known = pairs.counterparts.get(node.name)
            if known is not None and pairs.is_near(node, known, predicted):
                close.append(known)  # a result, say, which has its counterpart with any values
            found = next((seen for seen in close if tensors.ancestors[seen.name] & made_of == made_of), None)
            if found is not None:
                yield index, found


def _is_start(node: Node) -> bool:
    """Whether a node is a constant to which others are added, or over which they are written."""
    is_constant = traits_of(node).kind == "constant"
    return is_constant and all(op_name(user) in _WRITING and user.args[0] is node for user in node.users)


def keeps(node: Node) -> bool:
    """Whether an op moves or casts values, and computes none."""
    return traits_of(node).moves or passes_on(node)
