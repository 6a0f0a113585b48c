"""The table of programs x back-ends: every op site of every family's tiny program, value by value.

    family -> its programs: one; two of an encoder-decoder, and its one forward without a cache
    program, back-end -> `conformance`: prefill and decode, alone and in a left-padded batch; or forwards of three sizes

A cell is the number of tensors that were compared. All are in float32: in another dtype a plain tolerance says little,
and `glass check` judges those (see `families_table`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from benchmarks.tables.markdown import DisagreementError
from glassengine.backends.registry import find_backend
from glassengine.program import example_inputs, export_program, export_programs, load_model
from glassengine.program.kinds.example_inputs import encoder_inputs
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs
from glassengine.testing import conformance
from glassengine.testing.architectures import ENCODER_DECODERS, FAMILIES, GENERATING, ONE_FORWARD

BACKENDS = ("eager", "inductor", "onnxruntime", "openvino")
PARTS = ("encoder", "decoder")
PROGRAMS = (*GENERATING, *(f"{family} {part}" for family in ENCODER_DECODERS for part in PARTS), *ONE_FORWARD)
"""Families, which are one program, and parts of families."""

Cell = tuple[str, str]
"""(program, back-end)."""

CELLS: tuple[Cell, ...] = tuple((program, backend) for program in PROGRAMS for backend in BACKENDS)

SCENARIOS: tuple[dict[str, Any], ...] = ({}, {"batch": 2, "left_padding": 3}, {"batch": 2, "strided": True})
"""Arguments of `conformance.check_generation`."""


def make_program(name: str, dtype: str = "float32") -> Program:
    """Export one of `PROGRAMS`."""
    family, _, part = name.partition(" ")
    model = load_model(FAMILIES[family](), dtype=dtype)
    if part:
        return export_programs(model)[PARTS.index(part)]
    return export_program(model, inputs=example_inputs(model.module) if family in ONE_FORWARD else None)


def check_program(name: str, subject: conformance.Subject) -> conformance.ConformanceReport:
    """Run all that one of `PROGRAMS` is tried with; return one report of it.

    Args:
        name: Which.
        subject: The same, prepared.
    """
    family, _, part = name.partition(" ")
    if subject.program.generates:
        # Decoding of an encoder-decoder begins with one token: there is nothing to pad.
        scenarios = [one for one in SCENARIOS if not part or "left_padding" not in one]
        return joined([conformance.check_generation(subject, **one) for one in scenarios])
    inputs = encoder_inputs if part else example_inputs
    return joined([conformance.check_module(subject, named_inputs(step)) for step in inputs(FAMILIES[family]())])


def joined(reports: Sequence[conformance.ConformanceReport]) -> conformance.ConformanceReport:
    """Return what several runs of one subject found; `skipped` is what none of them compared."""
    skipped = {
        name: reason
        for report in reports
        for name, reason in report.skipped.items()
        if all(name in other.skipped for other in reports)
    }
    findings = tuple(finding for report in reports for finding in report.findings)
    return conformance.ConformanceReport(sum(report.num_checked for report in reports), findings, skipped)


def check_cell(cell: Cell, directory: Path) -> str:
    """Return the text of a cell: how many tensors were compared.

    Args:
        cell: Which.
        directory: Empty, for what the back-end builds.

    Raises:
        DisagreementError: A tensor is wrong, or none was compared.
    """
    name, backend = cell
    subject = conformance.prepare(make_program(name), find_backend(backend), directory)
    return text_of(cell, check_program(name, subject))


def text_of(cell: Cell, report: conformance.ConformanceReport) -> str:
    """Return the text of a cell for what was found.

    Raises:
        DisagreementError: As `check_cell`.
    """
    if report.ok:
        return str(report.num_checked)
    first = report.findings[0] if report.findings else None
    got = "nothing was compared" if first is None else f"step {first.step}, {first.what}: {first.problem}"
    raise DisagreementError(f"{' on '.join(cell)} is not right", got=got)


def render(texts: Mapping[Cell, str]) -> str:
    """Return the table as Markdown; a cell that was not checked is empty."""
    return markdown.render(texts, "program", PROGRAMS, BACKENDS)


def read(table: str) -> dict[Cell, str]:
    """Inverse of `render`."""
    return markdown.read(table)
