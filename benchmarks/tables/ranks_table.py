"""The table of families x numbers of ranks: what of a tiny model's weights is cut by whose plan, or why it is refused.

    family -> `check_mesh`, its program, `plan_of`: what `glass build --tensor-parallel N` asks before it builds

A cell names the plan, the model's own or one made from its graph, with the share of the weights that is cut; between
stages nothing is cut. A refusal is the first line of its error.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables import markdown
from glassengine.backends.registry import find_backend
from glassengine.engine.build.write import check_mesh, plan_of
from glassengine.errors import UsageError
from glassengine.program import export_program, load_model
from glassengine.program.parallel.placements import Mesh
from glassengine.testing.architectures import FAMILIES

MESHES = {"tensor parallel 2": Mesh(2, 1), "tensor parallel 4": Mesh(4, 1), "pipeline parallel 2": Mesh(1, 2)}

Cell = tuple[str, str]
"""(family, ranks)."""

CELLS: tuple[Cell, ...] = tuple((family, ranks) for family in FAMILIES for ranks in MESHES)


def check_cell(cell: Cell) -> str:
    """Return the text of a cell."""
    family, ranks = cell
    mesh, model = MESHES[ranks], load_model(FAMILIES[family]())
    try:
        check_mesh(mesh, model, find_backend("eager"), ())
        program = export_program(model)
        plan = plan_of(program, model, mesh)
    except UsageError as error:
        return f"refused: {error.what}"
    if plan is None:
        return "stages of whole layers"
    weights = program.weights()
    cut = sum(value.nbytes for name, value in weights.items() if name in plan.layout.inputs)
    whose = "its own plan" if plan.source == "model" else "from its graph"
    return f"{whose}, {100 * cut / sum(value.nbytes for value in weights.values()):.0f} % cut"


def render(texts: Mapping[Cell, str]) -> str:
    """Return the table as Markdown; a cell that was not checked is empty."""
    return markdown.render(texts, "family", FAMILIES, tuple(MESHES))


def read(table: str) -> dict[Cell, str]:
    """Inverse of `render`."""
    return markdown.read(table)
