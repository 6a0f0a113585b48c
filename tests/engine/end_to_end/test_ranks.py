"""Engines of several ranks give the tokens of one process, refuse what they cannot share, and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine import files
from glassengine.engine.manifest import read_manifest
from glassengine.engine.run.load import Children, ParallelEngine
from glassengine.engine.run.member import part_of
from glassengine.errors import BackendError, UsageError
from glassengine.testing import models
from tests import children

PROMPTS = [[5 + number, 17, 200 - number, *range(30, 30 + number % 4)] for number in range(20)]


def tokens(engine: Any, prompts: list[list[int]], new: int = 8) -> list[Any]:
    return [engine.generate(input_ids=[prompt], max_new_tokens=new).token_ids for prompt in prompts]


def test_two_ranks_share_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick one of many: tokens, parts, and what happens when a rank dies."""
    monkeypatch.setattr("glassengine.starting.subprocess", children.started_as_copies(children.MODELS))
    model = models.llama(num_hidden_layers=1)
    sites = ["model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"]
    options: dict[str, Any] = {"backend": "eager", "max_seq_len": 32, "add_output": sites}
    engine = glass.build(model, tmp_path / "two", tensor_parallel=2, **options)
    assert isinstance(engine, ParallelEngine) and engine.manifest.mesh == {"tensor": 2, "pipeline": 1}
    ids = torch.tensor(PROMPTS[:1])
    with glass.record(model, tmp_path / "model", sites=sites):
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
    got = engine.generate(input_ids=PROMPTS[:1], max_new_tokens=4, record=tmp_path / "run").token_ids[0]
    assert list(got) == expected[: len(got)]
    # Each has recorded what it made: its heads, and what all of them have.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank0", "rank1"]
    assert glass.open(tmp_path / "run/rank1").tensor(sites[1], 0, 1).shape[-1] == 32
    found = glass.compare(tmp_path / "model", tmp_path / "run")
    assert found.ok and found.counts["compared"] == 8 and found.coverage == 1, found.not_ok_because
    # A rank has its part of the weights and no more; together they are the model's.
    part = files.load_weights(part_of(tmp_path / "two", 1) / files.WEIGHTS)
    whole = model.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(part[f"user.{name}"], whole[name][32:])
    assert torch.equal(engine.program.exported.state_dict[f"user.{name}"], whole[name])
    ranks = engine.ranks
    assert isinstance(ranks, Children)
    ranks._processes[1].kill()
    with pytest.raises(BackendError, match="rank 1 of the engine ended") as raised:
        tokens(engine, PROMPTS[:1])
    assert "killed by signal 9" in str(raised.value.got)
    assert all(process.poll() is not None for process in ranks._processes)


def test_models_that_cannot_be_sharded_are_refused_before_the_build(tmp_path: Path) -> None:
    def build(model: Any, **options: Any) -> Any:
        return glass.build(model, tmp_path / "none", **{"backend": "eager", **options})

    with pytest.raises(UsageError, match="4 attention heads cannot be shared by 3 ranks"):
        build(models.llama(num_hidden_layers=1), tensor_parallel=3)
    with pytest.raises(UsageError, match="invalid --tensor-parallel"):
        build(models.llama(num_hidden_layers=1), tensor_parallel=0)
    with pytest.raises(UsageError, match="--artifacts is not possible"):
        build(models.llama(num_hidden_layers=1), tensor_parallel=2, artifacts=tmp_path / "artifacts")
    with pytest.raises(UsageError, match="only decoder-only language models"):
        build(torch.nn.Linear(4, 4), tensor_parallel=2, inputs={"input": torch.ones(1, 4)})
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4 stages need as many layers"):
        glass.build(models.llama(), tmp_path / "none", backend="eager", pipeline_parallel=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt2"])
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def test_tokens_of_one_process(family: str, mesh: tuple[int, int], tmp_path: Path) -> None:
    model = models.CAUSAL_LMS[family]()
    one = glass.build(model, tmp_path / "one", backend="eager", max_seq_len=64)
    many = glass.build(
        model, tmp_path / "many", backend="eager", tensor_parallel=mesh[0], pipeline_parallel=mesh[1], max_seq_len=64
    )
    assert tokens(many, PROMPTS) == tokens(one, PROMPTS)
    batch: dict[str, Any] = {"input_ids": PROMPTS[:3], "max_new_tokens": 6}
    sampled = {"do_sample": True, "seed": 5, "temperature": 1.5}
    assert many.generate(**batch, **sampled).token_ids == one.generate(**batch, **sampled).token_ids
    assert many.generate(**batch, prefill_chunk=2).token_ids == one.generate(**batch, prefill_chunk=2).token_ids


@pytest.mark.slow
def test_collectives_in_compiled_code(tmp_path: Path) -> None:
    model = models.llama(num_hidden_layers=1)
    one = glass.build(model, tmp_path / "one", backend="eager", max_seq_len=64)
    many = glass.build(model, tmp_path / "many", backend="inductor", tensor_parallel=2, max_seq_len=64)
    assert tokens(many, PROMPTS) == tokens(one, PROMPTS)


@pytest.mark.slow
def test_the_same_lines_under_torchrun(tmp_path: Path) -> None:
    engine = glass.build(models.llama(), tmp_path / "two", backend="eager", tensor_parallel=2, max_seq_len=32)
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS[0]))
    line = ["run", str(tmp_path / "two"), "--input-ids", str(tmp_path / "ids.json"), "--max-new-tokens", "6", "-q"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "glassengine", *line]
    alone = [sys.executable, "-m", "glassengine", *line]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seen = [
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
        for command in (torchrun, alone)
    ]
    expected = " ".join(map(str, tokens(engine, PROMPTS[:1], 6)[0][0]))
    assert [text.strip() for text in seen] == [expected, expected]


@pytest.mark.slow
def test_a_checked_engine_of_ranks(tmp_path: Path) -> None:
    result = glass.check(models.llama(), backend="eager", tensor_parallel=2, steps=1)
    assert result.ok
    assert [level.name for level in result.levels] == ["program", "ranks", "release"]
    engine = tmp_path / "two"
    glass.build(models.llama(), engine, backend="eager", tensor_parallel=2, max_seq_len=64)
    assert read_manifest(engine).manifest.placements["user.lm_head.weight"].axis == 0
    assert glass.check(models.llama(), candidate=engine, steps=1).ok
