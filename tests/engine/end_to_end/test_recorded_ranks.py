"""What the ranks of an engine record: right runs are right, and a mistake is named with its rank and its op."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

import glassengine as glass
from glassengine.compare.compare import compare
from glassengine.engine.build import write
from glassengine.errors import BackendError
from glassengine.program.parallel.placements import TENSOR_GROUP, Local
from glassengine.program.parallel.rewrite import Layout, _Writer, program_of
from glassengine.program.representation.program import Program
from glassengine.testing import models

IDS = [[5, 17, 200], [9, 8, 7, 6, 5]]
O_PROJ = "model.layers.0.self_attn.o_proj"
SITES = ["model.*", "lm_head"]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and the record of its engine of one process."""
    directory = tmp_path_factory.mktemp("sides")
    models.llama().save_pretrained(directory / "model")
    engine = made(directory, "one")
    run(directory, engine, "one-run")
    run(directory, engine, "one-step", 1)
    return directory


def made(directory: Path, name: str, **mesh: int) -> Any:
    options: dict[str, Any] = {"backend": "eager", "max_seq_len": 32, "add_output": SITES, **mesh}
    return glass.build(str(directory / "model"), directory / name, **options)


def run(directory: Path, engine: Any, name: str, steps: int = 3) -> Path:
    engine.generate(input_ids=IDS, max_new_tokens=steps, record=directory / name)
    return directory / name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_right_runs_are_right(sides: Path, mesh: tuple[int, int]) -> None:
    name = f"{mesh[0]}x{mesh[1]}"
    engine = made(sides, name, tensor_parallel=mesh[0], pipeline_parallel=mesh[1])
    recorded = run(sides, engine, f"{name}-run")
    assert len(list(recorded.glob("rank*"))) == mesh[0] * mesh[1]
    against = compare(sides / "one-run", recorded)
    assert against.ok and against.coverage > 0.99 and not against.counts["suspicious"], against.not_ok_because
    found = glass.check(str(sides / "model"), candidate=str(recorded))
    assert found.ok and found.coverage > 0.95 and not found.counts["suspicious"]
    with pytest.raises(BackendError, match="the recording exists already"):
        run(sides, engine, f"{name}-run")


@pytest.mark.slow
def test_a_prompt_in_pieces_is_refused(sides: Path) -> None:
    engine = made(sides, "pieces", tensor_parallel=2)
    with pytest.raises(BackendError, match="a prompt in pieces is not recorded"):
        engine.generate(input_ids=IDS, max_new_tokens=3, record=sides / "pieces-run", prefill_chunk=2)


@pytest.mark.slow
def test_the_shard_of_another_rank_is_named(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(program: Program, layout: Layout, place: int) -> Program:
        part = program_of(program, layout, place)
        name = "user.model.layers.1.mlp.up_proj.weight"
        if place == 1:
            part.exported.state_dict[name] = program_of(program, layout, 0).exported.state_dict[name]
        return part

    monkeypatch.setattr(write, "program_of", planted)
    recorded = run(sides, made(sides, "shard", tensor_parallel=2), "shard-run", 1)
    named(sides, recorded, "model.layers.1.mlp.up_proj", 1)


@pytest.mark.slow
def test_a_rank_that_goes_on_with_its_own_term_is_named(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _Writer._summed

    def planted(self: _Writer, node: Node, step: Local, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        if self.place != 1 or self.program.sites.by_node[node.name][0].name.partition("/")[0] != O_PROJ:
            return original(self, node, step, args, kwargs)
        ops, target = torch.ops, node.target
        term = self._call(target, *args, name=f"{node.name}_partial", **kwargs)
        asked = self._call(ops._c10d_functional.all_reduce.default, term, "sum", TENSOR_GROUP)
        nothing = self._call(ops.aten.mul.Tensor, self._call(ops._c10d_functional.wait_tensor.default, asked), 0)
        return self._call(ops.aten.add.Tensor, term, nothing, name=node.name)

    monkeypatch.setattr(_Writer, "_summed", planted)
    named(sides, run(sides, made(sides, "term", tensor_parallel=2), "term-run", 1), O_PROJ, 1)


def named(sides: Path, recorded: Path, site: str, rank: int) -> None:
    """A comparison and a check name the site and the rank."""
    for found in (compare(sides / "one-step", recorded), glass.check(str(sides / "model"), candidate=str(recorded))):
        assert not found.ok and found.first_divergence is not None
        assert found.first_divergence.site.partition("/")[0] == site, found.first_divergence
        assert found.first_divergence.rank == rank
