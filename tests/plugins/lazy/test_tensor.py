"""What a lazy tensor is to code that knows nothing of it."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import UsageError


def test_a_lazy_tensor_looks_like_any_tensor(device: torch.device) -> None:
    plain = torch.randn(2, 3)
    lazy = plain.to(device)
    assert lazy.device == device and device.type == "lazy" and not lazy.is_cpu
    assert repr(lazy) == repr(plain)[:-1] + ", device='lazy:0')"
    assert f"{lazy[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    assert lazy.tolist() == plain.tolist() and np.array_equal(np.asarray(lazy), plain.numpy())
    assert lazy.to(device) is lazy and type(lazy.cpu()) is torch.Tensor
    assert [row.sum().item() for row in lazy] == [row.sum().item() for row in plain]
    assert torch.from_dlpack(lazy).tolist() == plain.tolist()  # type: ignore[attr-defined]
    assert bool((lazy == lazy).all()) and int(lazy.argmax()) == int(plain.argmax())
    assert "grad_fn=<MulBackward0>" in repr(lazy.requires_grad_() * 2)
    with pytest.raises(UsageError, match="no storage"):
        lazy.untyped_storage()


@pytest.mark.parametrize(
    "arguments",
    [(torch.float64,), ("cpu", torch.float16), (torch.int32, False, True), (torch.zeros(1, dtype=torch.float64),)],
)
def test_every_way_of_moving(device: torch.device, arguments: tuple[object, ...]) -> None:
    plain = torch.randn(2, 3)
    lazy = plain.to(device)
    moved, expected = lazy.to(*arguments), plain.to(*arguments)
    assert moved.dtype == expected.dtype and torch.equal(moved.cpu(), expected)
    assert lazy.to(torch.zeros(1, dtype=torch.float64).to(device)).device == device


def test_memory_formats(device: torch.device) -> None:
    lazy = torch.randn(2, 3, 4, 5).to(device, memory_format=torch.channels_last)
    assert lazy.is_contiguous(memory_format=torch.channels_last)
    assert (lazy + 1).is_contiguous(memory_format=torch.channels_last)
    assert lazy.cpu().is_contiguous(memory_format=torch.channels_last)


def test_modules_keep_their_parameters(device: torch.device) -> None:
    """An optimizer that was made before the module is moved trains it; tied weights stay tied."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.to(device)
    assert net[1].weight is net[0].weight and isinstance(net[0].weight, nn.Parameter)
    before = net[0].weight.detach().clone()
    net(torch.ones(1, 3).to(device)).sum().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight, before)
    assert len(list(net.parameters())) == 3 and glass.lazy.is_lazy(net)
    net.to("cpu")
    assert not glass.lazy.is_lazy(net) and type(net[0].weight) is nn.Parameter


def test_copies_and_files(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    net(torch.randn(4, 3).to(device)).sum().backward()
    twin = copy.deepcopy(net)
    assert all(glass.lazy.is_lazy(value) for value in twin.state_dict().values())
    with torch.no_grad():
        net[0].weight.zero_()
    assert twin[0].weight.abs().sum() > 0 and twin[0].bias.grad is None
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    net.load_state_dict(state)
    assert torch.equal(net[0].weight, twin[0].weight) and glass.lazy.is_lazy(net[0].weight)
    assert torch.equal(pickle.loads(pickle.dumps(twin[0].weight)), twin[0].weight.cpu())  # noqa: S301


def test_data_of_a_parameter_is_replaced(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, 2).to(device))
    weight.data = torch.full((3,), 2.0).to(device)
    assert weight.shape == (3,) and weight.tolist() == [2.0] * 3 and isinstance(weight, nn.Parameter)
    weight.data.mul_(2)
    assert weight.tolist() == [4.0] * 3
    (weight * 3).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 3
    weight.data = torch.zeros(3)
    assert type(weight) is nn.Parameter and weight.device.type == "cpu"


def test_gradients_cross_devices(device: torch.device) -> None:
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to(device) * 2).cpu().sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3


def test_hooks_and_custom_functions(device: torch.device) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 + ctx.saved_tensors[0] * 0  # type: ignore[attr-defined]

    seen = []
    leaf = torch.ones(3).to(device).requires_grad_()
    made = Double.apply(leaf)
    made.register_hook(lambda gradient: seen.append(gradient.device))
    made.sum().backward()
    assert leaf.grad.tolist() == [2.0] * 3 and seen == [device]
    checkpointed = torch.utils.checkpoint.checkpoint(lambda value: (value * 3).sin(), leaf, use_reentrant=False)
    leaf.grad = None
    checkpointed.sum().backward()
    assert torch.allclose(leaf.grad.cpu(), 3 * torch.cos(torch.full((3,), 3.0)))
