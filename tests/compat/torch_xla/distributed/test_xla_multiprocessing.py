"""`xmp`: a run of one process."""

from __future__ import annotations

import pytest
import torch

import glassengine as glass
import glassengine.compat.torch_xla.distributed.xla_multiprocessing as xmp


def test_a_run_is_this_process(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert xmp.spawn(lambda index, one: (index, one), args=("x",), nprocs=1, start_method="fork") == (0, "x")
    assert glass.compat.torch_xla.launch(lambda index: index) == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert xmp.spawn(lambda index: index) == 3
    for asked in ({"nprocs": 8}, {"join": False}):
        with pytest.raises(glass.GlassError, match="hint: torchrun"):
            xmp.spawn(print, **asked)  # type: ignore[arg-type]


def test_models_are_moved(device: torch.device) -> None:
    model = xmp.MpSerialExecutor().run(lambda: torch.nn.Linear(1, 1))
    assert glass.lazy.is_lazy(xmp.MpModelWrapper(model).to(device))


def test_a_process_group_of_lazy_tensors_is_refused() -> None:
    for method in ("xla://", "tcp://127.0.0.1:1"):
        with pytest.raises(glass.GlassError, match="gloo"):
            torch.distributed.init_process_group("xla", init_method=method, world_size=1, rank=0)
