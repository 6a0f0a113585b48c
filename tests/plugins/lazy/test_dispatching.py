"""What becomes of operations that write, return numbers, or cannot be recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import glassengine as glass


def test_ops_that_cannot_be_recorded_run_at_once_and_are_named(device: torch.device) -> None:
    lazy = torch.tensor([0.0, 1.0, 2.0]).to(device)
    found = (lazy + 1).nonzero()
    assert found.tolist() == [[0], [1], [2]] and glass.lazy.is_lazy(found)
    assert lazy[lazy > 0].tolist() == [1.0, 2.0]
    assert torch.unique(lazy * 0).tolist() == [0.0]
    counters = glass.metrics.current().counters
    assert counters["aten::nonzero"] == 1 and counters["aten::index"] == 1
    (fallback,) = [one for one in glass.lazy.fallbacks() if one.op == "aten::nonzero" and "test_disp" in one.where]
    assert "depends on values" in fallback.reason and "test_dispatching.py:" in str(fallback)


def test_errors_are_those_of_aten(device: torch.device) -> None:
    lazy = torch.ones(2, 3).to(device)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        lazy @ lazy
    with pytest.raises(RuntimeError, match="can't be cast to"):
        torch.ones(2, dtype=torch.int64).to(device).add_(0.5)
    with pytest.raises(IndexError, match="Dimension out of range"):
        lazy.sum(5)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2).to(device))


def test_writes(device: torch.device) -> None:
    def run(where: torch.device) -> list[torch.Tensor]:
        one = torch.arange(6.0).view(2, 3).to(where)
        half = torch.zeros(2, 3, dtype=torch.float16).to(where)
        half.add_(one)
        out = torch.empty(2, 3).to(where)
        torch.add(one, one, out=out)
        lists = [one.clone(), one.clone() * 2]
        torch._foreach_mul_(lists, 3.0)  # type: ignore[attr-defined]
        one.index_put_((torch.tensor([0]).to(where),), torch.tensor(9.0).to(where))
        one.masked_fill_(one == 5, -1).relu_()
        one[:, 1].zero_()
        columns = torch.zeros(3, 2).to(where).t()
        columns.copy_(one)
        columns += 1
        cache = torch.zeros(1, 4, 2).to(where)
        cache[:, 1:3] = torch.ones(1, 2, 2).to(where)
        cache.index_copy_(1, torch.tensor([3]).to(where), torch.full((1, 1, 2), 5.0).to(where))
        values, indices = torch.empty(2).to(where), torch.empty(2, dtype=torch.int64).to(where)
        torch.max(one, 1, out=(values, indices))
        return [one, half, out, *lists, columns, cache, values, indices]

    for ours, theirs in zip(run(torch.device("cpu")), run(device), strict=True):
        assert torch.equal(theirs.cpu(), ours) and theirs.stride() == ours.stride() and theirs.dtype == ours.dtype


def test_plain_tensors_are_written_with_lazy_ones(device: torch.device) -> None:
    plain = torch.zeros(2)
    plain.add_(torch.ones(2).to(device))
    plain[0] = torch.tensor(5.0).to(device)
    assert type(plain) is torch.Tensor and plain.tolist() == [5.0, 1.0]


def test_statistics_of_a_batch_normalization(device: torch.device) -> None:
    given = torch.randn(8, 3, 4, 4)
    plain, lazy = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to(device)
    for _ in range(2):
        assert torch.equal(lazy(given.to(device)).cpu(), plain(given))
    assert all(map(torch.equal, plain.state_dict().values(), (one.cpu() for one in lazy.state_dict().values())))
    assert torch.equal(lazy.eval()(given.to(device)).cpu(), plain.eval()(given))


def test_pending_tensors_are_shown_with_their_lines(device: torch.device) -> None:
    lazy = torch.ones(2, 2).to(device)
    product = lazy @ lazy
    total = product.sum()
    (first, second) = glass.lazy.pending()
    assert (first.op, first.shape, second.op) == ("aten.mm.default", (2, 2), "aten.sum.default")
    assert "test_dispatching.py:" in str(first)
    text = glass.lazy.text(total)
    assert "aten.mm.default" in text and "product = lazy @ lazy" in text
    nodes = glass.lazy.graph([total, product]).graph.nodes
    assert [str(node.target) for node in nodes if node.op == "call_function"] == ["aten.mm.default", "aten.sum.default"]
    glass.mark_step()
    assert glass.lazy.text(total) == "nothing is pending" and glass.lazy.pending() == ()
    with pytest.raises(glass.GlassError, match="no lazy tensor"):
        glass.lazy.text(torch.ones(1))


@pytest.mark.parametrize("make", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow), nn.RNN])
def test_recurrent_modules_train_as_in_eager_code(make: Callable[..., nn.Module]) -> None:
    """An LSTM's kernel asks whether gradients are recorded; a GRU writes to parts of one tensor, in its layout."""
    torch.manual_seed(0)
    module = make(8, 4, num_layers=2, batch_first=True, bidirectional=True)
    x = torch.randn(8, 8, 8)
    found = []
    for given, one in ((x, copy.deepcopy(module)), (glass.lazy.tensor(x), glass.lazy.module(copy.deepcopy(module)))):
        result = one(given)[0]
        result.square().sum().backward()
        found.append([result.detach().cpu(), *(parameter.grad.cpu() for parameter in one.parameters())])
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


def test_a_write_to_an_unsafe_chunk_is_one_to_the_whole() -> None:
    x = glass.lazy.tensor(torch.zeros(2, 6))
    x.unsafe_chunk(3, 1)[1].fill_(1.0)
    assert x.cpu().tolist() == [[0, 0, 1, 1, 0, 0]] * 2
