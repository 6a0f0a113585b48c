"""Backwards that come after the forwards of other steps, as in a pipeline: gradients belong to their own step."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.recording.reader import Recording

BATCHES = [torch.randn(3, 4, generator=torch.Generator().manual_seed(number)) for number in range(6)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def recorded(path: Path, ahead: int, microbatches: int) -> Recording:
    """Run `ahead` forwards before the first backward, as a stage of a pipeline does."""
    model = net()
    waiting: list[Tensor] = []
    with glass.record(model, path, gradients=True, microbatches=microbatches):
        for batch in BATCHES:
            waiting.append(model(batch).square().sum())
            if len(waiting) == ahead:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
    return Recording.open(path)


@pytest.mark.parametrize("ahead", [2, 3])
def test_gradients_are_those_of_their_own_forward(tmp_path: Path, ahead: int, caplog: pytest.LogCaptureFixture) -> None:
    recorded(tmp_path / "one", 1, 1)
    with caplog.at_level(logging.WARNING):
        found = recorded(tmp_path / "many", ahead, ahead)
    assert "num_late" not in found.metadata and not caplog.records
    assert [entry.step for entry in found.entries] == sorted(entry.step for entry in found.entries)
    result = glass.compare(tmp_path / "one", tmp_path / "many")
    assert (result.verdict, result.coverage, result.counts["unmatched_candidate"]) == ("identical", 1.0, 0)
    assert sum(pair.site.endswith(":grad") for pair in result.pairs) == 4 * len(BATCHES)


def test_backwards_beyond_the_open_steps_are_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = recorded(tmp_path / "many", 3, 2)
    assert found.metadata["num_late"] and "microbatches=N" in caplog.text
    with pytest.raises(UsageError, match="microbatches"):
        glass.record(net(), tmp_path / "none", microbatches=2)


def test_gradients_that_are_added_up_in_another_order_or_by_the_schedule_itself(tmp_path: Path) -> None:
    recorded(tmp_path / "one", 1, 1)
    for name, wrong in (("right", 1.0), ("wrong", 1.1)):
        model = net()
        weight = model[2].weight
        assert isinstance(weight, Tensor)
        with glass.record(model, tmp_path / name, gradients=True, microbatches=3):
            for start in (0, 3):
                losses = [model(batch).square().sum() for batch in BATCHES[start : start + 3]]
                for loss in reversed(losses):
                    others = [one for one in model.parameters() if one is not weight]
                    # As zero-bubble schedules do: the gradient is asked for, and added to the parameter afterwards.
                    (gradient,) = torch.autograd.grad(loss, [weight], retain_graph=True)
                    loss.backward(inputs=others)
                    weight.grad = gradient * wrong if weight.grad is None else weight.grad + gradient * wrong
    right, wrong_one = (glass.compare(tmp_path / "one", tmp_path / name) for name in ("right", "wrong"))
    assert (right.ok, right.coverage, right.counts["unmatched_candidate"]) == (True, 1.0, 0)
    assert any("in another order" in str(pair.reason) for pair in right.pairs)
    assert not wrong_one.ok and wrong_one.first_divergence.site == "2.weight:grad"
