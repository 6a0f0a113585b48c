"""The rung of the ranks: the programs of an engine of several ranks, judged op by op beside that of one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from glassengine.diagnose.ladder.climb import Climb
from glassengine.engine.build.build import build_program
from glassengine.engine.ranks.member import mesh_of, part_of
from glassengine.engine.run.parallel import ParallelEngine
from glassengine.engine.store import files
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.ranks import RanksSide
from glassengine.program.parallel.placements import Mesh, Shard
from glassengine.program.parallel.ranks import lay_out
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import load_program


def built_ranks(
    climb: Climb, program: Program, backend: str | None, mesh: Mesh, sizes: dict[str, Any]
) -> ParallelEngine:
    """Build an engine of several ranks from a program, in a directory that ends with the check."""
    folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
    engine = build_program(program, folder / "ranks", backend=backend, model=climb.baseline, mesh=mesh, **sizes)
    assert isinstance(engine, ParallelEngine)
    return engine


def add_ranks(climb: Climb, engine: ParallelEngine, program: Program, replay: Replay) -> None:
    """The stored programs of all ranks, with their own weights, run side by side.

    Args:
        climb: With the pairs of `program`.
        engine: Whose ranks they are.
        program: That of one process, which they were made from.
        replay: Judges their ops.
    """
    mesh = mesh_of(engine.manifest)
    parts = [
        [_program(part_of(engine.directory, stage * mesh.tensor + place)) for place in range(mesh.tensor)]
        for stage in range(mesh.pipeline)
    ]
    layout = None
    if mesh.tensor > 1:
        names = {qualified: node for node, qualified in program.weight_names().items()}
        cuts = {
            names[name]: Shard(cut.axis, cut.blocks)
            for name, cut in engine.manifest.placements.items()
            if name in names
        }
        layout = lay_out(program, cuts, mesh.tensor)
    climb.add(RanksSide(program, climb.pairs, place=Place.RANKS, replay=replay, parts=parts, layout=layout))


def _program(directory: Path) -> Program:
    return load_program(directory, files.load_weights(directory / files.WEIGHTS))
