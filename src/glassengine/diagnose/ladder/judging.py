"""Judge the sides of a climb in one sweep over its cases, and find the ops of what an engine got wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.levels import add_op_by_op
from glassengine.diagnose.ladder.op_by_op import explain
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import Severity
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Place
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.numerics.judgement import unit_roundoff
from glassengine.progress import Progress, Work
from glassengine.results import Findings, Interrupted, Policy

OnStep = Callable[[Case, int, Mapping[str, float]], None]


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
