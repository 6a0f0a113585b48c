"""Forwards that are run for the shapes of their results alone are no steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from glassengine.capture.runs.record import record
from glassengine.compare import compare
from glassengine.recording.read.reader import Recording


@pytest.mark.parametrize("part", [False, True])
def test_f13_forwards_without_values_are_no_steps(part: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    with record(model, tmp_path / "r"):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            (model[0] if part else model)(mode.from_tensor(x))
        y = model(x)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0] and torch.equal(opened.tensor(".", 0), y)
    assert opened.metadata.get("num_late") is None and opened.sites(0)[0] == ".:in[0]"


def test_a_model_that_has_no_values_itself_is_recorded_by_its_shapes(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, device="meta")
    with record(model, tmp_path / "r"):
        model(torch.ones(2, 4, device="meta"))
    assert {item.site for item in Recording.open(tmp_path / "r").left_out} == {".:in[0]", "."}


PIPELINE = """
import sys, torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import glassengine as glass

path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x

whole = Net()
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
net = Net()
for name in ("01", "23")[1 - rank]:
    del net.layers[name]
stage = PipelineStage(net, rank, 2, torch.device("cpu"))
with torch.no_grad(), glass.record(net, path + "/ranks"):
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step()
if rank == 0:
    with torch.no_grad(), glass.record(whole, path + "/one"):
        for _ in range(2):
            for row in x.chunk(2):
                whole(row)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_f13_stages_of_torchs_own_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "stages.py"
    script.write_text(PIPELINE)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(tmp_path / "store"), str(rank)],
            env=one_thread, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    assert Recording.open(tmp_path / "ranks" / "rank0").steps == [0, 1, 2, 3]
    result = compare(tmp_path / "one", tmp_path / "ranks")
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
