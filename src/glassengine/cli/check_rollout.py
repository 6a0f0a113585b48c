"""`glass check-rollout`: explain the gap between the log-probabilities of an engine and those of its policy."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.answers import Answers
from glassengine.cli.check import answered
from glassengine.cli.errors import terminable
from glassengine.cli.shared import Checkpoint, Dtype, FailOn


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="The policy: Hugging Face directory or id.", show_default=False),
    ],
    rollout: Annotated[
        str,
        typer.Option(metavar="FILE", help="Token ids and log-probabilities of the engine.", show_default=False),
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Another step, whose weights the engine may have had. Repeatable."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="That the trainer divides its logits by; default: what FILE states, or 1."),
    ] = None,
    engine_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="That the engine runs in, where it is known; default: any.")
    ] = None,
    dtype: Dtype = "auto",
    fail_on: Annotated[FailOn, typer.Option(help="Lowest verdict that makes the command fail.")] = FailOn.wrong,
    *,
    loading: Checkpoint,
    answers: Answers,
) -> int:
    """Explain the gap between the log-probabilities of a rollout and those of its policy.

    Exit status: 0 the gap is rounding, 1 it is a mistake, 4 undecided.
    """
    answers.prepare()
    with terminable():
        result = glass.check_rollout(
            checkpoint,
            rollout,
            weights=weights or (),
            temperature=temperature,
            engine_dtype=engine_dtype,
            dtype=dtype,
            fail_on=fail_on.value,
            **vars(loading),
        )
    return answered(result, answers)
