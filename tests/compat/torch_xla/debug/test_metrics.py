"""`met`: counters and metrics by the functions of PyTorch/XLA."""

from __future__ import annotations

import torch

import glassengine.compat.torch_xla.core.xla_model as xm
import glassengine.compat.torch_xla.debug.metrics as met


def test_counters_and_metrics(device: torch.device) -> None:
    value = torch.ones(2, 2).to(device)
    made = value @ value
    xm.mark_step()
    assert met.counter_value("MarkStep") == met.counter_value("lazy::mm") == 1
    assert met.counter_value("no such counter") is None and met.metric_data("no such metric") is None
    assert {"MarkStep", "UncachedCompile", "CreateTensor"} <= set(met.counter_names())
    assert {"CompileTime", "ExecuteTime", "TensorsGraphSize", "TransferToDeviceTime"} <= set(met.metric_names())
    data = met.metric_data("ExecuteTime")
    assert data is not None
    total, accumulator, samples = data
    ((when, took),) = samples
    assert total == 1 and accumulator == took > 0 and 1e9 < when < 1e11
    assert made.nonzero().shape == (4, 2)
    assert met.executed_fallback_ops() == ["aten::nonzero"]


def test_a_short_report_has_what_is_asked_for_and_what_was_not_recorded(device: torch.device) -> None:
    (torch.ones(2).to(device) + 1).nonzero()
    xm.mark_step()
    short = met.short_metrics_report()
    assert "Metric: ExecuteTime" in short and "Counter: MarkStep" in short and "Counter: aten::nonzero" in short
    assert "TensorsGraphSize" not in short and "CreateTensor" not in short
    other = met.short_metrics_report(counter_names=["CreateTensor"], metric_names=["TensorsGraphSize"])
    assert "Metric: TensorsGraphSize" in other and "ExecuteTime" not in other
    assert "Counter: CreateTensor" in other and "MarkStep" not in other
    assert met.metrics_report().startswith("Metric: CompileTime\n  TotalSamples: ")


def test_clearing_one_kind_keeps_the_other(device: torch.device) -> None:
    (torch.ones(2).to(device) + 1).tolist()
    met.clear_counters()
    assert met.counter_names() == [] and met.metric_names()
    xm.mark_step()
    met.clear_metrics()
    assert met.counter_names() == ["MarkStep"] and met.metric_names() == []
    met.clear_all()
    assert met.metrics_report() == ""
