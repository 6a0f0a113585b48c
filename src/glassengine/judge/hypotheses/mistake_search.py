"""From a flagged tensor to a question: the baseline's piece on the candidate's values, and what is known of both."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.explain import MistakeExplanation, Rank, differences, explanation
from glassengine.judge.hypotheses.inside import Inside, inside_of
from glassengine.judge.hypotheses.mistakes.candidate_ops import expressions
from glassengine.judge.hypotheses.mistakes.catalog import Family
from glassengine.judge.hypotheses.mistakes.operands import exchanged
from glassengine.judge.hypotheses.trials.hypothesis import called, constants_of, of_weight, part_of, short, whole_of
from glassengine.judge.hypotheses.trials.question import Question, TheirRegion, broadcasts_alike, in_its_dtype, noise_of
from glassengine.judge.hypotheses.trials.trial import FAILS, OF_DIFFERENCES, Budget, Trial, real_parts
from glassengine.judge.pieces import Piece, cut
from glassengine.judge.site_pairs import (
    ancestors,
    done_earlier,
    done_later,
    down,
    origin_of,
    passed_by,
    passed_on,
    readers_of,
    region_of,
    up,
    walk,
)
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name, source_line
from glassengine.program.representation.program import Program
from glassengine.results import Hint
from glassengine.sites import code_of_line

_USER = "user."
_OF_MISSING = frozenset({"activation", "bias missing", "mask", "other", "scale"})
"""Kinds of mistakes that an op looks like that is not done where the baseline does it."""
_OF_ORDER = frozenset({"permuted", "swapped"})
_NUMBER = re.compile(r"(?<![^.@])\d+(?![^.@:/])")
_DEPTHS = (0, 1, 2, 4)
"""How many ops above the flagged one are asked with it: where a tensor is observed need not be where it is made."""
_NEAR = 8
"""Steps above a tensor within which a weight is its own."""
_NEAR_PRODUCT = 4
"""Steps above a tensor that is transposed within which the product is that made it."""
_MOST_OPS = 200
_MOST_OTHERS = 64
_LARGEST_OTHER = 1 << 24
"""Elements of what else could have been read: the matrix of a large vocabulary in float64 is a gigabyte."""


@dataclass
class MistakeSearch:
    """What is known of both sides where a tensor was flagged.

    Attributes:
        program: The baseline's.
        values: What the candidate was given and made in this step, by node of `program`.
        candidate: The candidate's program; None where it has none.
        counterparts: Node of `program` -> node of `candidate`.
        flagged: Nodes of `program` that were flagged in this step: they may be no counterparts at all.
    """

    program: Program
    values: Mapping[str, Any]
    candidate: Program | None = None
    counterparts: Mapping[str, str] = field(default_factory=dict)
    flagged: Collection[str] = ()
    covered: Set[str] = frozenset()
    """Flagged nodes that the piece of the last `hints` recomputes: its mistake explains them as well."""
    lost: str | None = None
    """That of the nodes which the mistake of the last `hints` leaves unread."""
    place: str | None = None
    """Node in which the mistake of the last `hints` was made: an unobserved one, inside of the region."""
    num_skipped: int = 0
    """Families of mistakes that the last `hints` did not try, since what one tensor may cost was spent."""
    learned: dict[str, tuple[float, Family]] = field(default_factory=dict)
    """Place in repeated layers -> the family of the catalog that explained it in one of them, with its score."""

    @torch.no_grad()
    def hints(self, node: Node, actual: torch.Tensor, valid: torch.Tensor | None) -> list[Hint]:
        """Return what explains a tensor: the kind of mistake with which the baseline's ops make it.

        Args:
            node: Of the baseline.
            actual: What the candidate made in its place.
            valid: Mask of the elements that count; None for all.
        """
        budget = Budget()
        place = _NUMBER.sub("*", self._site(node.name))
        family = self.learned.get(place)
        found = None if family is None else self._best(node, actual, valid, Budget(), family)
        if found is None or found.rank is not Rank.SETTLED:
            found = self._best(node, actual, valid, budget)
        self.num_skipped = 0 if found is not None else budget.num_skipped
        if found is None:
            return []
        if found.rank is Rank.SETTLED and found.family is not None:
            self.learned[place] = found.family
        trial, edits, lost = found.question.trial, found.hypothesis.edits, found.hypothesis.lost
        made_in = found.hypothesis.made_in
        self.place = self._place(trial, edits) if made_in is None else made_in.name
        # What is above a value that is the candidate's own is not made anew.
        is_own = found.family is None or found.family[1] is expressions
        given = [one for one, edit in edits.items() if is_own and isinstance(edit, Tensor)]
        made = walk([trial.end], lambda one: () if one in given else one.all_input_nodes)
        anew = {op.name for op in trial.ops} & {one.name for one in (trial.end, *made)}
        if lost is not None:
            self.lost = lost.name
            anew.add(lost.name)
        self.covered = {name for name in self.flagged if name in anew and name != node.name}
        return [self._of_product(node, self._in_place(node, found.hint, trial.ops))]

    def _of_product(self, node: Node, hint: Hint) -> Hint:
        """Return a hint that says of a transposed product which operands the candidate has exchanged: q and k."""
        for one in up(node, _NEAR_PRODUCT) if hint.kind == "transposed" and hint.proven else ():
            there = self.counterpart(one) if traits_of(one).multiplies else None
            if there is None:
                continue
            ours, theirs = ([part_of(source) for source in op.all_input_nodes] for op in (one, there))
            exchanged = [self.counterparts.get(source.name) for source in reversed(ours)]
            if len(ours) == 2 and ours[0] is not ours[1] and exchanged == [source.name for source in theirs]:
                first, second = (self._maker(source, self._site(node.name)) for source in ours)
                return replace(hint, kind="swapped", text=f"{first} and {second} are exchanged", change=None)
        return hint

    def _in_place(self, node: Node, hint: Hint, ops: Iterable[Node]) -> Hint:
        """Return a hint that says where the candidate does an op that is missing where the baseline has it."""
        there, change = self.counterpart(node), hint.change
        if there is None or not hint.proven:
            return hint
        node = passed_by(node, there, self.counterparts)
        name, written = called(op_name(node)), set[Any]()
        if (later := done_later(node, there, self.counterparts)) is not None:
            if change is not None and change.argument == "activation" and change.baseline != name:
                name, written = str(change.baseline), {op.target for op in ops}  # of several ops
            others = [one for one in node.all_input_nodes if self.counterparts.get(origin_of(one).name) != there.name]
            between = (origin_of(one) for one in up(later) if there in ancestors(one))
            after = next((called(op_name(one)) for one in between if one.target not in written), "other ops")
            where = f"after {after}, not before it"
        elif (
            hint.kind in _OF_MISSING
            and self.place in (None, node.name)  # else it is another op of the region that is missing
            and (earlier := done_earlier(node, there, self.counterparts)) is not None
        ):
            read = {source.name for source in earlier.all_input_nodes}
            others = [one for one in node.all_input_nodes if self.counterparts.get(one.name, one.name) in read]
            where = f"before {called(op_name(origin_of(there)))}, not after it"
        else:
            return hint
        others = [] if written or named(name).kind == "norm" else others  # the weights of a norm are its own
        what = " and ".join(self._maker(one, self._site(node.name)) for one in others)
        done = f"{name} with {what}" if what else name
        return replace(hint, text=f"{done} is done {where}", evidence="order")

    def _best(
        self, node: Node, actual: Tensor, valid: Tensor | None, budget: Budget, only: tuple[float, Family] | None = None
    ) -> MistakeExplanation | None:
        pieces = list(self._pieces(node))
        best: MistakeExplanation | None = None
        for piece in pieces:
            budget.begin(is_last=piece is pieces[-1])
            question = self.question(node, piece, actual, valid, budget)
            found = None if question is None else explanation(question, only)
            if found is not None and (best is None or found.rank > best.rank):
                best = found
                if found.rank is Rank.SETTLED:
                    break
        return best if best is None or only else self._exchanged_above(node, actual, valid, best, pieces)

    def _exchanged_above(
        self, node: Node, actual: Tensor, valid: Tensor | None, best: MistakeExplanation, pieces: Sequence[Piece]
    ) -> MistakeExplanation:
        """Return the exchange in a line that the candidate lacks, in place of another order in a line that it has."""
        if not best.hint.proven or best.hint.kind not in _OF_ORDER or not self._unlike(pieces[-1].ops):
            return best
        for piece in pieces if not self._unlike(best.hypothesis.edits) else ():
            question = self.question(node, piece, actual, valid, Budget(OF_DIFFERENCES))
            if question is not None and self._unlike(piece.ops):
                question = replace(question, is_written_alike=lambda op: not self._unlike([op]))
                found = explanation(question, (best.hint.score, exchanged))
                if found is not None and found.rank is Rank.SETTLED:
                    return found
        return best

    def _pieces(self, node: Node) -> Iterator[Piece]:
        """Yield the pieces that end in a node, from its own op on; each once."""
        asked: set[frozenset[str]] = set()
        for depth, besides in [(0, ()), *((depth, self.flagged) for depth in _DEPTHS)]:
            piece = self.piece(node, depth, besides)
            names = frozenset(op.name for op in piece.ops) if piece is not None else frozenset()
            if piece is not None and len(piece.ops) <= _MOST_OPS and names not in asked:
                asked.add(names)
                yield piece

    def _place(self, trial: Trial, edited: Collection[Node]) -> str | None:
        """Return the op that a mistake is in; None for the last of the piece, and where the candidate's are known."""
        own = [self._nodes.get(node.name, node) for node in edited]
        if len({source_line(node) or node.name for node in own}) != 1:
            return None
        *_, place = edited
        if place.op == "placeholder":
            readers = [op for op in trial.ops if place in op.all_input_nodes]
            if len(readers) != 1:
                return None
            (place,) = readers
        if place is trial.end or place.name in self._known:
            return None
        # Its other readers would be wrong as well, which is not known.
        inside, users = {op.name for op in trial.ops}, self._nodes.get(place.name, place).users
        others = (one for one in users if "_assert" not in str(one.target))
        is_read_elsewhere = any(user.name not in inside for user in others)
        return None if is_read_elsewhere else place.name

    @torch.no_grad()
    def differences(self, node: Node, actual: torch.Tensor, valid: torch.Tensor | None) -> list[Hint]:
        """Return what of the candidate's op is not the baseline's, and changes the result; arguments as for `hints`."""
        piece = self.piece(node)
        if piece is None or len(piece.ops) > _MOST_OPS:
            return []
        question = self.question(node, piece, actual, valid, Budget(OF_DIFFERENCES))
        return [] if question is None else differences(question)

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """The baseline's nodes by name."""
        return {node.name: node for node in self.program.graph.nodes}

    @cached_property
    def _candidates(self) -> dict[str, Node]:
        """The candidate's nodes by name; none where it has no program."""
        return {} if self.candidate is None else {node.name: node for node in self.candidate.graph.nodes}

    @cached_property
    def _known(self) -> dict[str, Any]:
        return {**self.program.weights(), **self.values}

    @cached_property
    def _ours(self) -> dict[str, str]:
        """Node of the candidate, or input of it, that has a value in this step -> its counterpart."""
        if self.candidate is None:
            return {}
        inputs = {port.name: port.node for port in self.program.inputs}
        found = {port.node: inputs[port.name] for port in self.candidate.inputs if port.name in inputs}
        found |= {theirs: name for name, theirs in self.counterparts.items()}
        return {theirs: name for theirs, name in found.items() if name in self.values}

    @cached_property
    def _weights_there(self) -> Mapping[str, Tensor]:
        return {} if self.candidate is None else self.candidate.weights()

    @cached_property
    def _names_there(self) -> dict[str, str]:
        """Node of the candidate that is a weight -> its name."""
        return {} if self.candidate is None else _without_wrapper(self.candidate.weight_names())

    @cached_property
    def _known_there(self) -> dict[str, Any]:
        return {**{theirs: self.values[name] for theirs, name in self._ours.items()}, **self._weights_there}

    @cached_property
    def _their_lines(self) -> dict[str, set[str]]:
        """Module of the candidate -> lines of its ops, without their places."""
        found: dict[str, set[str]] = defaultdict(set)
        for site in () if self.candidate is None else self.candidate.sites:
            found[site.name.rpartition("/")[0]].add(code_of_line(site.source))
        return dict(found)

    def _unlike(self, ops: Iterable[Node]) -> bool:
        """Whether the same module of the candidate lacks the line of one of some ops of the baseline, word for word."""
        lines = self._their_lines
        own = (self._nodes[op.name] for op in ops if op.name in self._nodes)
        codes = ((code_of_line(source_line(op)), self._site(op.name).rpartition("/")[0]) for op in own)
        return any(code and module in lines and code not in lines[module] for code, module in codes)

    def counterpart(self, node: Node) -> Node | None:
        """Return the candidate's own node for one of the baseline's."""
        return self._candidates.get(self.counterparts.get(node.name, ""))

    def inside(self, node: Node) -> Inside | None:
        """Return where the graphs inside of a branch, a loop or a recurrence part; None where they do not."""
        there = self.counterpart(node)
        if there is None:
            return None
        tensors = [value for value in self._known.values() if isinstance(value, torch.Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        known = (lambda source: self._known[source.name]), (lambda source: self._known_there[source.name])
        return inside_of(node, there, known, dtypes)

    def question(
        self, node: Node, piece: Piece, actual: torch.Tensor, valid: torch.Tensor | None, budget: Budget | None = None
    ) -> Question | None:
        """Return the question of a piece; None where it does not run on the candidate's values, or makes the same."""
        try:
            trial = Trial(piece, budget)
        except FAILS:
            return None
        if not isinstance(trial.values[trial.end], torch.Tensor):
            return None
        if actual.is_complex():
            valid = valid if valid is None or valid.shape != actual.shape else torch.stack([valid, valid], -1)
            actual = real_parts(actual)
        right, program = trial.right, self.program
        theirs, others = self._theirs(node), self._other_values(node, trial)
        read = self._weights_there.keys() & {source.name for op in theirs for source in op.all_input_nodes}
        held = {name: self._names_there.get(name, name) for name in sorted(read)}
        their_weights = {name: self._weights_there[own] for own, name in held.items()}
        own_labels = self._labels(node, (op.name for op in [*trial.inputs, *trial.ops]))
        labels = {label: name for name, label in self._labels(node, others, own_labels).items()}
        full = _without_wrapper(program.weight_names())
        found = Question(
            trial,
            actual.double() if actual.is_floating_point() else actual,
            None if valid is None or valid.shape != actual.shape else valid,
            noise_of(piece, right, actual),
            labels=own_labels,
            weights=frozenset(program.weights()),
            others={label: others[name] for label, name in labels.items()},
            theirs=theirs,
            their_values=[*constants_of(theirs), *(float(t) for t in their_weights.values() if t.dim() == 0)],
            their_weights=their_weights,
            full=full,
            model={full[name]: tensor for name, tensor in program.weights().items()},
            named=self._nodes,
            is_another=self._is_another(node),
            native=in_its_dtype(piece, actual),
            held=held,
            read=self._read(trial, theirs),
            is_still_computed=self._is_still_computed,
            maker=lambda made: self._maker(made, self._site(node.name)),
            are_exchanged=self._are_exchanged,
            kept=program.kept(),
            sources={label: self._nodes[name] for label, name in labels.items() if name in self._nodes},
            run_theirs=lambda: self._their_region(node, trial.budget),
        )
        return found if found.left(right) > 0 else None

    def piece(self, node: Node, depth: int = 0, besides: Collection[str] = ()) -> Piece | None:
        """Return what makes a node, and `depth` steps above it, of what the candidate made; None if that is unknown."""
        known = self._known
        above = {node.name, *(op.name for op in up(node, depth) if op.op == "call_function")}
        # A tensor is not made of itself.
        same = {name for name, is_same_op in self._same(node).items() if name in self.flagged and not is_same_op}
        return cut([node], known, known.keys() - above - same - set(besides))

    def _same(self, node: Node) -> dict[str, bool]:
        """Return what is paired with the same tensor of the candidate -> whether the op is the same as well."""
        there = self.counterpart(node)
        if there is None:
            return {}
        same = (name for name, theirs in self.counterparts.items() if theirs == there.name and name != node.name)
        return {name: self._nodes[name].target is there.target for name in same}

    def _theirs(self, node: Node) -> list[Node]:
        target = self.counterpart(node)
        same = {name for name, is_same_op in self._same(node).items() if is_same_op}
        if target is None or any(one.name in same for one in (up(node) if same else ())):
            return []  # in place of the op it has what this is made of
        ops = set(region_of(target, set(self.counterparts.values()))[0])
        return [op for op in self._candidates.values() if op in ops]  # in the order in which they run

    def _their_region(self, node: Node, budget: Budget) -> TheirRegion | None:
        """Return the candidate's ops that `node` is judged with, on the candidate's values."""
        target = self.counterpart(node)
        if target is None:
            return None
        labels = {name: of_weight(full) for name, full in self._names_there.items()} | {
            theirs: self._maker(self._nodes[name], self._site(node.name)) for theirs, name in self._ours.items()
        }
        try:
            piece = cut([target], self._known_there, self._known_there.keys() - {target.name})
            return None if piece is None else TheirRegion(Trial(piece, budget), labels)
        except FAILS:
            return None

    def _is_another(self, node: Node) -> bool:
        """Whether the candidate's tensor passes on what is the counterpart of another op that `node` is not made of."""
        target = self.counterpart(node)
        ours = {theirs: name for name, theirs in self.counterparts.items() if name not in self.flagged}
        for source in () if target is None else passed_on(target):
            if source.name in ours:
                is_made_of = ours[source.name] in {other.name for other in ancestors(node)}
                return not is_made_of and not self._is_read_alike(node)
        return False

    def _is_read_alike(self, node: Node) -> bool:
        """Whether an op of both sides reads the two tensors: then they belong together, whatever they are."""
        target = self.counterparts.get(node.name)
        there = [other for user in readers_of(node) if (other := self.counterpart(user)) is not None]
        return any(
            one.name == target for op in there for read in op.all_input_nodes for one in (read, *passed_on(read))
        )

    def _read(self, trial: Trial, theirs: list[Node]) -> frozenset[str]:
        """Return the inputs of which the candidate's op of the same name reads the counterpart; another op may too."""
        sources = {(op.target, source.name) for op in theirs for source in op.all_input_nodes}
        inside = [(n.name, user.target) for n in trial.inputs for user in n.users if user in trial.values]
        return frozenset(name for name, target in inside if (target, self.counterparts.get(name)) in sources)

    def _labels(self, node: Node, names: Iterable[str], known: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return what people call nodes: by what makes their values, where that is another one for each.

        `known` are labels of other nodes.
        """
        site = self._site(node.name)
        found = {name: self._maker(self._nodes[name], site) if name in self._nodes else name for name in names}
        number = Counter([*found.values(), *(label for name, label in (known or {}).items() if name not in found)])
        return {name: short(self._site(name), site) if number[label] > 1 else label for name, label in found.items()}

    def _maker(self, node: Node, site: str) -> str:
        made = origin_of(node)
        if made.name in self.program.weight_names():
            return of_weight(self._site(made.name))
        made = part_of(node)
        whole = whole_of(made)
        name = short(self._site(made.name), site)
        # A norm makes its result beside its statistics.
        if op_name(made) == "getitem" and made.args[1] == 0 and whole is None:
            name = f"{name.rpartition('/')[0]}/{called(op_name(made.all_input_nodes[0]))}".removeprefix("/")
        return name if whole is None else f"part {made.args[1]} of {self._maker(whole, site)}"

    def _are_exchanged(self, one: Node, other: Node) -> bool:
        """Whether all that reads one of two nodes reads the other one in the candidate."""
        there = [self.counterpart(node) for node in (other, one)]
        for node, theirs in zip((one, other), there, strict=True):
            read = {target for op in readers_of(node) if (target := self.counterparts.get(op.name)) is not None}
            if theirs is None or not read or not read <= {op.name for op in readers_of(theirs)}:
                return False
        return True

    def _site(self, name: str) -> str:
        names = self.program.weight_names()
        if name in names:
            return names[name].removeprefix(_USER)
        sites = self.program.sites.by_node.get(name, ())
        ops = [site.name for site in sites if site.kind == "op"]
        return ops[0] if ops else sites[0].name if sites else name

    def _is_still_computed(self, lost: Node) -> bool:
        """Whether only one op reads a node of the baseline, and the candidate reads a weight of it as often.

        The candidate's results need that weight. That it is left out explains nothing then: it is added elsewhere, or
        the two tensors do not belong together.
        """
        own = self._nodes.get(lost.name)
        # What something else reads as well (a residual) is computed for that.
        if self.candidate is None or own is None or len(own.users) != 1:
            return False
        weights = self.program.weights()
        both = (_readers(self.program), weights), (_readers(self.candidate), self._weights_there)
        for value in (weights[source.name] for source in _read_by_it_alone(own) if source.name in weights):
            # Weights of the same values (ones) are counted together: which is which is not known.
            here, there = (
                sum(number for name, number in readers.items() if name in held and _is_same(value, held[name]))
                for readers, held in both
            )
            if there >= here:
                return True
        return False

    def _other_values(self, node: Node, trial: Trial) -> dict[str, torch.Tensor]:
        """Return what else could have been read, by node: what the candidate reads, then the nearest of a shape."""
        shapes = {tuple(value.shape) for n in trial.inputs if isinstance(value := trial.values[n], torch.Tensor)}
        shapes.add(tuple(trial.right.shape))
        inside = {op.name for op in trial.ops}
        below = {one.name for one in down([one for one in self._nodes.values() if one.name in inside])}
        # What is made of the piece's own tensors has the mistake, and explains nothing.
        left_out = {*(n.name for n in trial.inputs), *inside, *below}
        read = dict(self._read_there(node))
        found = (
            (name, value.detach())
            for name, value in {**read, **dict(self._nearest(node))}.items()
            if name not in left_out and isinstance(value, torch.Tensor) and value.numel() <= _LARGEST_OTHER
            if any(value.shape == one or (name in read and broadcasts_alike(value.shape, one)) for one in shapes)
        )
        return dict(itertools.islice(found, _MOST_OTHERS))

    def _read_there(self, node: Node) -> Iterator[tuple[str, Any]]:
        """Yield the counterparts of what the candidate's ops of a region read."""
        ours = {theirs: name for name, theirs in self.counterparts.items() if name in self._known}
        for source in dict.fromkeys(source for op in self._theirs(node) for source in op.all_input_nodes):
            for one in (source, *passed_on(source)):
                if one.name in ours:
                    yield ours[one.name], self._known[ours[one.name]]

    def _nearest(self, node: Node) -> Iterator[tuple[str, Any]]:
        """Yield what was made before a node and what is given, by how far from it that is made or first read."""
        order = {name: place for place, name in enumerate(self._nodes)}
        given = [one for one in self._nodes.values() if one.op == "placeholder"]
        first = {one.name: min((order[user.name] for user in one.users), default=0) for one in given}
        places = {name: first.get(name, order.get(name, 0)) for name in self._known}
        here = order[node.name]
        for name in sorted(places, key=lambda n: abs(places[n] - here)):
            if name in first or order.get(name, here) < here:
                yield name, self._known[name]


def _read_by_it_alone(node: Node) -> Iterator[Node]:
    """Yield what a node is made of and nothing else is, a few steps up, itself included."""
    layer, known = [node], {node}
    for _ in range(_NEAR):
        yield from layer
        layer = [one for below in layer for one in below.all_input_nodes if one not in known and known >= {*one.users}]
        known.update(layer)


def _without_wrapper(names: Mapping[str, str]) -> dict[str, str]:
    return {node: name.removeprefix(_USER) for node, name in names.items()}


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    forms = [ours, ours.T] if ours.dim() == 2 and ours.shape != theirs.shape else [ours]
    return any(torch.equal(form, theirs) for form in forms)


def _readers(program: Program) -> Counter[str]:
    """Return node -> number of ops that read it and that a result needs."""
    end = program.graph.output_node()
    return Counter(source.name for node in (end, *up(end)) for source in node.all_input_nodes)
