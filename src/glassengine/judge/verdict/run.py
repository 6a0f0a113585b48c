"""Runs all sides of a check in lockstep with the reference and keeps the score of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.cases import Case, StepInputs, by_name, empty_caches
from glassengine.judge.end_to_end import results_of, with_model
from glassengine.judge.exclusions.masked import valid_in_step
from glassengine.judge.pairing.gauge import TAKEN_BACK, taken_back
from glassengine.judge.replay.reference import PLAIN, CoarseArithmetic, ReferenceRun
from glassengine.judge.sides.protocol import Place, Side
from glassengine.judge.site_pairs import place_of
from glassengine.judge.verdict.same_bits import Natives, equal_bits_suffice, references, same_bits
from glassengine.judge.verdict.score import Score
from glassengine.numerics.exemptions import GAUGE
from glassengine.numerics.float64 import FLOAT32_SUMS, Accumulation
from glassengine.numerics.verdict import Reference, SameBits
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs
from glassengine.results import FLAGGED, Divergence, Pair

Made = Mapping[str, torch.Tensor]
"""Results of the unchanged model in a step, by name."""


def run_cases(
    program: Program,
    cases: Sequence[Case],
    model: Side | None,
    scores: Sequence[Score],
    *,
    coarsest: torch.dtype | None,
    accumulation: Accumulation = FLOAT32_SUMS,
    arithmetic: CoarseArithmetic = PLAIN,
    on_step: Callable[[Case, int, Mapping[str, float]], None],
    gauges: bool = True,
) -> None:
    """Run every case on the reference and on all sides, and judge every tensor of every step.

    Args:
        program: The baseline program.
        cases: What to run.
        model: The unchanged baseline; its greedy choice is the next token of everybody. None where there are none.
        scores: One per side, `model`'s among them.
        coarsest: Dtype of the coarsest side.
        accumulation: How the sides' products are summed.
        arithmetic: What the sides compute more coarsely, op by op.
        on_step: Called after each step with the relative noise floor of each node in the case so far.
        gauges: Whether these are all cases: what is written in another gauge is left out at their end.
    """
    results: dict[str, list[str]] = {}
    for name in results_of(program):
        results.setdefault(program.output_nodes[name], []).append(name)
    suffices = equal_bits_suffice(program, scores)
    for case in cases:
        reference = ReferenceRun(program, coarsest=coarsest, accumulation=accumulation, arithmetic=arithmetic)
        steps, is_same = _steps(program, case, model, scores), False
        if suffices and (case.num_steps == 1 or not program.caches):
            steps, is_same = _steps_compared_ahead(program, case, model, scores)
        for given in steps:
            step, inputs = given.number, given.inputs
            made = scores[0].side.results() if scores[0].side is model else {}

            def observe(node: Node, value: Reference, step: int = step, case: Case = case, made: Made = made) -> None:
                tied = False
                for score in scores:
                    tied |= score.visit(node, value, case, step, tied=tied)
                if node.name in results:
                    own = next((made[name] for name in results[node.name] if name in made), None)
                    _compare_results(scores, node.name, (value, with_model(value, own)), made, (case.name, step))

            valid = partial(valid_in_step, program, inputs)
            natives = given.natives(program, scores) if is_same else None
            with torch.no_grad():
                if natives is None:
                    reference.step(given.named, observe, valid)
                else:
                    for node, same in references(program, natives, valid):
                        observe(node, same)
            before = {} if isinstance(inputs, StepInputs) else named_inputs(inputs)
            for score in scores:
                score.results.end_step(score.side.results(), made, (case.name, step))
                if model is not None and model.written is not None and score.side.written is not None:
                    score.results.compare_inputs(before, score.side.written, model.written, (case.name, step))
                    score.results.compare_plain(score.side.plain, model.plain, (case.name, step))
                score.end_step(given.named)
                judge_collectives(score, case, step)
            on_step(case, step, reference.relative_floors)
        for score in scores:
            score.end_case()
    if gauges:
        leave_out_gauges(scores, first_inputs(program, cases[0]))


@dataclass
class _Step:
    """A step that all sides have run.

    Attributes:
        number: Of the case.
        inputs: As sides take them.
        named: By name, with empty caches in the first step.
        num_seen: Slots of the cache in use.
    """

    number: int
    inputs: Any
    named: dict[str, Tensor]
    num_seen: int
    _natives: Natives | None = None

    def natives(self, program: Program, scores: Sequence[Score]) -> Natives | None:
        """Return what the program makes, where that is what all sides made."""
        if self._natives is None:
            self._natives = same_bits(program, scores, self.named, self.num_seen)
        return self._natives


def _steps(program: Program, case: Case, model: Side | None, scores: Sequence[Score]) -> Iterator[_Step]:
    """Run all sides through a case, step by step."""
    for score in scores:
        score.begin(case)
    inputs: Any = None
    for number in range(case.num_steps):
        inputs = inputs_of(case, number, inputs, model)
        num_seen = int(inputs.cache_position[-1]) + 1 if isinstance(inputs, StepInputs) else 0
        for score in scores:
            score.begin_step(num_seen)
            score.side.step(inputs)
        named = by_name(inputs)
        if number == 0:
            named |= empty_caches(program, named)
        yield _Step(number, inputs, named, num_seen)


def _steps_compared_ahead(
    program: Program, case: Case, model: Side | None, scores: Sequence[Score]
) -> tuple[Iterator[_Step], bool]:
    """Return the steps of a case, and whether every side has the bits of the program in all of them.

    Floors count from the first step on: where one step differs, the reference runs all. No step depends on another.
    """
    steps = _steps(program, case, model, scores)
    first = next(steps)
    is_same = first.natives(program, scores) is not None
    if case.num_steps == 1 or not is_same:
        return chain([first], steps), is_same
    is_same = all(one.natives(program, scores) is not None for one in steps)
    return _steps(program, case, model, scores), is_same


def first_inputs(program: Program, case: Case) -> dict[str, torch.Tensor]:
    """Return the inputs of the first step of a case by name, with empty caches."""
    named = by_name(inputs_of(case, 0, None, None))
    return named | empty_caches(program, named)


def _compare_results(
    scores: Sequence[Score], node: str, references: tuple[Reference, Reference], made: Made, where: tuple[str, int]
) -> None:
    """Compare the results of all sides; the unchanged model, the first of them, is no part of its own floor."""
    for score in scores:
        known = references[score is not scores[0]]
        theirs = score.side.results()
        score.results.compare(node, known, theirs, made, where=where, may_tie=score.may_tie)
    if not isinstance(references[0], SameBits):
        compare_export(scores, node, references[0], where)


def compare_export(scores: Sequence[Score], node: str, reference: Reference, where: tuple[str, int]) -> None:
    """Note where a candidate's export returns something else than the candidate.

    Exports have a cache of fixed size. Code that decides by the length of a cache computes something else there.
    """
    export = next((score for score in scores if score.side.has_fixed_cache), None)
    runs = next((score.side for score in scores if score.side.place is Place.UNTOUCHED), None)
    if export is None or runs is None or export.unlike is not None:
        return
    ours, theirs = export.side.results(), runs.results()
    for name in ours.keys() & theirs.keys():
        if export.program.output_nodes.get(name) != node or not ours[name].is_floating_point():
            continue
        one, other = ours[name].double(), theirs[name]
        is_alike = one.shape == other.shape == reference.exact.shape
        # The floor is that of the baseline: a difference of two runs of the candidate has the same size. NaN is alike.
        if is_alike:
            apart = (one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0)
            is_alike = reference.judge(reference.exact + apart).verdict != "wrong"
        if not is_alike:
            export.unlike = f"{name} in {where[0]}, step {where[1]}"


def inputs_of(case: Case, step: int, before: Any, model: Side | None) -> Any:
    """Return the inputs of a step.

    Args:
        case: What runs.
        step: Of it.
        before: Inputs of the step before it; of the first step they are not read.
        model: Has run the step before, and chooses the next token where the case does not prescribe it.
    """
    if case.input_ids is None:
        return case.steps[step]
    if step == 0:
        return StepInputs.first(case)
    if before.to_come is not None and before.to_come.shape[1]:
        return before.following(before.to_come[:, 0])
    assert model is not None and model.logits is not None
    return before.following(model.logits[:, -1].argmax(-1))


def judge_collectives(score: Score, case: Case, step: int) -> None:
    """Add a pair for each collective of a step, and a divergence for the first of a node that is beyond its bound."""
    for one in score.side.collectives():
        ratios = one.bound_ratios()
        worst, site = max(ratios), score.program.sites.by_node[one.node][0]
        shared: dict[str, Any] = {
            "level": score.side.level,
            "step": step,
            "site": f"{site.name}:all_reduce",
            "candidate_site": one.name,
            "verdict": "identical" if worst == 0 else "rounding" if worst <= 1 else "wrong",
            "bound_ratio": worst,
        }
        score.pairs.append(
            Pair(
                **shared,
                method="name",
                confidence=1.0,
                judged_by="bound of a sum",
                case=case.name,
                dtype=str(one.terms[0].dtype).removeprefix("torch."),
                shape=tuple(one.terms[0].shape),
            )
        )
        if worst > 1:
            wrong = [rank for rank, ratio in enumerate(ratios, one.first_rank) if ratio > 1]
            found = Divergence(
                **shared,
                node=one.node,
                source=site.source,
                rank=wrong[0] if len(wrong) == 1 and len(ratios) > 1 else None,
            )
            score.divergences.setdefault(found.site, found)


def leave_out_gauges(scores: Sequence[Score], inputs: Mapping[str, Tensor]) -> None:
    """Call rounding what the candidate's next ops take back, in its program and in its unchanged module.

    Args:
        scores: Of all sides.
        inputs: Of one step, by name, caches among them.
    """
    own = [score for score in scores if score.side.place in (Place.CANDIDATE, Place.UNTOUCHED)]
    every = (item for score in own for item in score.divergences.items())
    origins = {node: place_of(one.site, one.source) for node, one in every}
    for score in own if origins else ():
        if score.side.program is not None:
            wrong = {pair.site for pair in score.pairs if pair.verdict == "wrong"}
            sites = score.program.sites.by_node
            results = [
                node
                for node in score.program.output_nodes.values()
                if any(site.name in wrong for site in sites.get(node, ()))
            ]
            found = taken_back(score.program, score.side.program, score.side.pairs, inputs, origins, results)
            score.judged_nodes |= found  # what its readers contradict was dropped
            for other in own:
                _leave_out(other, found)


def _leave_out(score: Score, nodes: set[str]) -> None:
    sites = {site.name for node in nodes for site in score.program.sites.by_node.get(node, ())}
    for at, pair in enumerate(score.pairs):
        if pair.site in sites and pair.verdict in FLAGGED:
            score.pairs[at] = dataclasses.replace(
                pair, verdict="rounding", noise_ratio=None, bound_ratio=None, reason=TAKEN_BACK
            )
            score.ledger.leave_out(GAUGE, pair.site, math.prod(pair.shape or ()))
    for node in nodes:
        score.divergences.pop(node, None)
