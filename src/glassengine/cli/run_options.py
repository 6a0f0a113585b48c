"""Groups of options of `glass run`: how tokens are chosen, and what is looked at on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

_SAMPLING = "Sampling"
_DEBUGGING = "Debugging"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Sample, or take the most likely token; default: the model's own setting, and sampling if "
            "--temperature, --top-k or --top-p is given.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    temperature: Annotated[float | None, typer.Option(help="As in transformers.", rich_help_panel=_SAMPLING)] = None
    top_k: Annotated[
        int | None, typer.Option(min=0, help="As in transformers; 0 is all.", rich_help_panel=_SAMPLING)
    ] = None
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="As in transformers.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="As in transformers.", rich_help_panel=_SAMPLING)] = (
        None
    )
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of sampling; default: a new one, which is printed.", rich_help_panel=_SAMPLING),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`: what chooses among likely tokens turns sampling on."""
        chooses = any(value is not None for value in (self.temperature, self.top_k, self.top_p))
        return {**vars(self), "do_sample": True if self.do_sample is None and chooses else self.do_sample}


@dataclass(frozen=True)
class Debugging:
    """Which tensors of a run are shown, where files and snapshots of them go."""

    debug: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Show these tensors at every step: name, site, glob or re:. Repeatable. They are printed, unless "
            "they are written to files.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None
    print_tensors: Annotated[
        bool,
        typer.Option(
            "--print-tensors",
            help="Print the tensor names, then step, name and tensor; without --debug all of them.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = False
    debug_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write every input and output of every step (or those of --debug) to DIR/step0.pt, DIR/step0.txt, ...",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None
    debug_format: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT", help="pt, txt or npy. Repeatable; default: pt and txt.", rich_help_panel=_DEBUGGING
        ),
    ] = None
    debug_mode: Annotated[
        bool,
        typer.Option(
            "--debug-mode",
            help="Like --debug-dir, into the directory of the variable DEBUG_ARTIFACTS_DIR; without it, print "
            "the names of the tensors.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = False
    synchronous: Annotated[
        bool,
        typer.Option(
            "--synchronous",
            help="Wait for the device after each execution, so that an error names the failing one "
            "(also GLASS_SYNCHRONOUS=1 and CUDA_LAUNCH_BLOCKING=1).",
            rich_help_panel=_DEBUGGING,
        ),
    ] = False
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write a snapshot (graph and inputs) of each execution, for glass replay.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None
    snapshot_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHEN",
            help="every; or nonfinite, error: the first such execution, with its outputs; then stop. Repeatable.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None
