"""A reproduction of the first divergence of a check: the smallest thing that still shows the mistake.

Tried in this order, each by running the very test that is written: the candidate's own graph in eager mode (the mistake
is in the graph or in a weight), the same compiled by the engine's back-end alone, then with more and more of the ops
before it (a mistake of fusion). Where none of them shows it, what was recorded is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine.diagnose.reproduction.bisect_compiler import compiler_settings
from glassengine.diagnose.reproduction.files import Reproduction, run_reproduction, write_reproduction
from glassengine.errors import GlassError, UsageError, logger
from glassengine.judge.pieces import Piece
from glassengine.judge.replay.expected import expected_of
from glassengine.judge.verdict.evidence import Evidence
from glassengine.judge.verdict.score import Score
from glassengine.numerics.judgement import WRONG, unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.program.kinds.causal_lm import USER_MODULE
from glassengine.program.representation.naming import source_line
from glassengine.program.representation.program import Program
from glassengine.results import Divergence, Findings
from glassengine.results.recorded import Bisection

_RUNNERS: Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "inductor": (("inductor", {}), ("aot_inductor", {"freezing": True})),
    "onnxruntime": (("onnxruntime", {}),),
}
"""Back-end -> what may show its mistakes without Glass Engine, and with which options."""

_DEPTHS = (1, 2, 4, 8)


def with_reproduction(
    result: Findings, directory: Path, scores: Sequence[Score], baseline: Program, software: str | None = None
) -> Findings:
    """Write a reproduction of the first divergence and return `result` with the name of its directory.

    Where it cannot be written, that is logged: it must not take the result of the check with it.

    Args:
        result: Has a first divergence.
        directory: See `reproduction_files.require_free`.
        scores: Of the check, with evidence.
        baseline: The baseline program.
        software: Kind of the serving engine that is the candidate.
    """
    first = result.first_divergence
    assert first is not None and first.node is not None
    # A level that only explains another one (ops compiled alone) keeps no tensors: the same op of that one will do.
    boxes = sorted(
        (score for score in scores if score.evidence is not None), key=lambda score: score.side.level != first.level
    )
    kept = (score.evidence.get(first.node, first.step) for score in boxes if score.evidence is not None)
    evidence = next((found for found in kept if found is not None), None)
    if evidence is None:
        logger.warning("no reproduction of %s: its tensors were not kept", first.site)
        return result
    try:
        _reproduce(directory, first, evidence, baseline, software)
    except (GlassError, OSError) as error:
        logger.error("no reproduction in %s: %s", directory, error)
        return result
    reproduced = replace(first, reproduction=str(directory))
    origins = tuple(reproduced if origin == first else origin for origin in result.origins)
    return replace(result, first_divergence=reproduced, origins=origins)


def _reproduce(
    directory: Path, divergence: Divergence, evidence: Evidence, baseline: Program, software: str | None
) -> None:
    weights, sites = _names("e", baseline)
    if evidence.program is not None:
        own = _names("c", evidence.program)
        weights, sites = weights | own[0], sites | own[1]
    about = _about(divergence)
    theirs = None if evidence.target is None else source_line(evidence.target)
    if theirs is not None and theirs != divergence.source:
        about["candidate source"] = theirs
    recorded = Reproduction(
        {**about, "shown by": "the recorded result"},
        "recorded",
        evidence.exact,
        None,
        [evidence.expected],
        [evidence.allowed],
        [evidence.actual],
        weights,
        sites,
        software=software,
    )
    if baseline.onnx is not None:
        recorded = replace(recorded, exact=None)  # functions of ONNX have no source
    if evidence.program is not None and evidence.program.onnx is not None and evidence.target is not None:
        _reproduce_onnx(directory, recorded, evidence)
        return
    for found in _attempts(recorded, evidence):
        if _shows(found):
            write_reproduction(directory, found)
            return
    try:
        write_reproduction(directory, recorded)
    except UsageError:
        # An op that cannot be written as source.
        write_reproduction(directory, replace(recorded, exact=None))


def _reproduce_onnx(directory: Path, recorded: Reproduction, evidence: Evidence) -> None:
    """Write the nodes of the candidate's ONNX graph, as few as show the mistake, or those of the op as recorded."""
    last: Reproduction | None = None
    for depth, region in _regions(evidence):
        runner = evidence.backend if evidence.backend in ("onnxruntime", "openvino") else "onnxruntime"
        facts = {**recorded.about, "shown by": f"{runner} alone"}
        found = replace(recorded, about=facts, runner=runner, candidate=region, graph=evidence.program)
        last = last or replace(found, about=recorded.about, runner="recorded")
        found = found if depth == 1 else _of_region(found, region)
        if _shows(found):
            write_reproduction(directory, found)
            return
    write_reproduction(directory, last or recorded)


def _names(letter: str, program: Program) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of weights, and of everything else, by the letter of a side and the node."""
    names = program.weight_names().items()
    weights = {f"{letter}:{node}": name.removeprefix(f"{USER_MODULE}.") for node, name in names}
    return weights, {f"{letter}:{node}": sites[0].name for node, sites in program.sites.by_node.items()}


def _attempts(recorded: Reproduction, evidence: Evidence) -> Iterator[Reproduction]:
    piece = evidence.candidate()
    if piece is None:
        return
    facts = {**recorded.about, "shown by": "the candidate's graph in eager mode"}
    yield replace(recorded, about=facts, runner="eager", candidate=piece)
    for depth, region in _regions(evidence):
        for runner, settings in _RUNNERS.get(evidence.backend or "", ()):
            facts = {**recorded.about, "shown by": f"{len(region.ops)} ops compiled by {runner}"}
            found = replace(recorded, about=facts, runner=runner, settings=settings, candidate=region)
            yield found if depth == 1 else _of_region(found, region)


def _regions(evidence: Evidence) -> Iterator[tuple[int, Piece]]:
    """Yield the ops of the candidate that lead to the one that differs, more and more of them, with their depth."""
    seen: set[tuple[str, ...]] = set()
    for depth in _DEPTHS:
        region = evidence.candidate(depth)
        if region is not None and (key := tuple(node.name for node in region.ops)) not in seen:
            seen.add(key)
            yield depth, region


def _of_region(found: Reproduction, region: Piece) -> Reproduction:
    """The expected value of a region: several ops round, so the bound of the last one is widened by what they do."""
    expected = region.exact()
    errors = [value.double() - exact for value, exact in zip(region.run(), expected, strict=True)]
    widened = [
        allowed + WRONG * float(error.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
        for allowed, error in zip(found.allowed, errors, strict=True)
    ]
    return replace(found, exact=region, expected=expected, allowed=widened)


def _shows(found: Reproduction, *, raising: bool = False) -> bool:
    """Whether the test of a reproduction fails by itself; `raising`: by an error of the back-end."""
    with tempfile.TemporaryDirectory(prefix="glassengine-reproduction-") as folder:
        try:
            write_reproduction(Path(folder), found)
            problem = run_reproduction(Path(folder))
        except (OSError, MemoryError):
            raise
        except GlassError as error:
            logger.info("no reproduction by %s: %s", found.runner, error.what)
            return False
        except Exception as error:
            logger.info("no reproduction by %s: %s: %s", found.runner, type(error).__name__, error)
            return raising
    return bool(problem) and not raising


def reproduce_bisection(directory: Path, bisection: Bisection, piece: Piece) -> Bisection:
    """Write a test of the smallest piece that a back-end breaks, and return `bisection` with the name of its directory.

    Where it cannot be written, or nothing but Glass Engine can run the back-end, that is logged.
    """
    expected = expected_of(piece)
    exact, allowed = [one.reference.exact for one in expected], [_allowed(one.reference) for one in expected]
    about = {
        "failure": f"{bisection.failure}: {bisection.message}",
        "backend": bisection.backend,
        "part": bisection.part,
        "ops": ", ".join(op.op for op in bisection.ops),
        "source": next((op.source for op in bisection.ops if op.source), None),
    }
    facts = {label: text for label, text in about.items() if text is not None}
    for runner, settings in _RUNNERS.get(bisection.backend, ()):
        settings = {**settings, **(compiler_settings() if bisection.backend == "inductor" else {})}
        found = Reproduction(facts, runner, piece, piece, exact, allowed, (), weights={}, settings=settings)
        try:
            # What kills its process is written without being tried in this one.
            if bisection.failure == "crash" or _shows(found, raising=bisection.failure != "accuracy"):
                write_reproduction(directory, found)
                return replace(bisection, reproduction=str(directory))
        except (GlassError, OSError) as error:
            logger.error("no reproduction in %s: %s", directory, error)
            return bisection
    logger.error("no reproduction: nothing but Glass Engine shows this failure of %s", bisection.backend)
    return bisection


def _allowed(reference: Reference) -> torch.Tensor:
    """Return how far from P rounding may lead by the floor, the same for every element."""
    exact, dtype, size = reference.exact, reference.native.dtype, 0.0
    if dtype.is_floating_point:
        floor = max(reference.relative_floor, unit_roundoff(dtype))
        size = WRONG * floor * float(exact.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) if exact.numel() else 0.0
    return torch.full(exact.shape, size, dtype=torch.float64)


def _about(divergence: Divergence) -> dict[str, Any]:
    """What a reproduction tells its reader."""
    facts = {
        "site": divergence.site,
        "candidate": divergence.candidate_site,
        "source": divergence.source,
        "level": divergence.level,
        "step": divergence.step,
        "verdict": divergence.verdict,
        "hint": "; ".join(hint.in_words() for hint in divergence.hints) or None,
    }
    return {label: value for label, value in facts.items() if value is not None}
