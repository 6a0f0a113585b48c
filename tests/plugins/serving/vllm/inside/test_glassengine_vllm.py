"""The plug-in writes what modules compute: here with a model runner that is made of the same parts as vLLM's."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from glassengine.plugins.serving.requests import Forwards
from glassengine.plugins.serving.vllm.candidate import INSIDE
from glassengine.recording.formats.folders import ServerFolder
from tests.modules import module_at


def plugin() -> Any:
    return module_at(INSIDE / "glassengine_vllm.py")


class Attention(nn.Module):
    layer_name, impl = "attn", None

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query.add_(key)  # in place, as kernels do


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.norm = nn.Embedding(16, 4), Attention(), nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        found: torch.Tensor = self.norm(self.attn(x, x + 1))
        return found


def test_a_forward_is_written_with_the_rows_of_its_requests(tmp_path: Path) -> None:
    made = plugin()
    recorder = made.Recorder(tmp_path / "rank0", most=2)
    model = Model().eval()
    recorder.attach(model, {"architecture": "Model"})
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["r1", "r2"], num_computed_tokens_cpu=np.array([2, 0, 0])),
        query_start_loc=SimpleNamespace(np=np.array([0, 1, 4])),
        requests={"r1": SimpleNamespace(prompt_token_ids=[5, 6]), "r2": SimpleNamespace(prompt_token_ids=[7, 8, 9])},
    )
    ids = torch.tensor([4, 7, 8, 9])
    with torch.no_grad():
        for _ in range(3):
            recorder.begin(made.requests_of(runner))
            recorder.keep("in.input_ids", ids)
            model(ids)
            recorder.end()
        model(ids)  # of nobody: nothing is kept
    source = ServerFolder(tmp_path)
    assert {one.step for one in source.entries} == {0, 1}, "no more forwards than asked for"
    held = {one.site: source.tensor(one) for one in source.entries if one.step == 0}
    embedded = model.embed(ids).detach()
    assert torch.equal(held["attn/in.0"], embedded), "what an attention is given is kept before it is overwritten"
    torch.testing.assert_close(held["attn/out.0"], 2 * embedded + 1)
    assert {"norm/in.0", "norm/out.0"} <= held.keys()
    parts = Forwards(source).parts[0]
    assert [(one.name, one.start, one.length) for one in parts] == [("r1", 2, 1), ("r2", 0, 3)]


def test_tokens_are_forced_at_their_place() -> None:
    recorder = plugin().Recorder(Path())
    recorder.following = {(5, 6): [11, 12]}
    recorder.begin([{"name": "r", "prompt": [5, 6], "start": 1, "length": 1}])
    sampled = torch.tensor([[99]])
    recorder.forced(sampled)
    assert sampled.tolist() == [[11]]
    recorder.begin([{"name": "r", "prompt": [5, 6], "start": 4, "length": 1}])
    recorder.forced(sampled)
    assert sampled.tolist() == [[11]], "behind the tokens that are to follow the engine picks its own"


def test_the_folder_has_the_entry_point_and_needs_torch_alone() -> None:
    found = importlib.metadata.distributions(path=[str(INSIDE)])
    points = [point for one in found for point in one.entry_points if point.group == "vllm.general_plugins"]
    assert [point.value for point in points] == ["glassengine_vllm:register"]
    code = "import sys, glassengine_vllm as g; g.register(); sys.exit('glassengine' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=INSIDE, check=True)
