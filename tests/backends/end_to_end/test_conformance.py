"""Every built-in back-end computes every tensor of every family: the second table of docs/families.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.tables import markdown
from benchmarks.tables.conformance_table import CELLS, Cell, check_program, read, text_of
from glassengine.testing import conformance, models

MakeSubject = Callable[..., conformance.Subject]

ALWAYS = {
    ("llama", "eager"),
    ("gpt2", "onnxruntime"),
    ("llama", "openvino"),
}
"""A program that generates, a plain one, and every back-end. The others are slow; tokens of every family are compared
with transformers, always. Of Inductor's, a plain module is looked at in `tests/backends/inductor/test_backend.py`."""

CASES = [pytest.param(cell, id=" on ".join(cell), marks=() if cell in ALWAYS else pytest.mark.slow) for cell in CELLS]


@pytest.fixture(scope="module")
def table(root: Path) -> dict[Cell, str]:
    return read(markdown.within((root / "docs" / "families.md").read_text(encoding="utf-8"), "op sites"))


@pytest.mark.parametrize("cell", CASES)
def test_every_op_site(subject_of: MakeSubject, table: dict[Cell, str], cell: Cell) -> None:
    subject = subject_of(*cell)
    report = check_program(cell[0], subject)
    # An empty cell of the page has not been filled yet.
    assert text_of(cell, report) == (table[cell] or str(report.num_checked))
    assert report.num_checked > 3 * len(subject.nodes)
    assert not report.skipped


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        *(pytest.param(model, "inductor", marks=pytest.mark.slow) for model in ("vision", "audio")),
        *((model, backend) for model in ("vision", "audio") for backend in ("eager", "onnxruntime", "openvino")),
    ],
)
def test_plain_modules(subject_of: MakeSubject, model: str, backend: str) -> None:
    subject = subject_of(model, backend)
    for batch in (2, 5):
        report = conformance.check_module(subject, getattr(models, f"{model}_inputs")(batch))
        assert report.ok, report.findings[:5]


@pytest.mark.slow
def test_float16_on_onnxruntime(subject_of: MakeSubject) -> None:
    report = conformance.check_generation(subject_of("llama", "onnxruntime", "float16"), batch=2, left_padding=2)
    assert report.ok, report.findings[:5]
