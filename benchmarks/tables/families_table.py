"""The table of families x back-ends x dtypes: each cell is what `glass check` says of the family's tiny checkpoint.

A cell is agreed when the check is ok and judged tensors, or when it fails with the reason of a limitation that
`LIMITATIONS.md` lists under the number in the cell. Anything else is an error of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import markdown
from benchmarks.tables.markdown import DisagreementError
from glassengine.diagnose import check
from glassengine.errors import GlassError
from glassengine.testing.architectures import FAMILIES, save_family

COLUMNS = (
    ("eager", "float32"),
    ("eager", "bfloat16"),
    ("inductor", "float32"),
    ("inductor", "bfloat16"),
    ("onnxruntime", "float32"),
    ("onnxruntime", "float16"),
    ("onnxruntime", "bfloat16"),
    ("openvino", "float32"),
    ("openvino", "float16"),
    ("openvino", "bfloat16"),
)
"""(back-end, dtype of the checkpoint). ONNX Runtime and OpenVINO compute float16 in float32: OpenVINO because its
precision hint is always f32, so that a dtype in this table says where values are rounded, not in which kernels."""

Cell = tuple[str, str, str]
"""(family, back-end, dtype)."""

CELLS: tuple[Cell, ...] = tuple((family, *column) for family in FAMILIES for column in COLUMNS)


@dataclass(frozen=True)
class Limitation:
    """A reason for which cells fail: its number in `LIMITATIONS.md`, where it holds, and what the error says.

    `families` is empty for all of them.
    """

    number: str
    families: tuple[str, ...]
    backends: tuple[str, ...]
    dtype: str
    reason: str


LIMITATIONS = (
    Limitation("F1", (), ("onnxruntime", "openvino"), "bfloat16", "back-end '.*' cannot run bfloat16 models"),
    Limitation("F7", ("bart",), ("onnxruntime", "openvino"), "float16", "cannot trace .*bart.*\\n.*data-dependent"),
)


def check_cell(cell: Cell, checkpoints: Path) -> str:
    """Return the text of a cell: the number of tensors judged, or that of the limitation.

    Args:
        cell: Which.
        checkpoints: Directory for checkpoints; one that is there is used.

    Raises:
        DisagreementError: The check is not ok, judged nothing, or failed for another reason.
    """
    family, backend, dtype = cell
    directory = checkpoints / family
    if not directory.is_dir():
        save_family(family, directory)
    expected = [
        limit
        for limit in LIMITATIONS
        if backend in limit.backends and dtype == limit.dtype and family in (limit.families or FAMILIES)
    ]
    try:
        result = check(directory, backend=backend, dtype=dtype)
    except GlassError as error:
        found = [limit.number for limit in expected if re.search(limit.reason, str(error))]
        if found:
            return found[0]
        raise DisagreementError(f"{'/'.join(cell)} failed", got=str(error)) from error
    if expected:
        raise DisagreementError(f"{'/'.join(cell)} runs", expected=f"limitation {expected[0].number}")
    judged = result.counts["compared"]
    if not result.ok or not judged:
        raise DisagreementError(f"{'/'.join(cell)} is not ok", got=f"{result.verdict}, {judged} tensors judged")
    return str(judged)


def render(texts: Mapping[Cell, str]) -> str:
    """Return the table as Markdown; a cell that was not checked is empty."""
    named = {(family, f"{backend} {dtype}"): text for (family, backend, dtype), text in texts.items()}
    return markdown.render(named, "family", FAMILIES, [" ".join(column) for column in COLUMNS])


def read(table: str) -> dict[Cell, str]:
    """Inverse of `render`."""
    found = {}
    for (family, column), text in markdown.read(table).items():
        backend, dtype = column.split()
        found[family, backend, dtype] = text
    return found
