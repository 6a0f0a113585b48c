"""Runs a few steps of a candidate's program as a probe, and finds its tensors by their values, in any arrangement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from glassengine.blocks.arrays import Array
from glassengine.capture.observers import run_program
from glassengine.judge.cases import Case, StepInputs, by_name, empty_caches
from glassengine.judge.exclusions.perturbation import unread_nodes
from glassengine.numerics.arrangements import Arrangement, arrangements
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.mask_values import HIDDEN, is_below, sentinel
from glassengine.program.kinds.image_text import ROWS
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs

Values = list[Any]
"""What one node made in each step."""

_MOST_DIMENSIONS = 6
_ANOTHER = 0.5
"""A tensor is in a less likely arrangement where that is nearer by this factor; a wrong one is near in several."""
_MOST_LIKELY = 2
"""Arrangements in which a tensor is tried that is wrong, and so in none of them what was predicted."""
_SLACK = 1.01
"""Beyond what the distance of two tensors allows their means to differ: these are rounded, too."""
NUM_STEPS = 2
"""Two, so that tensors of one shape in one step are distinguished by the other."""
_MOST_TOKENS = 16


@dataclass(frozen=True)
class ProbeStep:
    """What a program was given (by input) and made (by node) in one step.

    `real` [B, S] marks the tokens other than padding, if there is some.
    """

    inputs: Mapping[str, Any]
    values: Mapping[str, torch.Tensor]
    real: torch.Tensor | None = None


def probe(program: Program, cases: Sequence[Case]) -> list[ProbeStep]:
    """Run two steps of the first case: of a causal LM, two rows without padding and a decode step.

    Of a plain module the two with the most elements: a batch of one has shapes in common that a larger one has not.
    With padding among its steps there is a third one that has it, the two have none: programs may count positions
    otherwise beside padding.
    """
    steps: list[ProbeStep] = []
    caches: dict[str, torch.Tensor] = {}
    inputs: Any = None
    case = _short(cases[0])
    of_module = _of_module(case) if case.input_ids is None else []
    for number in range(len(of_module) or min(NUM_STEPS, case.num_steps)):
        if case.input_ids is None:
            inputs = of_module[number]
        else:
            inputs = StepInputs.first(case) if number == 0 else inputs.following(case.input_ids[:, 0])
        named = by_name(inputs)
        if program.layout is not None and not caches:
            caches = empty_caches(program, named)
        values: dict[str, torch.Tensor] = {}

        def keep(node: Node, value: Any, values: dict[str, torch.Tensor] = values) -> None:
            if is_tensor_node(node) and isinstance(value, torch.Tensor):
                values[node.name] = value

        given = {**named, **caches}
        outputs = run_program(program, given, keep)
        steps.append(ProbeStep(given, values, _padding(inputs) if number >= NUM_STEPS else None))
        caches = {past: outputs[present] for past, present in program.caches.items()}
    return steps


def _of_module(case: Case) -> list[Mapping[str, Any]]:
    largest = sorted(case.steps, key=lambda step: sum(t.numel() for t in named_inputs(step).values()), reverse=True)
    padded = next((step for step in largest if _padding(step) is not None), None)
    if padded is None:
        return largest[:NUM_STEPS]
    without = [{**step, **_ones(step)} for step in largest]
    return [*(without * NUM_STEPS)[:NUM_STEPS], padded]


def _ones(step: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the masks of padding of a step, as if there were none."""
    return {
        name: torch.ones_like(value)
        for name, value in step.items()
        if name.endswith("attention_mask") and isinstance(value, torch.Tensor) and value.dim() == 2
    }


def _padding(step: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which tokens of a step are real, not padding; None if all are."""
    masks = [step[name].bool() for name in _ones(step)]
    return next((mask for mask in masks if not bool(mask.all())), None)


def _short(case: Case) -> Case:
    """Return a case of few tokens, whose rows differ and have no padding."""
    if case.input_ids is None:
        return case

    def two_rows(table: torch.Tensor) -> torch.Tensor:
        row = table[:1, -_MOST_TOKENS:]
        return torch.cat([row, row.flip(-1)])

    ids = two_rows(case.input_ids)
    constants = {name: two_rows(value) if name == ROWS else value for name, value in case.constants.items()}
    ones = torch.ones_like(ids)
    return replace(case, num_steps=NUM_STEPS, input_ids=ids, attention_mask=ones, tokens=None, constants=constants)


class CandidateTensor(NamedTuple):
    """A tensor of the candidate, in the arrangement of the baseline."""

    name: str
    how: Arrangement | None = None


class _Group(NamedTuple):
    """The floating tensors of one dtype and number of elements, by the size of the first step.

    Attributes:
        names: Theirs.
        sums: [names, steps, 3]: `_sums` of each, in the steps without padding.
    """

    names: Sequence[str]
    sums: Array


class CandidateTensors:
    """What a candidate's program made.

    Args:
        program: Its program.
        steps: What it was given and made.

    Attributes:
        nodes: Name -> node that makes a tensor in every step; of equal ops none that no result needs.
        order: Name -> place in the graph, of every node.
        ancestors: Name -> the node itself and what it is made of, as the bits of their places.
        all_nodes: Name -> node.
        inputs: Name of an input -> its node.
        taken: Names that already are counterparts; `alike` leaves them out.
    """

    def __init__(self, program: Program, steps: Sequence[ProbeStep]) -> None:
        self._steps = steps
        self._num_unpadded = sum(step.real is None for step in steps)
        everywhere = [node for node in program.graph.nodes if all(node.name in step.values for step in steps)]
        twins = _dead_twins(program)
        self.nodes: dict[str, Node] = {n.name: n for n in everywhere if is_tensor_node(n) and n.name not in twins}
        self.all_nodes = program.nodes
        self.inputs = {port.name: self.all_nodes[port.node] for port in program.inputs}
        self.order = {node.name: place for place, node in enumerate(program.graph.nodes)}
        self.ancestors = ancestors_of(program)
        self._shapes = {name: shapes_of(self.values(CandidateTensor(name))) for name in self.nodes}
        self._hows: dict[tuple[Any, Any], list[Arrangement | None]] = {}
        self._by_number: dict[tuple[int, ...], list[str]] = {}
        for name in self.nodes:
            self._by_number.setdefault(numbers_of(self.values(CandidateTensor(name))), []).append(name)
        self.taken: set[str] = set()
        self._groups: dict[tuple[int, ...], list[_Group]] = {}

    def values(self, seen: CandidateTensor) -> Values:
        """Return what a node made in each step, arranged."""
        made = [step.values[seen.name] for step in self._steps]
        return made if seen.how is None else [seen.how.apply(value) for value in made]

    def unit(self, name: str) -> float:
        """Return the unit roundoff of a tensor; 0 of whole numbers."""
        dtype = self.nodes[name].meta["val"].dtype
        return unit_roundoff(dtype) if dtype.is_floating_point or dtype.is_complex else 0.0

    def of_number(self, predicted: Values) -> Sequence[str]:
        """Return the tensors of as many elements."""
        return self._by_number.get(numbers_of(predicted), ())

    def alike(self, predicted: Values, most: float, besides: int) -> Iterator[CandidateTensor]:
        """Yield the floating tensors of the same shape that may be so near, but those at the places `besides`."""
        shapes = shapes_of(predicted)
        for name in self._may_be_near(predicted, lambda _: most, besides):
            if self._shapes[name] == shapes:
                yield CandidateTensor(name)

    def close(
        self, predicted: Values, allowed: Callable[[str], float], besides: int, *, beside_padding: bool = True
    ) -> Iterator[tuple[float, CandidateTensor]]:
        """Yield (distance, tensor) of the floating tensors that are near a prediction, in any arrangement.

        Args:
            predicted: In each step.
            allowed: Largest distance of a tensor; one for all of a dtype.
            besides: Places that are left out.
            beside_padding: As for `distance`.
        """
        shapes = shapes_of(predicted)
        for name in self._may_be_near(predicted, allowed, besides):
            for seen in self._arranged(name, shapes):
                distance = self.distance(seen, predicted, beside_padding=beside_padding)
                if distance <= allowed(name):
                    yield distance, seen
                    break

    def near(self, predicted: Values, most: float, known: Sequence[Arrangement]) -> list[CandidateTensor]:
        """Return the free floating tensors within `most` of a prediction, in likely arrangements, the nearest first.

        Args:
            predicted: In each step.
            most: Relative distance.
            known: As for `arranged`.
        """
        ranked: list[tuple[float, int, CandidateTensor]] = []
        for name in self._may_be_near(predicted, lambda _: most, 0):
            found = self.arranged(name, predicted, known)
            ranked += [(self.distance(s, predicted, beside_padding=False), self.order[name], s) for s in found]
        return [seen for distance, _, seen in sorted(ranked, key=lambda item: item[:2]) if distance <= most]

    def arranged(self, name: str, predicted: Values, known: Sequence[Arrangement]) -> Iterator[CandidateTensor]:
        """Yield a tensor in the arrangements that one of this shape most likely has, for any values.

        Args:
            name: Of the tensor.
            predicted: The prediction that it replaces.
            known: Arrangements of other tensors, the likely ones first.
        """
        ours, theirs = shapes_of(predicted), self._shapes[name]
        if None in ours or None in theirs:
            return
        fitting = [how for how in known if all(how.fits(a, b) for a, b in zip(theirs, ours, strict=True))]
        likely = [CandidateTensor(name, None if how.is_trivial else how) for how in fitting]
        if ours == theirs:
            likely.insert(0, CandidateTensor(name))
        yield from itertools.islice(dict.fromkeys([*likely, *self._arranged(name, ours)]), _MOST_LIKELY)

    def likeliest(self, name: str, predicted: Values, known: Sequence[Arrangement]) -> CandidateTensor | None:
        """Return a tensor in its most likely arrangement, or one that is clearly nearer; arguments as of `arranged`."""
        best: tuple[float, CandidateTensor] | None = None
        for seen in self.arranged(name, predicted, known):
            if shapes_of(self.values(seen)) == shapes_of(predicted):
                distance = self.distance(seen, predicted)
                best = (distance, seen) if best is None or distance < best[0] * _ANOTHER else best
        return None if best is None else best[1]

    def distance(self, seen: CandidateTensor, predicted: Values, *, beside_padding: bool = True) -> float:
        """Return the largest distance of any step: rms(tensor - predicted) / rms(predicted), infinite across masks.

        What stands in padding counts for nothing; without `beside_padding` steps that have some do not count at all.
        """
        each = list(zip(self.values(seen), predicted, (step.real for step in self._steps), strict=True))
        each = each if beside_padding else each[: self._num_unpadded]
        return max(_distance(*_real(theirs, ours, real)) for theirs, ours, real in each)

    def _may_be_near(self, predicted: Values, allowed: Callable[[str], float], besides: int) -> Iterator[str]:
        """Yield the free floating tensors of as many elements whose sums are as near as the tensors have to be."""
        sums = np.array([_sums(value) for value in predicted[: self._num_unpadded]])
        for group in self._groups_of(predicted):
            # The distance of two tensors bounds that of every mean.
            most = allowed(group.names[0]) * sums[:, :1] * _SLACK + 1e-30
            with np.errstate(invalid="ignore"):
                first = np.searchsorted(group.sums[:, 0, 0], sums[0, 0] - most[0, 0])
                last = np.searchsorted(group.sums[:, 0, 0], sums[0, 0] + most[0, 0], "right")
                is_near = (np.abs(group.sums[first:last] - sums) <= most).all((1, 2))
            for name in itertools.compress(group.names[first:last], is_near):
                if name not in self.taken and not besides >> self.order[name] & 1:
                    yield name

    def _groups_of(self, predicted: Values) -> list[_Group]:
        numbers = numbers_of(predicted)
        if numbers not in self._groups:
            by_dtype: dict[torch.dtype, list[str]] = {}
            for name in self.of_number(predicted):
                by_dtype.setdefault(self.nodes[name].meta["val"].dtype, []).append(name)
            self._groups[numbers] = [self._group(some) for dtype, some in by_dtype.items() if dtype.is_floating_point]
        return self._groups[numbers]

    def _group(self, names: Sequence[str]) -> _Group:
        steps = self._steps[: self._num_unpadded]
        sums = {name: [_sums(step.values[name]) for step in steps] for name in names}
        by_size = sorted(names, key=lambda name: sums[name][0][0])
        return _Group(by_size, np.array([sums[name] for name in by_size]))

    def _arranged(self, name: str, shapes: tuple[Any, ...]) -> Iterator[CandidateTensor]:
        theirs = self._shapes[name]
        if (theirs, shapes) not in self._hows:
            self._hows[theirs, shapes] = _hows(theirs, shapes)
        for how in self._hows[theirs, shapes]:
            yield CandidateTensor(name, how)


def shapes_of(values: Values) -> tuple[Any, ...]:
    """Return the shape in each step, None for a non-tensor."""
    return tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in values)


def numbers_of(values: Values) -> tuple[int, ...]:
    """Return the number of elements in each step."""
    return tuple(value.numel() if isinstance(value, torch.Tensor) else -1 for value in values)


def is_telling(values: Values, *, is_turned: bool = False) -> bool:
    """Whether tensors have two different numbers: one number is made in too many ways to say anything.

    A square one that `is_turned` needs three: a mask of what comes before is one of what comes after, transposed.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() > 1]
    # Mostly the first row tells.
    rows = [value[(0,) * (value.dim() - 1)] for value in tensors]
    return any(_has_another(value, is_turned=is_turned) for value in (*rows, *tensors))


def _has_another(value: torch.Tensor, *, is_turned: bool) -> bool:
    other = value[value != value.flatten()[0]]
    return bool(other.numel()) and (not is_turned or bool((other != other[0]).any()))


def _dead_twins(program: Program) -> set[str]:
    """Return the ops that no result needs, and that another op does once more to the same tensors for a result."""
    numbers: dict[str, int] = {}
    number: dict[Node, int] = {}
    for node in program.graph.nodes:
        read = map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        key = f"{node.target} {read}" if node.op == "call_function" else node.name
        number[node] = numbers.setdefault(key, len(numbers))
    unread = unread_nodes(program)
    live = {number[node] for node in program.graph.nodes if node.name not in unread}
    return {node.name for node in program.graph.nodes if node.name in unread and number[node] in live}


def _hows(theirs: tuple[Any, ...], shapes: tuple[Any, ...]) -> list[Arrangement | None]:
    """Return the arrangements, None for none, that make tensors of one shape such of another one."""
    found: list[Arrangement | None] = [None] if theirs == shapes else []
    if None in theirs or None in shapes or max(map(len, (theirs[0], shapes[0]))) > _MOST_DIMENSIONS:
        return found
    if len(set(map(len, theirs))) > 1 or len(set(map(len, shapes))) > 1:
        return found
    if sum(size > 1 for size in theirs[0]) < 2 and theirs == shapes:
        return found
    for how in arrangements(list(zip(*theirs, strict=True)), list(zip(*shapes, strict=True))):
        if not how.is_trivial and all(how.fits(a, b) for a, b in zip(theirs, shapes, strict=True)):
            found.append(how)
    return found


def ancestors_of(program: Program) -> dict[str, int]:
    """Return for each node itself and what it is made of, as the bits of their places in the graph."""
    made_of: dict[str, int] = {}
    for place, node in enumerate(program.graph.nodes):
        made_of[node.name] = 1 << place
        for source in node.all_input_nodes:
            made_of[node.name] |= made_of[source.name]
    return made_of


def _sums(value: torch.Tensor) -> tuple[float, float, float]:
    """Return what no arrangement changes: root mean square, mean of the absolute values, mean."""
    if not value.numel():
        return 0.0, 0.0, 0.0
    wide = value.double()
    if not is_below(wide, sentinel(wide.dtype)):
        wide = torch.where(wide.abs() < sentinel(wide.dtype), wide, 0.0)
    size, absolute = (float(torch.linalg.vector_norm(wide, order)) for order in (2, 1))
    return size / math.sqrt(wide.numel()), absolute / wide.numel(), float(wide.mean())


def _real(theirs: torch.Tensor, ours: torch.Tensor, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of one shape with zeros in padding, along every axis as long as the text."""
    if real is None or theirs.shape != ours.shape or not theirs.dim() or theirs.shape[0] != real.shape[0]:
        return theirs, ours
    for axis in range(1, theirs.dim()):
        if theirs.shape[axis] == real.shape[1]:
            kept = real.reshape(real.shape[0], *(real.shape[1] if i == axis else 1 for i in range(1, theirs.dim())))
            zero = theirs.new_zeros(()), ours.new_zeros(())
            theirs, ours = torch.where(kept, theirs, zero[0]), torch.where(kept, ours, zero[1])
    return theirs, ours


def _distance(candidate: torch.Tensor, predicted: torch.Tensor) -> float:
    """Return rms(candidate - predicted) / rms(predicted); infinite where masks or shapes differ."""
    if candidate.shape != predicted.shape:
        return float("inf")
    if not predicted.is_floating_point() or not candidate.is_floating_point():
        return 0.0 if bool((candidate == predicted).all()) else float("inf")
    theirs, ours = candidate.double(), predicted.double()
    limit = sentinel(candidate.dtype, predicted.dtype)
    if is_below(theirs, min(limit, -HIDDEN)) and is_below(ours, min(limit, -HIDDEN)):
        return _relative(theirs - ours, ours)
    masked = ~(ours.abs() < limit)
    if not torch.equal(masked, ~(theirs.abs() < limit)):
        return float("inf")
    hidden = ours <= HIDDEN
    error = theirs - ours
    # What a mask hides is larger by far than what it shows: either counts by its own size.
    parts = (masked | one for one in ((hidden, ~hidden) if hidden.any() else (hidden,)))
    return max(_relative(*(torch.where(left_out, 0.0, value) for value in (error, ours))) for left_out in parts)


def _relative(error: torch.Tensor, of: torch.Tensor) -> float:
    difference, size = (float(torch.linalg.vector_norm(value)) for value in (error, of))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))
