"""The corpus of the verdict: plant mistakes, run them and legitimate variants, and hold the verdict against the truth.

One `Bench` is one program (family, dtype) with its inputs. All mutants of a bench run in lockstep against one
reference, through the same `run_cases`, `Score` and `findings_of` that `glass check` uses; nothing here decides a
verdict.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import GlassError
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Arranged, Place, Side
from glassengine.judge.site_pairs import difference
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.numerics.judgement import SUSPICIOUS
from glassengine.program import LoadedModel, Program
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import is_view
from glassengine.results import FLAGGED, Comparison, Policy
from tests.corpus.edits import DoesNotApply, Mistake, Mutant, plant
from tests.corpus.right.variations import Variation, VariedSide
from tests.corpus.truth import Guilt, find_guilt, is_equivalent


@dataclass
class Bench:
    """One program with the steps that everything runs.

    Attributes:
        name: "family/dtype".
        model: The untouched baseline.
        program: Its export.
        case: One left-padded batch of two, prefill and two decode steps; or the steps of a plain module.
        inputs: Of each step, with the tokens that the baseline picks.
    """

    name: str
    model: LoadedModel
    program: Program
    case: Case
    inputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.case.input_ids is None:
            self.inputs = list(self.case.steps)
            return
        side = ModuleSide(self.model.module, self.program)
        side.begin(self.case)
        step = StepInputs.first(self.case)
        for number in range(self.case.num_steps):
            if number:
                assert side.logits is not None
                step = step.following(side.logits[:, -1].argmax(-1))
            self.inputs.append(step)
            side.step(step)


def padded_case(vocabulary: int, *, size: int = 12, steps: int = 2, batch: int = 2, seed: int = 0) -> Case:
    """Return one batch of random prompts; in a batch of several the first is left-padded by four."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (batch, size), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, :4], mask[0, :4] = 0, 0
    return Case(f"seed {seed}", steps + 1, input_ids=ids, attention_mask=mask)


@dataclass
class Row:
    """One run and what the verdict said of it.

    Attributes:
        bench: "family/dtype".
        execution: "interpreted", or the name of a variation or back-end.
        kind: Mistake, or "" for a legitimate run.
        group: Of the mistake, or "legitimate".
        verdict: The worst of all tensors.
        is_found: A tensor is suspicious or wrong.
        is_exact: The first divergence is at the guilty op, or as near to it as the two programs have ops in common.
        named: The node that was named first.
        guilty: The node that is guilty first.
        num_extra: Origins that are not guilty.
        is_listed: No tensor is flagged, but `check` lists the guilty op among those that are written differently.
        is_beneath: No value can show the mistake: it is in a float32 island and too small for the program's dtype
            (`Guilt.is_below_dtype`), or no error at a guilty op is larger than rounding may make there (`effect` <= 1).
        effect: Largest bound ratio (error over rounding bound) at the guilty ops; infinite where size does not matter.
        ulp: Largest error at the guilty ops in units in the last place (`Guilt.ulp`).
        largest: Largest min(noise ratio / 2, bound ratio) of a tensor judged by replay (noise ratio / 2 where it has no
            bound), and where.
        accumulated: Largest noise ratio / 4 of a tensor judged by the noise floor alone.
        note: Why a mistake does not count: "no effect", "equivalent", "below precision", "does not apply", or an error.
    """

    bench: str
    execution: str
    kind: str
    group: str
    verdict: str = ""
    is_found: bool = False
    is_exact: bool = False
    named: str | None = None
    guilty: str | None = None
    num_extra: int = 0
    is_listed: bool = False
    is_beneath: bool = False
    effect: float = 0.0
    ulp: float = 0.0
    largest: float = 0.0
    largest_at: str = ""
    accumulated: float = 0.0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def interpreted(bench: Bench, program: Program) -> ProgramSide:
    """Return the side of a candidate program, paired and replayed as `check` does."""
    pairs = pair_programs(bench.program, program, [bench.case])
    is_whole = all(site.node in pairs for site in bench.program.sites if site.kind == "op")
    replay = Replay(bench.program, cut=Cut.OP if is_whole else Cut.REGION, worth_a_bound=0.0)
    return ProgramSide(program, pairs, place=Place.CANDIDATE, replay=replay, arranged=Arranged(bench.program, pairs))


def varied(bench: Bench, program: Program, variation: Variation, *, worth_a_bound: float = 0.0) -> VariedSide:
    """Return the side of an engine with kernels of its own: sites pair by name, as those of engines do."""
    nodes = {}
    for site in program.sites:
        ours = bench.program.sites.get(site.name)
        if ours is not None and site.kind == "op":
            nodes[ours.node] = site.node
    known = {node.name for node in bench.program.graph.nodes}
    inserted = {node.name for node in program.graph.nodes} - known
    dtype = getattr(torch, bench.model.dtype)
    replay = Replay(bench.program, compiled=True, dtype=dtype, worth_a_bound=worth_a_bound)
    return VariedSide(program, nodes, variation, replay, plain=inserted)


@dataclass
class Planted:
    """A mutant with its truth."""

    mutant: Mutant
    guilt: Guilt


Planter = Callable[[Bench, Mistake, str], Mutant]


def plant_all(
    bench: Bench,
    mistakes: Iterable[Mistake],
    seed: int = 0,
    planter: Planter = lambda bench, mistake, seed: plant(bench.program, mistake, seed),
) -> tuple[list[Planted], list[Row]]:
    """Plant every mistake; return those that have an effect, and a row for each that does not count."""
    planted: list[Planted] = []
    left_out: list[Row] = []
    for mistake in mistakes:
        row = Row(bench.name, "", mistake.name, mistake.group)
        # Where one place shows nothing (padding that nobody sees, a view that does not fit), another may.
        for attempt in range(1 if mistake.group == "source" else _NUM_PLACES):
            found = _try(bench, mistake, f"{bench.name}/{seed}/{attempt}", row, planter)
            if not row.note:
                planted.append(found)  # type: ignore[arg-type]
            if not row.note or row.note == "does not apply":
                break
        if row.note:
            left_out.append(row)
    return planted, left_out


_NUM_PLACES = 4


def _try(bench: Bench, mistake: Mistake, seed: str, row: Row, planter: Planter) -> Planted | None:
    """Plant a mistake in one place; where it does not count, `row.note` says why."""
    try:
        mutant = planter(bench, mistake, seed)
        guilt = find_guilt(bench.program, mutant, bench.inputs)
        row.guilty = next(iter(guilt.nodes), None)
        row.note = "no effect" if not guilt.nodes else "below precision" if guilt.is_below_precision else ""
        if not row.note and is_equivalent(bench.program, mutant, bench.inputs):
            row.note = "equivalent"
    except DoesNotApply:
        row.note = "does not apply"
        return None
    except (GlassError, RuntimeError, IndexError, ValueError, TypeError) as error:
        row.note = f"invalid: {_short(error)}"
        return None
    return Planted(mutant, guilt)


def judge(bench: Bench, sides: Sequence[Any], case: Case | None = None) -> list[Comparison]:
    """Run all sides against one reference; return what `check` would conclude: of the untouched model, then of each.

    Args:
        bench: The program.
        sides: What is judged.
        case: Another one than the bench's own.
    """
    model = ModuleSide(bench.model.module, bench.program)
    return [_concluded(bench, [score]) for score in run(bench, [model, *sides], case, model)]


def run(bench: Bench, sides: Sequence[Any], case: Case | None = None, model: ModuleSide | None = None) -> list[Score]:
    """Run sides against one reference; `model`, one of them, chooses the tokens (needed from the second step on)."""
    scores = [Score(side, bench.program) for side in sides]
    chooser = model or ModuleSide(bench.model.module, bench.program)
    run_cases(bench.program, [case or bench.case], chooser, scores, coarsest=None, on_step=lambda *_: None)
    return scores


def _concluded(bench: Bench, scores: Sequence[Score]) -> Comparison:
    told: dict[str, Any] = {"baseline": "", "candidate": "", "environment": {}}
    found = findings_of(bench.program, scores, [], {}, min_coverage=0.0, **told)
    return found.conclude(Policy("suspicious", min_coverage=0.0))


def rows_of_mistakes(bench: Bench, planted: Sequence[Planted], execution: str, sides: Sequence[Any]) -> list[Row]:
    """Judge one side for each mutant and hold it against the truth."""
    rows = []
    for item, side, result in zip(planted, sides, judge(bench, sides)[1:], strict=True):
        row = Row(bench.name, execution, item.mutant.mistake.name, item.mutant.mistake.group)
        row.guilty = next(iter(item.guilt.nodes))
        row.ulp = item.guilt.ulp
        row.effect = _effect(bench.program, item.guilt, result)
        row.is_beneath = item.guilt.is_below_dtype or row.effect <= 1.0
        _fill(row, result)
        known = own_nodes(side)
        row.is_exact = row.named is not None and is_near(bench.program, item, row.named, known)
        row.num_extra = sum(not is_near(bench.program, item, origin.node or "", known) for origin in result.origins)
        row.is_listed = not row.is_found and _is_listed(bench.program, item, known)
        rows.append(row)
    return rows


def _is_listed(program: Program, item: Planted, known: Mapping[str, str]) -> bool:
    """Whether a guilty op differs in the programs, which `check` has of both sides: an engine keeps its own."""
    theirs = {node.name: node for node in item.mutant.program.graph.nodes}
    pairs = [(node, theirs.get(known.get(node.name, ""))) for node in program.graph.nodes]
    listed = [ours.name for ours, other in pairs if other is not None and difference(ours, other) is not None]
    return any(is_near(program, item, name, known) for name in listed)


def own_nodes(side: Side) -> dict[str, str]:
    """Return which node of its own program a side, which has run, observes for each node of the baseline."""
    return {node: own for node, own in side.counterparts.items() if side.observed(node)}


def rows_of_legitimate(
    bench: Bench, executions: Sequence[str], sides: Sequence[Any], case: Case | None = None
) -> list[Row]:
    """Judge sides that are right; the first row is that of the untouched model."""
    names = ["untouched model", *executions]
    rows = []
    for name, result in zip(names, judge(bench, sides, case), strict=True):
        row = Row(bench.name, name, "", "legitimate")
        _fill(row, result)
        rows.append(row)
    return rows


def _fill(row: Row, result: Comparison) -> None:
    row.verdict = result.verdict
    row.is_found = any(pair.verdict in FLAGGED for pair in result.pairs)
    row.named = result.first_divergence.node if result.first_divergence else None
    row.num_extra = len(result.origins)
    for pair in result.pairs:
        if pair.noise_ratio is None:
            continue
        if pair.judged_by == "noise floor":
            row.accumulated = max(row.accumulated, pair.noise_ratio / SUSPICIOUS)
            continue
        figure = pair.noise_ratio / 2 if pair.bound_ratio is None else min(pair.noise_ratio / 2, pair.bound_ratio)
        if figure > row.largest:
            row.largest, row.largest_at = figure, f"step {pair.step} {pair.site}"


def _effect(program: Program, guilt: Guilt, result: Comparison) -> float:
    """Largest bound ratio at the guilty ops; infinite where one was not observed or its values differ in kind."""
    found: dict[str, float] = {}
    for pair in result.pairs:
        site = program.sites.get(pair.site)
        if site is not None and site.node in guilt.nodes:
            bound_ratio = (
                0.0 if pair.verdict == "identical" else math.inf if pair.bound_ratio is None else pair.bound_ratio
            )
            found[site.node] = max(found.get(site.node, 0.0), bound_ratio)
    return max((found.get(node, math.inf) for node in guilt.nodes), default=0.0)


def is_near(program: Program, item: Planted, named: str, known: Mapping[str, str]) -> bool:
    """Whether `named` is guilty, a view of or into a guilty op, or the first op below one that was not observed."""
    nodes = {node.name: node for node in program.graph.nodes}
    for guilty in item.guilt.nodes:
        node = nodes[guilty]
        if named == guilty or named in _views(node) or named in _viewed(node):
            return True
        is_observed = known.get(guilty, "") == item.mutant.moved.get(guilty)
        if not is_observed and named in _consumers(node, known):
            return True
    return False


def _views(node: Node) -> set[str]:
    found: set[str] = set()
    for user in node.users:
        if is_view(user) or op_name(user) in ("clone", "_unsafe_view", "getitem", "_to_copy"):
            found |= {user.name} | _views(user)
    return found


def _viewed(node: Node) -> set[str]:
    found: set[str] = set()
    while is_view(node) or op_name(node) in ("clone", "_unsafe_view", "getitem", "_to_copy"):
        node = node.args[0]  # type: ignore[assignment]
        found.add(node.name)
    return found


def _consumers(node: Node, observed: Mapping[str, str]) -> set[str]:
    """The nearest ops below `node`, through what was not observed and through views."""
    found: set[str] = set()
    for user in node.users:
        found.add(user.name)
        if user.name not in observed or is_view(user):
            found |= _consumers(user, observed)
    return found


def _short(error: BaseException) -> str:
    got = getattr(error, "got", None)
    text = str(got or error) or "".join(traceback.format_exception_only(error))
    return text.splitlines()[0][:120] if text else type(error).__name__
