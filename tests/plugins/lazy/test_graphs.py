"""Taps of lazy tensors, and recordings of lazy code: outputs of the graphs that run anyway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from glassengine.capture.observed_call import modules_being_called
from glassengine.errors import UsageError
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.plugins.lazy.running import settings

Count = Callable[[str], int]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = glass.tap("inter", nn.functional.gelu(self.fc(x)))
        h.mul_(2)  # the tap keeps what it was before
        glass.tap("size", torch.linalg.vector_norm(h))
        return x + self.norm(h)


class Net(nn.Module):
    again = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return glass.tap("logits", self.head(self.drop(x)))


def train(net: nn.Module, where: torch.device, path: Path, steps: int = 3) -> None:
    net.to(where)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for _ in range(steps):
            given = torch.randn(4, 8).to(where).requires_grad_()
            loss = nn.functional.cross_entropy(net(given), torch.randint(0, 3, (4,)).to(where))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            glass.mark_step()


def require_equal(one: Path, other: Path) -> list[str]:
    ours, theirs = glass.open(one), glass.open(other)
    names = [(entry.site, entry.step) for entry in ours.entries]
    assert names == [(entry.site, entry.step) for entry in theirs.entries]
    for left, right in zip(ours.entries, theirs.entries, strict=True):
        assert torch.equal(ours.tensor(left), theirs.tensor(right)), left.site
    return [site for site, _ in names]


def executions() -> int:
    return sum(variant.executable.num_executions for graph in settings.graphs.values() for variant in graph.variants)


@pytest.mark.parametrize("again", [False, True])
def test_training_is_recorded_as_that_of_eager_code_in_its_own_graphs(
    device: torch.device, tmp_path: Path, counters: Count, again: bool
) -> None:
    net = Net()
    net.again = again
    lazy = copy.deepcopy(net)
    train(net, torch.device("cpu"), tmp_path / "eager")
    train(lazy, device, tmp_path / "lazy")
    sites = require_equal(tmp_path / "eager", tmp_path / "lazy")
    assert {"layers.1.inter", "layers.1.inter:grad_out", "layers.0.size", "logits", "head.weight:grad"} <= set(sites)
    assert {"head.weight:state.exp_avg", "layers.0.fc:in[0]", "head:out"} & set(sites)
    # A graph for each step, and none for what is recorded.
    assert executions() == 3 and counters("TensorRead") == 0 and counters("UncachedCompile") == 2


def test_pending_tensors_run_at_the_end_and_are_counted(device: torch.device, tmp_path: Path, counters: Count) -> None:
    net = Net().eval()
    given = torch.ones(2, 8)
    with glass.record(net, tmp_path / "eager"):
        net(given)
    net.to(device)
    with glass.record(net, tmp_path / "lazy") as recorder:
        result = net(given.to(device))
        recorder.wait()
        assert executions() == 1
        net(given.to(device))
    assert executions() == 2 and counters("TensorRead") == 2
    assert any("the end of glass.record at" in name for name in glass.metrics.current().counters)
    assert glass.lazy.text(result) == "nothing is pending"
    eager, lazy = glass.open(tmp_path / "eager"), glass.open(tmp_path / "lazy")
    for entry in eager.entries:
        for step in (0, 1):
            (other,) = [one for one in lazy.entries if (one.site, one.step) == (entry.site, step)]
            assert torch.equal(eager.tensor(entry), lazy.tensor(other))


def test_statistics_tokens_and_plain_tensors_among_lazy_ones(device: torch.device, tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.host = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.words(input_ids)
            mask = glass.tap("mask", torch.ones(3))
            glass.tap("x", x)
            mask.zero_()  # whoever holds it may write to it while what came before it is pending
            return x + mask[0]

    net = Words()
    for name, where in (("eager", torch.device("cpu")), ("lazy", device)):
        net.to(where)
        with glass.record(net, tmp_path / name, values=["mask"]):
            net(torch.tensor([[1, 2]]).to(where) + 1)
    one, other = (glass.open(tmp_path / name) for name in ("eager", "lazy"))
    assert one.metadata["token_ids"] == other.metadata["token_ids"]
    assert [item.site for item in one.left_out] == [item.site for item in other.left_out] != []
    assert [item.statistics for item in one.left_out] == [item.statistics for item in other.left_out]
    (mask,) = other.entries
    assert other.tensor(mask).tolist() == [1.0] * 3


def test_a_tap_names_an_output_of_the_graph(device: torch.device, tmp_path: Path) -> None:
    net = Net().eval().to(device)
    with glass.snapshots.take(tmp_path, contents="inputs outputs"):
        result = net(torch.ones(2, 8).to(device))
        glass.mark_step()
    (found,) = tmp_path.iterdir()
    snapshot = Snapshot.open(found)
    assert {"logits", "layers.0.inter", "layers.1.inter"} <= set(snapshot.output_names)
    assert torch.equal(torch.as_tensor(snapshot.output("logits")), result.detach().cpu())
    assert glass.replay(found).ok


def test_a_tap_returns_its_argument_and_needs_a_name(device: torch.device) -> None:
    lazy = torch.ones(2).to(device)
    assert glass.tap("inter", lazy) is lazy
    with pytest.raises(UsageError, match="Python identifier"):
        glass.tap("no name", lazy)
    assert list(modules_being_called()) == []


def test_taps_by_name(device: torch.device) -> None:
    net = Net().eval()
    given = torch.ones(2, 8)
    eager = dict(glass.compat.named_network_outputs(net, given))
    lazy = dict(glass.compat.named_network_outputs(net.to(device), given.to(device)))
    assert list(eager) == list(lazy)
    assert all(torch.equal(value, lazy[name].cpu()) for name, value in eager.items())


def test_each_operation_alone(device: torch.device, tmp_path: Path) -> None:
    net = Net()
    lazy = copy.deepcopy(net)
    train(net, torch.device("cpu"), tmp_path / "eager", 1)
    with glass.lazy.mode("eager_debug", backend="eager"):
        train(lazy, device, tmp_path / "lazy", 1)
    require_equal(tmp_path / "eager", tmp_path / "lazy")
