"""`glass check-training`: train a model and its port on the same batches, and name the first step that differs."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.answers import Answers
from glassengine.cli.check import answered
from glassengine.cli.errors import terminable
from glassengine.cli.options import stages
from glassengine.cli.shared import Baseline, CandidateArgument, Checkpoint, Dtype, VerdictOptions, one_candidate
from glassengine.progress import Work


def command(
    baseline: Baseline,
    candidate_argument: CandidateArgument = None,
    candidate: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Judge this port; default: a copy, for --candidate-optimizer."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="FILE|FACTORY", help="Batches: one dict of tensors per training step.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="FILE.py:FN", help="Returns the optimizer of a module; default: AdamW.")
    ] = None,
    candidate_optimizer: Annotated[
        str | None, typer.Option(metavar="FILE.py:FN", help="Optimizer of the candidate; default: the same.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FN", help="Returns the loss from the module's result; default: its .loss."),
    ] = None,
    dtype: Dtype = "auto",
    *,
    checkpoint: Checkpoint,
    verdicts: VerdictOptions,
    answers: Answers,
) -> int:
    """Find the first training step, and in it the op, that is wrong in a port.

    Exit status: 0 ok, 1 a tensor reaches --fail-on, 4 too little was comparable.
    """
    answers.prepare()
    candidate = one_candidate(candidate, candidate_argument)
    with terminable(), stages(((Work.TRAINING, 1.0),)) as progress:
        progress(Work.TRAINING.says("training and judging every step"))
        result = glass.check_training(
            baseline,
            candidate,
            inputs=inputs,
            optimizer=optimizer,
            candidate_optimizer=candidate_optimizer,
            loss=loss,
            dtype=dtype,
            fail_on=verdicts.fail_on.value,
            min_coverage=verdicts.min_coverage,
            **vars(checkpoint),
        )
    return answered(result, answers)
