"""Beside the lazy tensors of torch itself, which still work on a CPU: the same values, and graphs that run as often."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from tests import children

_CHILD = """
import json, sys
import torch._lazy, torch._lazy.metrics, torch._lazy.ts_backend
from tests.plugins.lazy.end_to_end.test_lazy_device_of_torch import program

torch._lazy.ts_backend.init()
count = lambda: torch._lazy.metrics.counter_value("UncachedCompile") or 0
print(json.dumps(program(torch.device("lazy"), torch._lazy.mark_step, count)))
"""


def program(device: torch.device, mark_step: Callable[[], Any], compilations: Callable[[], int]) -> dict[str, Any]:
    """Train, write to views, print; and say how often something was compiled on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    images, labels = torch.randn(6, 5, 1, 8, 8), torch.randint(0, 10, (6, 5))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, compiled = [], []
    for image, label in zip(images, labels, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(image.to(device)), label.to(device))
        loss.backward()
        optimizer.step()
        mark_step()
        before = compilations()
        losses.append(loss.item())
        compiled.append(compilations())
        assert compiled[-1] == before  # the step has computed it
    whole = torch.arange(12.0).reshape(3, 4).to(device)
    row = whole[1]
    row.mul_(2)
    whole[:, 0] += 1
    turned = whole.t().clone()
    turned[0] = 7
    values = [tensor.cpu().tolist() for tensor in (whole, row, turned)]
    first = model[4](torch.ones(2, 36).to(device))
    second = first * 2
    prints = []
    for tensor in (second, first, first):
        before = compilations()
        str(tensor.detach().cpu())
        prints.append(compilations() - before)
    return {
        "losses": losses,
        "new": [after - before for before, after in itertools.pairwise(compiled)],
        "values": values,
        "prints": prints,
    }


def test_a_program_does_what_it_does_on_the_lazy_device_of_torch() -> None:
    done = children.run([sys.executable, "-c", _CHILD], timeout=120, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    glass.metrics.reset()
    ours = program(
        glass.lazy.device(), glass.mark_step, lambda: glass.metrics.current().counters.get("UncachedCompile", 0)
    )
    assert ours["values"] == theirs["values"]
    # Its back-end is TorchScript, which sums in another order.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    # The state of the optimizer makes the second step another graph; each print is a graph of its own.
    assert ours["new"] == theirs["new"] == [1, 0, 0, 0, 0]
    assert ours["prints"] == [*theirs["prints"][:2], 0] == [1, 1, 0]
