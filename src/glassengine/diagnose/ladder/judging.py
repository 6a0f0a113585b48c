"""Judges the sides of a climb in a sweep over its cases, also by several processes, and once more under coarser sums.

Several processes (`--jobs N`): this one judges the first case and merges the others in their order. Each worker
prepares the same check from its arguments and judges one case at a time. No case depends on another one, so the result
is that of one process.

Undeclared sums in less than float32: where every product of a side is beyond rounding, and within that of one way to
sum them (`--accum`), no op is to blame: it is how the candidate computes. Weights that are all slightly off (quantized,
of an adapter that was not merged) have errors of the same size: the errors themselves must show that it is the sums
(`product_errors`). The steps are judged again under it, so that a mistake among them still shows. The verdict is
suspicious at least, since it is not declared.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.levels import add_op_by_op
from glassengine.errors import BackendError, first_line, logger
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import Severity
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import RecordedTensors
from glassengine.judge.sides.recorded_ranks import TensorsOfRanks
from glassengine.judge.verdict.run import first_inputs, leave_out_gauges, run_cases
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import ACCUMULATIONS, FLOAT32_SUMS, Accumulation
from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program
from glassengine.progress import Progress, Work
from glassengine.results import FLAGGED, Findings, Hint, Interrupted, Policy, worst
from glassengine.workers import Died
from glassengine.workers.processes import Processes

OnStep = Callable[[Case, int, Mapping[str, float]], None]

_case: int | None = None
"""In a worker, the case that is wanted."""
_LEAST = 3
"""Fewer products are not enough to call them alike."""
_ALIKE = 0.6
"""Of the products; where few terms are summed, or results are rounded coarsely, one does not show it."""


def judge(
    climb: Climb,
    scores: Sequence[Score],
    *,
    model: ModuleSide | None = None,
    cases: Sequence[Case] | None = None,
    on_step: OnStep = lambda *_: None,
) -> None:
    """Run the cases of a climb, and judge every tensor of every step.

    Args:
        climb: With the cases.
        scores: Of the sides to judge.
        model: Chooses the tokens; None takes the model of the climb.
        cases: Some of the cases, if others are judged elsewhere; None takes all.
        on_step: Called after each step, as by `run_cases`.
    """
    run_cases(
        climb.program,
        climb.cases if cases is None else cases,
        climb.model if model is None else model,
        scores,
        coarsest=climb.coarsest,
        accumulation=replace(climb.accumulation, kernels=climb.kernels),
        arithmetic=climb.arithmetic,
        on_step=on_step,
        gauges=cases is None,
    )


def judge_sums_again(climb: Climb, tensors: RecordedTensors, progress: Progress) -> None:
    """Judge once more where parts of ranks were taken for shares of a sum that no rank ever made."""
    if not isinstance(tensors, TensorsOfRanks) or not tensors.reject_unmade():
        return
    climb.severity.clear()
    climb.scores[:] = [score.fresh() for score in climb.scores]
    judge(climb, climb.scores, on_step=severity_counter(climb, progress))


def explain_engine(climb: Climb, backend: str | None, progress: Progress) -> None:
    """Compile alone what the engine got wrong, unless every op was compiled alone already."""
    engine = next((score for score in climb.scores if score.side.place is Place.ENGINE), None)
    if engine is None or not engine.divergences:
        return
    alone = next((score for score in climb.scores if score.side.place is Place.OP_BY_OP), None)
    if alone is None:
        add_op_by_op(climb, backend, progress)
        alone = next((score for score in climb.scores if score.side.place is Place.OP_BY_OP), None)
        if alone is None:
            return
        # The tokens are those of the unchanged model again.
        model = climb.chooser()
        judge(climb, [Score(model, climb.program), alone], model=model)
    explain(engine, alone)


def explain(engine: Score, alone: Score) -> None:
    """Say of each op that the engine got wrong whether it is wrong when it is compiled alone."""
    verdicts: dict[str, str] = {}
    for pair in alone.pairs:
        verdicts[pair.site] = worst([verdicts.get(pair.site, "identical"), pair.verdict])  # type: ignore[list-item]
    for node, found in engine.divergences.items():
        verdict = verdicts.get(alone.program.sites.by_node[node][0].name)
        if verdict is None:
            continue
        op = op_name(alone.program.node(node))
        hint = Hint(
            "other", f"{op} compiled alone is right: it takes its neighbors to go wrong", 0.9, evidence="fusion"
        )
        if verdict in FLAGGED:
            hint = Hint("other", f"{op} compiled alone is {verdict} as well", 0.9, evidence="kernel")
        engine.divergences[node] = replace(found, hints=(hint, *found.hints))


def severity_counter(
    climb: Climb, progress: Progress, scores: Sequence[Score] | None = None, chooser: ModuleSide | None = None
) -> OnStep:
    """Compare the last logits of each side with those of the level before it, and say how many steps are judged.

    Args:
        climb: With the cases.
        progress: Called with an event when a stage begins.
        scores: Of the sides; None for all of the climb.
        chooser: Runs beside them; None for the model of the climb.
    """
    model_side = climb.model if chooser is None else chooser
    judged, total = 0, sum(case.num_steps for case in climb.cases)

    def count(case: Case, step: int, floors: Mapping[str, float]) -> None:
        nonlocal judged
        judged += 1
        progress(Work.JUDGING.says(f"judging: {judged} of {total} steps", judged, total))
        if not climb.program.generates:
            return
        assert model_side.logits is not None
        node = climb.program.output_nodes["logits"]
        model = model_side.logits[:, -1]
        following = model.argmax(-1) if case.tokens is None or step >= case.tokens.shape[1] else case.tokens[:, step]
        climb.chosen.setdefault(case.name, []).append(int(following[0]))
        size = model.double()
        noise = max(
            floors.get(node, 0.0) * float(size.square().mean().sqrt()),
            unit_roundoff(model.dtype) * float(size.abs().max()),
        )
        before = model
        for score in climb.scores[1:] if scores is None else scores:
            found = score.side.observed(node)
            if not found:
                continue
            logits = found[-1].tensor[:, -1]
            against = before if score.side.place is Place.RELEASE else model
            climb.severity.setdefault(score.side.level, Severity()).add(
                against, logits, noise, f"{case.name}, step {step}"
            )
            before = logits

    return count


@contextlib.contextmanager
def kept(collected: Callable[[], Findings], policy: Policy) -> Iterator[None]:
    """Raise `Interrupted`, with what was found, where the block is interrupted and anything was found.

    Args:
        collected: Returns what was found until it is called.
        policy: Concludes it.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        found = None
        with contextlib.suppress(Exception):  # nothing to compare yet, or a tensor was half judged
            partial = collected()
            partial.interrupt()
            found = partial
        if found is None:
            raise
        raise Interrupted(found.conclude(policy)) from error


class _Judged(BaseException):
    """Ends the check of a worker; its argument is what was found of the case: scores, severity, tokens."""


def judge_cases(climb: Climb, request: bytes | None, jobs: int, progress: Progress) -> None:
    """Judge all cases of a climb; what other processes find is merged into its scores.

    Args:
        climb: With its sides.
        request: As `CheckRequest.for_workers` returns it.
        jobs: Number of processes, this one among them.
        progress: Called with an event after each step of this process, and after each case of another one.

    Raises:
        BackendError: A worker ended, or failed.
    """
    count, cases = severity_counter(climb, progress), climb.cases
    if _case is not None:
        judge(climb, climb.scores, cases=[cases[_case]], on_step=count)
        raise _Judged([score.found_parts() for score in climb.scores], climb.severity, climb.chosen)
    if request is None or len(cases) < 2:
        if request is not None:
            logger.warning("one process judges the check: it has one case")
        judge(climb, climb.scores, on_step=count)
        return
    num_workers = min(jobs, len(cases)) - 1
    with ThreadPoolExecutor(num_workers) as threads, closing(Processes(answer, num_workers)) as workers:

        def asked(number: int) -> bytes | Died:
            result: bytes | Died = next(
                workers.run([pickle.dumps((number, torch.get_num_threads(), request))], attempts=1)
            )
            return result

        waiting = deque(threads.submit(asked, number) for number in range(1, len(cases)))
        try:
            judge(climb, climb.scores, cases=cases[:1], on_step=count)
            while waiting:
                waiting[0].result()  # an interrupt that comes here leaves it waiting
                _merge(climb, waiting.popleft())
                done = len(cases) - len(waiting)
                progress(Work.JUDGING.says(f"judging: {done} of {len(cases)} cases", done, len(cases)))
        except KeyboardInterrupt:
            for future in waiting:
                if future.done():
                    _merge(climb, future)
            raise
    leave_out_gauges(climb.scores, first_inputs(climb.program, cases[0]))


def answer(request: bytes) -> bytes:
    """Judge one case of a check in a worker, and return what was found, or the first line of an error."""
    global _case
    _case, num_threads, asked = pickle.loads(request)  # noqa: S301 (sent by the process that started this one)
    torch.set_num_threads(num_threads)
    try:
        wanted = pickle.loads(asked)  # noqa: S301
        wanted.route(wanted)
    except _Judged as judged:
        return pickle.dumps(judged.args)
    except Exception as error:
        return pickle.dumps(first_line(error) or type(error).__name__)
    return pickle.dumps("the check ended without judging a case")


def _merge(climb: Climb, future: Future[bytes | Died]) -> None:
    """Add what was found of a case."""
    result = future.result()
    found = result.reason if isinstance(result, Died) else pickle.loads(result)  # noqa: S301 (of a process of ours)
    if isinstance(found, str):
        raise BackendError(
            "a process that judged a case has failed", got=found, hint="--jobs with fewer processes, or more memory"
        )
    scores, severity, chosen = found
    for score, later in zip(climb.scores, scores, strict=True):
        score.merge(later)
    for level, later in severity.items():
        climb.severity.setdefault(level, Severity()).merge(later)
    climb.chosen |= chosen


@dataclass(frozen=True)
class _Products:
    """The products of one side: how many were judged, which are origins of an error, and what these errors show."""

    score: Score
    num_judged: int
    flagged: frozenset[str]

    @property
    def are_alike(self) -> bool:
        shown = [self.score.sums.get(name) for name in self.flagged]
        if False in shown or shown.count(True) < _LEAST:
            return False
        return len(self.flagged) >= max(_LEAST, _ALIKE * self.num_judged)


def judge_alike(climb: Climb, progress: Progress) -> str | None:
    """Judge again where all products of a side are alike; return the note about them, or None.

    Args:
        climb: With scores of all sides; they are replaced.
        progress: Called with it.
    """
    suspects = [products for score in climb.scores[1:] if (products := _products(climb.program, score)).are_alike]
    if climb.accumulation != FLOAT32_SUMS or not suspects:
        return None
    first = climb.scores
    own = str(climb.program.metadata.get("dtype"))
    # Coarser than float32, what explains least first.
    for name in [own] if own in ("bfloat16", "float16") else ["tf32", "float16", "bfloat16"]:
        progress(Work.JUDGING.says(f"judging again, as if products were summed in {name}"))
        climb.accumulation = ACCUMULATIONS[name]
        _sum_by(first, climb.accumulation)
        climb.scores = [score.fresh() for score in first]
        judge(climb, climb.scores)
        left = {score.side.level: _products(climb.program, score) for score in climb.scores}
        if not any(left[one.score.side.level].flagged & one.flagged for one in suspects):
            worst = max(suspects, key=lambda one: len(one.flagged))
            number = f"{len(worst.flagged)} of {worst.num_judged}"
            return (
                f"products are summed in {name}, undeclared: {number} show it, and the rest is judged "
                f"under it (--accum {name} if that is meant)"
            )
    climb.accumulation, climb.scores = FLOAT32_SUMS, first
    _sum_by(first, FLOAT32_SUMS)
    return None


def _products(program: Program, score: Score) -> _Products:
    names = {node.name for node in program.graph.nodes if traits_of(node).reads_memory}
    return _Products(score, len(names & score.judged_nodes), frozenset(names & score.divergences.keys()))


def _sum_by(scores: Sequence[Score], accumulation: Accumulation) -> None:
    for score in scores:
        if score.side.replay is not None:
            score.side.replay.accumulate(accumulation)
