"""Options that several commands have: each is written once, alone or in a group.

A command takes a group as one keyword-only parameter, whose fields are then options of the command line; see
`main.with_global_flags`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from glassengine.errors import UsageError

Baseline = Annotated[
    str,
    typer.Argument(
        metavar="BASELINE",
        help="Reference: Hugging Face directory or id, file.py:factory, package.module:factory.",
        show_default=False,
    ),
]
CandidateArgument = Annotated[
    str | None, typer.Argument(metavar="CANDIDATE", help="Same as --candidate.", show_default=False)
]
Dtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="auto (that of the checkpoint), float32, bfloat16, float16 or float64.")
]
Quantize = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Round matrices to this type (--backend gguf): Q8_0, Q4_K, ..."),
]
ModuleInputs = Annotated[
    str | None,
    typer.Option(metavar="FILE|FACTORY", help="Inputs of a plain module: file.py:factory, or a tensor file."),
]
Map = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="JSON file of matching names and layouts.", show_default=False),
]
Library = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Shared library of llama.cpp for gguf:FILE; default: the installed one."),
]
Python = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Interpreter of the candidate: that of vLLM, ExecuTorch or another transformers; default: this one.",
    ),
]
Result = Annotated[
    str,
    typer.Argument(metavar="RESULT", help="JSON document of check, compare or replay.", show_default=False),
]
Passes = Annotated[
    list[str] | None,
    typer.Option("--pass", metavar="FILE.py:FN", help="Apply this user pass to the graph. Repeatable."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]
TensorParallel = Annotated[
    int, typer.Option(metavar="N", min=1, help="Ranks that share each layer; each has its part of the weights.")
]
PipelineParallel = Annotated[
    int, typer.Option(metavar="N", min=1, help="Stages of ranks, each with layers of its own.")
]
TrustEngine = Annotated[
    bool,
    typer.Option("--trust-engine", help="Load native code of an engine built elsewhere: it can do anything you can."),
]
MinCoverage = Annotated[
    float, typer.Option(min=0, max=1, help="Minimum share of the baseline's tensors of floats that must be judged.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="Judge by tasks of a Ray cluster: ray://HOST:PORT, or auto.", show_default=False
    ),
]
MinSnr = Annotated[
    str | None, typer.Option(metavar="dB", help="Minimum signal-to-noise ratio of each result, e.g. 30dB.")
]

Report = Annotated[
    str | None,
    typer.Option(metavar="DIR|FILE.html", help="Write the answer as a page for the browser; replaces a report there."),
]


class FailOn(StrEnum):
    """Lowest verdict that makes the command fail."""

    suspicious = "suspicious"
    wrong = "wrong"


@dataclass(frozen=True)
class Checkpoint:
    """How a checkpoint is loaded: `vars()` of it are keyword arguments of what loads a model."""

    attn_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="As in transformers: sdpa, eager.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    revision: Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub id.")] = None


@dataclass(frozen=True)
class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with an adapter to merge."""

    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="LoRA adapter, as peft saves it, to merge into the model.", show_default=False
        ),
    ] = None


@dataclass(frozen=True)
class VerdictOptions:
    """What decides the exit status of a check: `vars()` of it are keyword arguments of it."""

    fail_on: Annotated[FailOn, typer.Option(help="Lowest verdict that makes the command fail.")] = FailOn.wrong
    min_coverage: MinCoverage = 0.9


def one_candidate(option: str | None, argument: str | None) -> str | None:
    """Return the candidate, which stands behind the baseline or behind `--candidate`.

    Raises:
        UsageError: Both are given.
    """
    if None not in (option, argument):
        raise UsageError("the candidate is given twice", got=f"{argument} and --candidate {option}")
    return argument if option is None else option


def decibels(text: str | None) -> float | None:
    """Return a signal-to-noise ratio that is written as "30" or "30dB".

    Raises:
        UsageError: It is not a number.
    """
    if text is None:
        return None
    try:
        found = float(re.sub(r"\s*dB$", "", text, flags=re.IGNORECASE))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError("invalid --min-snr", got=text, expected="a number of dB, e.g. 30dB")
    return found
