"""`glass check`: climb the ladder, or judge another implementation, and name the first guilty op."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.options import TrustEngine, decibels, out, stages, write_json
from glassengine.errors import UsageError
from glassengine.progress import Work
from glassengine.results import Comparison

_SHARES = (
    (Work.LOADING, 1.0),
    (Work.DEQUANTIZING, 1.0),
    (Work.EXPORTING, 5.0),
    (Work.EXPORTING_CANDIDATE, 5.0),
    (Work.BUILDING_OBSERVABLE, 7.0),
    (Work.BUILDING_RELEASE, 6.0),
    (Work.JUDGING, 8.0),
)


class FailOn(StrEnum):
    """Lowest verdict that makes the command fail."""

    suspicious = "suspicious"
    wrong = "wrong"


def command(
    baseline: Annotated[
        str,
        typer.Argument(
            help="Reference: Hugging Face directory or id, file.py:factory, package.module:factory.",
            show_default=False,
        ),
    ],
    candidate: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET|ENGINE|RECORD",
            help="Judge this model, port, engine or dump; default: engines built from the baseline.",
        ),
    ] = None,
    map: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file that maps tensor names of a record to sites.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Back-end of the built engines.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FACTORY", help="Prompts (.txt, one per line) or tensors (.pt .safetensors .npz .json)."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Number of decode steps after the prefill.")] = 3,
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="FILE.PY:FN", help="Graph pass to apply and judge. Repeatable."),
    ] = None,
    all_rungs: Annotated[
        bool, typer.Option("--all-rungs", help="Compile every op alone, not only the wrong ones.")
    ] = False,
    bisect_outputs: Annotated[
        bool,
        typer.Option("--bisect-outputs", help="Observe only results; if they are wrong, add a few outputs per build."),
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Judge training steps instead, one per dict of --inputs.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="FILE.PY:FN", help="With --training: returns the optimizer of a module; default: AdamW."),
    ] = None,
    candidate_optimizer: Annotated[
        str | None, typer.Option(metavar="FILE.PY:FN", help="Optimizer of the candidate; default: the same.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="FILE.PY:FN", help="Returns the loss from the module's result; default: its .loss."),
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="Lowest verdict that makes the command fail.")] = FailOn.wrong,
    min_coverage: Annotated[
        float,
        typer.Option(min=0, max=1, help="Minimum share of the baseline's float-valued sites that must be judged."),
    ] = 0.9,
    drift: Annotated[
        bool,
        typer.Option("--drift", help="Show the signal loss per module; default for a less precise candidate."),
    ] = False,
    min_snr: Annotated[
        str | None, typer.Option(metavar="dB", help="Minimum signal-to-noise ratio of each result, e.g. 30dB.")
    ] = None,
    accum: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Accumulation dtype of the candidate's products: float32, tf32, bfloat16 or float16."
        ),
    ] = None,
    reproduction: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a test of the first divergence that needs neither model nor glass."),
    ] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="As in transformers: sdpa, eager.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")] = False,
    trust_engine: TrustEngine = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="LoRA adapter, as peft saves it, to merge into the model.", show_default=False
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result as a JSON document; - is stdout.")
    ] = None,
) -> int:
    """Find the first op that is wrong in a port, engine, pass or dump.

    Exit status: 0 ok, 1 a tensor reaches --fail-on (or a token changes), 4 too little was comparable.
    """
    engines = {
        "--map": map,
        "--backend": backend,
        "--pass": passes,
        "--all-rungs": all_rungs,
        "--bisect-outputs": bisect_outputs,
        "--accum": accum,
        "--drift": drift,
        "--min-snr": min_snr,
        "--reproduction": reproduction,
        "--adapter": adapter,
        "--trust-engine": trust_engine,
    }
    own = {"--optimizer": optimizer, "--candidate-optimizer": candidate_optimizer, "--loss": loss}
    strangers = [flag for flag, value in (engines if training else own).items() if value]
    if strangers:
        hint = "remove them, or --training" if training else "add --training"
        raise UsageError("not for this kind of check", got=", ".join(strangers), hint=hint)
    if training:
        with stages(((Work.TRAINING, 1.0),)) as progress:
            progress(Work.TRAINING.says("training and judging every step"))
            result = glass.check_training(
                baseline,
                candidate,
                inputs=inputs,
                optimizer=optimizer,
                candidate_optimizer=candidate_optimizer,
                loss=loss,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                revision=revision,
                fail_on="suspicious" if fail_on is FailOn.suspicious else "wrong",
                min_coverage=min_coverage,
            )
        return _answered(result, json)
    with stages(_SHARES) as progress:
        result = glass.check(
            baseline,
            candidate=candidate,
            map=map,
            backend=backend,
            dtype=dtype,
            inputs=inputs,
            steps=steps,
            passes=passes or (),
            all_rungs=all_rungs,
            bisect_outputs=bisect_outputs,
            fail_on=fail_on.value,
            min_coverage=min_coverage,
            drift=drift,
            min_snr=None if min_snr is None else decibels(min_snr),
            accumulation=accum,
            reproduction=reproduction,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            trust_engine=trust_engine,
            revision=revision,
            adapter=adapter,
            progress=progress,
        )
    return _answered(result, json)


def _answered(result: Comparison, json: str | None) -> int:
    """Print the result and return the exit status."""
    if json is not None:
        write_json(result.to_dict(), json)
    if json != "-":
        from glassengine.report.terminal_check import check

        out.print(check(result))
    if result.ok:
        return 0
    return 4 if result.too_little else 1
