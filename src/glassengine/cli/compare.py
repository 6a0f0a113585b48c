"""`glass compare`: judge records of tensors without their models; engines and build artifacts side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

import glassengine as glass
from glassengine import commands
from glassengine.cli.answers import Answers
from glassengine.cli.documents import answer
from glassengine.cli.options import err, print_answer, quiet_stages, settings
from glassengine.cli.report import write_beside
from glassengine.cli.shared import Cluster, Map, MinCoverage, MinSnr, TrustEngine, decibels
from glassengine.errors import GlassError, UsageError
from glassengine.progress import Work
from glassengine.reading.documents import read_document
from glassengine.report.terminal_compare import comparison, comparisons
from glassengine.report.terminal_without_tensors import side_by_side
from glassengine.stores.places import place

_SHARES = ((Work.JUDGING, 1.0),)
_ARTIFACTS = "build artifacts"
_ENGINES = "an engine"
_TENSORS = "tensors"
_SERIES = "watched runs"
_MAX_MANIFEST_BYTES = 64 << 20
_TENSOR_FILE = re.compile(r"step\d+\.(pt|pth|safetensors|npz)|.+\.npy|recording\.json|tllm_debug|PP_\d+")


class CompareFailOn(StrEnum):
    """Lowest verdict that makes the command fail."""

    rounding = "rounding"
    suspicious = "suspicious"
    wrong = "wrong"


def command(
    baseline: Annotated[
        str,
        typer.Argument(
            metavar="BASELINE",
            help="Reference: recording, .pt, .safetensors, .npz, .npy, directory of step<i>.pt or <name>-step<i>.npy; "
            "or an engine, or build artifacts.",
            show_default=False,
        ),
    ],
    candidates: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE", help="Judged against it; the same kinds.", show_default=False)
    ],
    transpose: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Transpose the last two dimensions of this baseline tensor. Repeatable."),
    ] = None,
    show_only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Judge and show only this tensor: name, glob or re:. Repeatable."),
    ] = None,
    floating_point_only: Annotated[
        bool, typer.Option("--floating-point-only", help="Skip integers and bools.")
    ] = False,
    map: Map = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance instead of the dtype's own.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance instead of the dtype's own.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Device of the arithmetic.")] = "cpu",
    fail_on: Annotated[
        CompareFailOn | None, typer.Option(help="Lowest verdict that makes the command fail.", show_default="wrong")
    ] = None,
    min_coverage: MinCoverage = 0.9,
    min_snr: MinSnr = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Judge in N processes of this machine.", show_default="by size")
    ] = None,
    cluster: Cluster = None,
    first: Annotated[
        bool, typer.Option("--first", help="Stop after the first block with a tensor that is wrong.")
    ] = False,
    input_text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Engines: a prompt. Repeatable.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Engines: maximum new tokens.", show_default=False)
    ] = None,
    trust_engine: TrustEngine = False,
    series: Annotated[
        bool | None,
        typer.Option("--series/--no-series", help="Compare the series of two watched runs, or their tensors."),
    ] = None,
    *,
    answers: Answers,
) -> int:
    """Compare recordings, tensor files, dumps, engines or build artifacts.

    Exit status: 0 ok, 1 a tensor reaches --fail-on, 4 nothing or too little was comparable.
    """
    answers.prepare()
    for_tensors: dict[str, Any] = {
        "rtol": rtol,
        "atol": atol,
        "map": map,
        "show_only": tuple(show_only or ()),
        "floating_point_only": floating_point_only,
        "transpose": tuple(transpose or ()),
        "device": device,
        "fail_on": None if fail_on is None else fail_on.value,
        "min_coverage": min_coverage,
        "min_snr": decibels(min_snr),
        "jobs": jobs,
        "cluster": cluster,
        "first": first,
    }
    for_engines: dict[str, Any] = {
        "input_text": input_text or None,
        "max_new_tokens": max_new_tokens,
        "trust_engine": trust_engine or None,
    }
    sides = [baseline, *candidates]
    # A page is made of everything.
    meaningless = _given(for_tensors) + [name for name in answers.given if name != "report"]
    if series or (series is None and _are_watched(sides) and not meaningless):
        _refuse(_SERIES, _TENSORS, meaningless)
        return _compare_watched(sides, answers.report)
    kind = _common_kind(sides)
    _refuse(kind, _TENSORS, meaningless)
    _refuse(kind, _ENGINES, [name for name, value in for_engines.items() if value is not None])
    if kind == _ENGINES:
        return _engines(sides, for_engines, answers.report)
    if kind == _ARTIFACTS:
        return _artifacts(sides, answers.report)
    return _tensors(baseline, candidates, for_tensors, answers)


def _given(options: dict[str, Any]) -> list[str]:
    """Return the names of the options for tensors that were given."""
    defaults = {"device": "cpu", "min_coverage": 0.9, "floating_point_only": False, "first": False}
    return [name for name, value in options.items() if value != defaults.get(name) and value != ()]


def _tensors(baseline: str, candidates: Sequence[str], options: dict[str, Any], answers: Answers) -> int:
    if len(candidates) > 1:
        if answers.report is not None and answers.report.endswith((".html", ".htm")):
            got = f"{len(candidates)}"
            raise UsageError("a file holds the report of one candidate", got=got, expected="--report DIR")
        return _many(baseline, candidates, options, answers)
    with quiet_stages(_SHARES) as progress:
        one = glass.compare(baseline, candidates[0], **options, progress=progress)

    def show() -> None:
        print_answer(comparison(one, settings.words))

    status = 0 if one.ok else 4 if one.too_little else 1
    return answers.give(one.streamed, show, [one], status, recordings=(baseline, candidates[0]))


def _many(baseline: str, candidates: Sequence[str], options: dict[str, Any], answers: Answers) -> int:
    with quiet_stages(_SHARES) as progress:
        many = commands.compare_many(baseline, candidates, **options, progress=progress)

    def show() -> None:
        print_answer(comparisons(many))

    status = 0 if many.ok else 4 if many.too_little else 1
    recordings = baseline, *candidates
    return answers.give(many.to_dict, show, many.comparisons, status, whole=many, recordings=recordings)


def _engines(sides: Sequence[str], options: dict[str, Any], report: str | None) -> int:
    steps = {"max_new_tokens": options["max_new_tokens"]} if options["max_new_tokens"] is not None else {}
    trust = bool(options["trust_engine"])
    result = commands.side_by_side(sides, prompts=options["input_text"], trust_engine=trust, **steps)
    answer(result.to_dict, lambda: print_answer(side_by_side(result)))
    write_beside(result, report)
    return 0 if result.ok else 1


def _artifacts(sides: Sequence[str], report: str | None) -> int:
    if len(sides) != 2:
        raise UsageError("build artifacts are compared two at a time", got=f"{len(sides)} sides")
    # The manifest stands for its directory, where that holds tensors as well.
    places = [place(side) for side in sides]
    directories = [side.parent if side.is_file() else side for side in places]
    result = commands.compare_artifacts(*directories)
    answer(result.to_dict, lambda: print_answer(side_by_side(result)))
    write_beside(result, report)
    differs = any(stage.status != "identical" for stage in result.stages) or result.differences or result.files
    return 0 if result.ok else 1 if differs else 4


def _are_watched(sides: Sequence[str]) -> bool:
    """Whether all sides are recordings of watched runs."""
    return len(sides) == 2 and all(commands.find_series(side) is not None for side in sides)


def _compare_watched(sides: Sequence[str], report: str | None) -> int:
    """Compare the series of two runs, print the answer and return the exit status."""
    if len(sides) != 2:
        raise UsageError("series are compared two at a time", got=f"{len(sides)} sides")
    result = commands.compare_series(*sides)

    def show() -> None:
        print_answer(side_by_side(result))
        if not settings.quiet:
            err.print("values that both have recorded: glass compare --no-series " + " ".join(sides))

    answer(result.to_dict, show)
    write_beside(result, report, recordings=sides)
    return 0 if result.ok else 4 if result.standing == "uncalibrated" else 1


def _common_kind(sides: Sequence[str]) -> str:
    """Return what all sides are.

    Raises:
        UsageError: They are of different kinds.
    """
    kinds = [_kinds(place(side)) for side in sides]
    common = [kind for kind in (_TENSORS, _ENGINES, _ARTIFACTS) if all(kind in found for found in kinds)]
    if not common:
        raise UsageError(
            "the sides are of different kinds",
            got="; ".join(f"{side}: {' and '.join(found)}" for side, found in zip(sides, kinds, strict=True)),
            expected="tensors, engines, or build artifacts on every side",
        )
    if len(common) > 1 and _ARTIFACTS in common:
        err.print(
            f"the directories hold build artifacts too: {common[0]} are compared; name their manifest.json for those"
        )
    return common[0]


def _kinds(side: Path) -> list[str]:
    """Return everything that `side` is; tensors where nothing else is known of it."""
    if side.is_file():
        return [_ARTIFACTS] if side.name == "manifest.json" and _is_artifact_manifest(side) else [_TENSORS]
    if not side.is_dir():
        return [_TENSORS]
    found = []
    if any(_TENSOR_FILE.fullmatch(item.name) for item in side.iterdir()):
        found.append(_TENSORS)
    if (side / "engine.json").is_file():
        found.append(_ENGINES)
    if _is_artifact_manifest(side / "manifest.json"):
        found.append(_ARTIFACTS)
    return found or [_TENSORS]


def _is_artifact_manifest(path: Path) -> bool:
    try:
        read_document(path, _Manifest, most=_MAX_MANIFEST_BYTES, inside=path.parent, nonfinite=True)
    except GlassError:
        return False
    return True


class _Manifest(msgspec.Struct):
    format: Literal["glassengine artifacts"]


def _refuse(kind: str, belongs_to: str, given: Sequence[str]) -> None:
    if given and kind != belongs_to:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: only for {belongs_to}", got=f"sides that are {kind}")
