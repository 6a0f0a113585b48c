"""`glass check`: judges the levels of a model, or another implementation, and names the first wrong op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine import asked
from glassengine.candidates import GIVEN, MODEL, flags_of, forms, refuse, require_kind
from glassengine.cli.answers import Answers
from glassengine.cli.errors import INTERRUPTED_STATUS, terminable
from glassengine.cli.foreign import renamed
from glassengine.cli.invariance import check as check_invariance
from glassengine.cli.options import err, print_answer, settings, stages
from glassengine.cli.shared import (
    AdaptedCheckpoint,
    Baseline,
    CandidateArgument,
    Dtype,
    Library,
    Map,
    MinSnr,
    Passes,
    PipelineParallel,
    Python,
    Quantize,
    TensorParallel,
    TrustEngine,
    VerdictOptions,
    decibels,
    one_candidate,
)
from glassengine.progress import Work
from glassengine.report.terminal_check import check
from glassengine.results import Comparison, Interrupted

_SHARES = (
    (Work.LOADING, 1.0),
    (Work.DEQUANTIZING, 1.0),
    (Work.EXPORTING, 5.0),
    (Work.EXPORTING_CANDIDATE, 5.0),
    (Work.BUILDING_OBSERVABLE, 7.0),
    (Work.BUILDING_RELEASE, 6.0),
    (Work.JUDGING, 8.0),
)

CONTEXT_SETTINGS = renamed({"all-rungs": "all-levels"})


@dataclass(frozen=True)
class CheckOptions:
    """What is judged, and how."""

    map: Map = None
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Naming of a dump of a serving engine, where it has none: ggml, onnx, vllm or sglang."
        ),
    ] = None
    library: Library = None
    python: Python = None
    session_options: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.json|KEY=VALUE",
            help="How ONNX Runtime runs the candidate; default: its own, fully optimized. Repeatable.",
        ),
    ] = None
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Back-end of the built engines.")] = None
    quantize: Quantize = None
    dtype: Dtype = "auto"
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FACTORY", help="Prompts (.txt, one per line) or tensors (.pt .safetensors .npz .json)."
        ),
    ] = None
    steps: Annotated[int, typer.Option(min=0, help="Number of decode steps after the prefill.")] = 3
    passes: Passes = None
    all_levels: Annotated[
        bool, typer.Option("--all-levels", help="Compile every op alone, not only the wrong ones.")
    ] = False
    bisect_outputs: Annotated[
        bool,
        typer.Option("--bisect-outputs", help="Observe only results; if they are wrong, add a few outputs per build."),
    ] = False
    drift: Annotated[
        bool,
        typer.Option("--drift", help="Show the signal loss per module; default for a less precise candidate."),
    ] = False
    min_snr: MinSnr = None
    accumulation: Annotated[
        str | None,
        typer.Option(
            "--accum",
            metavar="DTYPE",
            help="Accumulation dtype of the candidate's products: float32, tf32, bfloat16 or float16.",
        ),
    ] = None
    reproduction: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a test of the first divergence that needs neither model nor glass."),
    ] = None
    trust_engine: TrustEngine = False
    tensor_parallel: TensorParallel = 1
    pipeline_parallel: PipelineParallel = 1
    jobs: Annotated[int, typer.Option(metavar="N", help="Judge the cases (prompts) of a candidate in N processes.")] = 1
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FN", help="Function that returns the tokenizer of a candidate without files of one."
        ),
    ] = None
    invariant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Compare BASELINE with itself under a change that must not matter: run, batch, padding, length, "
            "cache, threads, order, compile, attention, world, all. Repeatable.",
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON", help="Judge BASELINE as it runs in another environment: another torch or transformers."
        ),
    ] = None
    only: Annotated[str | None, typer.Option(metavar="prompt", help="Judge the prompt alone, and load no model.")] = (
        None
    )
    graft: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE=baseline", help="Go on with the baseline's tensor there. Repeatable."),
    ] = None
    graft_until_clean: Annotated[
        bool,
        typer.Option("--graft-until-clean", help="Graft every wrong op and judge again: lists all mistakes of a port."),
    ] = False
    suggest_precision: Annotated[
        bool,
        typer.Option(
            "--suggest-precision", help="Find the fewest modules to keep in float32, or unquantized, for --min-snr."
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `glass.check` that were given."""
        given = {**vars(self), "invariant": None, "min_snr": decibels(self.min_snr)}
        return {name: value for name, value in given.items() if value is not None}


def command(
    baseline: Baseline,
    candidate_argument: CandidateArgument = None,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            metavar="CANDIDATE",
            help=f"Judge this; default: engines built from the baseline. One of {forms()}.",
        ),
    ] = None,
    *,
    options: CheckOptions,
    checkpoint: AdaptedCheckpoint,
    verdicts: VerdictOptions,
    answers: Answers,
) -> int:
    """Find the first op that is wrong in a port, engine, pass or dump.

    Exit status: 0 ok, 1 a tensor reaches --fail-on (or a token changes), 4 too little was comparable.
    """
    given = flags_of(**vars(options))
    answers.prepare()
    if options.invariant or words:
        own = [f"--{name}" for name in answers.given]
        flags = {"candidate": candidate, "only": options.only, "drift": options.drift}
        own += [f"--{name}" for name, value in flags.items() if value]
        target = [baseline, *filter(None, (candidate_argument, *(words or ())))]
        same = {name: getattr(options, name) for name in ("inputs", "dtype", "trust_engine", "library", "python")}
        return check_invariance(target, options.invariant or (), [*given, *own], same | vars(checkpoint))
    asked.model(baseline)
    candidate = asked.model(one_candidate(candidate, candidate_argument))
    require_kind(candidate)
    if candidate is not None:
        refuse(MODEL if asked.is_plain_model(candidate) else GIVEN, given, candidate)
    try:
        with terminable(), stages(_SHARES) as progress:
            result = glass.check(
                baseline,
                candidate=candidate,
                fail_on=verdicts.fail_on.value,
                min_coverage=verdicts.min_coverage,
                progress=progress,
                **options.arguments(),
                **vars(checkpoint),
            )
    except Interrupted as stopped:
        err.print("interrupted: the answer is of what was judged until then")
        return answered(stopped.partial, answers, INTERRUPTED_STATUS)
    return answered(result, answers)


def answered(result: Comparison, answers: Answers, status: int | None = None) -> int:
    """Print the result and return the exit status, which is `status` if the work has another end than its answer."""
    own = 0 if result.ok else 4 if result.too_little else 1
    status = own if status is None else status
    return answers.give(result.to_dict, lambda: print_answer(check(result, settings.words)), [result], status)
