"""`xp`: spans, steps and profiles by the names of PyTorch/XLA."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import glassengine as glass
import glassengine.compat.torch_xla.debug.profiler as xp


def test_spans_and_steps_are_in_a_profile(device: torch.device, tmp_path: Path) -> None:
    xp.start_trace(tmp_path)
    with pytest.raises(glass.GlassError, match=r"hint: xp\.stop_trace"):
        xp.start_trace(tmp_path)
    for number in range(2):
        with xp.StepTrace("train", step_num=number), xp.Trace("model_build"):
            torch.ones(2).to(device) + 1
    xp.stop_trace()
    with pytest.raises(glass.GlassError, match="no profile is being taken"):
        xp.stop_trace()
    assert glass.lazy.pending() == ()
    data = glass.profiler.read(tmp_path)[0].data
    assert {"train step_num=0", "train step_num=1", "model_build"} <= set(re.findall(r'"([^"]+)"', json.dumps(data)))
    assert data["num_steps"] == 2


def test_an_error_in_a_step_is_raised_and_ends_none(device: torch.device) -> None:
    before = glass.compat.current_step()
    with pytest.raises(ValueError, match="planted"), xp.StepTrace("train"):
        raise ValueError("planted")
    assert glass.compat.current_step() == before


def test_a_server_is_for_the_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = xp.start_server(0)
    assert server is not None
    server.stop()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert xp.start_server(0) is None
    with pytest.raises(glass.GlassError, match=r"profiler\.trace_detached is not available\n.*glass profile --capture"):
        xp.trace_detached("localhost:9012", "logs")
