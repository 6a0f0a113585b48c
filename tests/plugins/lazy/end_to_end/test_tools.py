"""The tools of the executable core on graphs of lazy tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.executable.snapshot.nonfinite import NonFiniteError

Count = Callable[[str], int]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, where: torch.device) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.ones(4, 8).to(where)), torch.tensor([0, 1, 2, 0]).to(where))
    loss.backward()
    optimizer.step()
    glass.mark_step()
    return loss


def trained(where: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).to(where)
    return model, torch.optim.AdamW(model.parameters())


def test_the_first_nonfinite_op_is_named_with_its_line(device: torch.device, tmp_path: Path) -> None:
    with glass.snapshots.take(tmp_path, on="nonfinite"):
        root = torch.log(torch.zeros(3).to(device) - 1)
        (root * 2).sum()
        with pytest.raises(NonFiniteError, match=r"aten\.log\.default \(.*test_tools\.py:\d+: root = torch\.log"):
            glass.mark_step()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_step_of_an_optimizer_is_replayed(device: torch.device, tmp_path: Path) -> None:
    """Numbers are inputs of its graph: they are read from the snapshot, and are constants where it is judged."""
    made = trained(device)
    with glass.snapshots.take(tmp_path, contents="inputs outputs"):
        for _ in range(2):
            step(*made, device)
    first, second = sorted(tmp_path.iterdir())
    for snapshot in (first, second):
        replayed = glass.replay(snapshot)
        assert replayed.ok and all(output.same_bits for output in replayed.outputs)
    judged = glass.replay(second, compare=True)
    assert judged.ok and judged.comparison is not None and judged.comparison.counts["compared"] > 50


@pytest.mark.slow
def test_a_step_is_replayed_and_bisected_on_another_backend(device: torch.device, tmp_path: Path) -> None:
    made = trained(device)
    with glass.snapshots.take(tmp_path, contents="inputs outputs"):
        step(*made, device)
    (snapshot,) = tmp_path.iterdir()
    assert glass.replay(snapshot, backend="inductor").ok
    assert glass.replay(snapshot, backend="inductor", bisect=True).ok


def test_why_it_compiled_again_names_the_line(device: torch.device) -> None:
    for rows, start in ((4, 2), (4, 3), (5, 3)):
        given = torch.ones(rows, 8).to(device)
        part = given.reshape(-1)[start:] * 2.5
        glass.mark_step()
    assert part.shape == (37,)
    *_, constant, size = map(str, glass.metrics.compilations())  # of the whole process
    assert "part = given.reshape(-1)[start:] * 2.5" in constant and "aten.slice.Tensor(" in constant
    assert "shape of input0" in size and "test_tools.py:" in size and "(4, 8) -> (5, 8)" in size


def test_fallbacks_are_counted_with_their_line(device: torch.device, counters: Count) -> None:
    given = torch.ones(3).to(device)
    for _ in range(2):
        given.nonzero()
    assert counters("aten::nonzero") == 2
    names = [name for name in glass.metrics.current().counters if name.startswith("Fallback::aten::nonzero at ")]
    assert len(names) == 1 and "test_tools.py:" in names[0]
