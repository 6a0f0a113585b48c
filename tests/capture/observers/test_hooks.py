"""Hooks on eager modules: order, call counts, and what they leave behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glassengine.capture.observers.hooks import observing

X = torch.ones(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> dict[str, torch.Tensor]:
        y = self.inner(x)
        if fail:
            raise RuntimeError("planted")
        return {"y": self.inner(y)}


EXPECTED = ["inner.0", "inner.1", "inner", "inner.0@1", "inner.1@1", "inner@1", ".:out.y"]


def test_outputs_in_order_of_execution() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        model(X)
    assert seen == EXPECTED


def test_a_forward_that_failed_leaves_no_trace_in_the_next() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        with pytest.raises(RuntimeError, match="planted"):
            model(X, fail=True)
        seen.clear()
        model.inner(X)
        assert seen == []
        model(X)
    assert seen == EXPECTED


def test_modules_that_run_outside_of_the_model_are_not_observed() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        model.inner(X)
    assert seen == []


def test_the_hooks_are_gone_afterwards() -> None:
    model, seen = Model(), []
    with pytest.raises(RuntimeError, match="planted"), observing(model, lambda site, tensor: seen.append(site)):
        model(X, fail=True)
    seen.clear()
    model(X)
    assert seen == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_model_computes_what_it_computes() -> None:
    model = Model()
    expected = model(X)["y"]
    with observing(model, lambda site, tensor: None):
        assert torch.equal(model(X)["y"], expected)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_parts_are_seen_from_outside_and_stay_whole(how: str) -> None:
    torch._dynamo.reset()
    model, seen, graphs = Model(), [], []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    if how == "wrapped":
        model.inner = torch.compile(model.inner, backend=backend)  # type: ignore[assignment]
    else:
        model.inner.compile(backend=backend)
    with torch.no_grad(), observing(model, lambda site, tensor: seen.append(site)):
        model(X)
    assert seen == ["inner", "inner@1", ".:out.y"]
    assert len(graphs) == (how == "wrapped")  # nothing of torch's own containers is compiled in place
