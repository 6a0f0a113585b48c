"""`xp`: spans, steps and profiles by the names of PyTorch/XLA."""

from __future__ import annotations

import json
import re
import threading
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


def test_a_profile_is_asked_of_a_server(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    server = xp.start_server(0)
    assert server is not None
    address = f"localhost:{server.port}"
    xp.trace_detached(address, "logs", duration_ms=300)
    (thread,) = [one for one in threading.enumerate() if one.name == "glass-trace-detached"]
    while thread.is_alive():
        with xp.StepTrace("train"):
            torch.ones(2).to(device) + 1
        thread.join(0.01)
    assert glass.profiler.read(tmp_path / "logs")[0].data["num_steps"] > 1
    server.stop()
    with pytest.raises(glass.GlassError, match="profile server"):
        xp.trace(address, "logs")
    xp.trace_detached(address, "logs")
    for thread in [one for one in threading.enumerate() if one.name == "glass-trace-detached"]:
        thread.join()
    assert "no profile was taken: no profile server of this user" in caplog.text
