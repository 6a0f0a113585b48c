"""Lines and summaries by which the examples of PyTorch/XLA show their progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.compat.torch_xla.test import test_utils


class Writer:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add_scalar(self, name: str, value: float, step: int | None) -> None:
        self.found[name] = (value, step)


def test_lines_are_those_of_the_examples(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer()
    test_utils.print_training_update(device, 20, 0.5, 10.0, 9.0, 1, summary_writer=writer)
    test_utils.print_test_update(device, 98.76, epoch=1)
    training, test = capsys.readouterr().out.splitlines()
    assert training.startswith(
        "| Training Device=lazy:0/0 Epoch=1 Step=20 Loss=0.50000 Rate=10.00 GlobalRate=9.00 Time="
    )
    assert test.startswith("| Test Device=lazy:0/0 Epoch=1 Accuracy=98.76 Time=")
    assert writer.found == {"examples/sec": (10.0, 20), "average_examples/sec": (9.0, 20)}


def test_metrics_are_written_where_there_is_a_writer(device: torch.device, tmp_path: Path) -> None:
    (torch.ones(2).to(device) + 1).nonzero()
    writer = Writer()
    for one in (None, writer):
        test_utils.write_to_summary(one, 3, {"accuracy": 1.0}, write_xla_metrics=True)
    assert writer.found["accuracy"] == (1.0, 3) and writer.found["aten_ops_sum"] == (1, 3)
    assert writer.found["UncachedCompile"] == (1, 3) and writer.found["CompileTime"][0] > 0
    assert test_utils.get_summary_writer(None) is None
    test_utils.close_summary_writer(None)
    real = test_utils.get_summary_writer(str(tmp_path))
    test_utils.write_to_summary(real, 1, {"a": 1.0})
    test_utils.close_summary_writer(real)
    assert list(tmp_path.glob("events.out.tfevents.*"))
