"""What makes tensors on the lazy device, what random numbers they get, and autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import glassengine as glass
from glassengine.plugins.lazy.tensor import LazyTensor

MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "arange": lambda **at: torch.arange(2, 9, 2, **at),
    "arange of floats": lambda **at: torch.arange(0.5, **at),
    "as_tensor": lambda **at: torch.as_tensor([1, 2], **at),
    "eye": lambda **at: torch.eye(3, 4, **at),
    "full": lambda **at: torch.full((2,), 3, dtype=torch.int16, **at),
    "hann_window": lambda **at: torch.hann_window(5, **at),
    "linspace": lambda **at: torch.linspace(0, 1, 7, dtype=torch.float64, **at),
    "ones": lambda **at: torch.ones(2, 3, **at),
    "rand": lambda **at: torch.rand(3, **at),
    "randint": lambda **at: torch.randint(0, 9, (5,), **at),
    "randn": lambda **at: torch.randn(2, 2, dtype=torch.float64, **at),
    "randperm": lambda **at: torch.randperm(6, **at),
    "tensor": lambda **at: torch.tensor([[1.0, 2.0]], **at),
    "tensor that needs a gradient": lambda **at: torch.tensor(2.0, requires_grad=True, **at),
    "tril_indices": lambda **at: torch.tril_indices(3, 3, **at),
    "zeros": lambda **at: torch.zeros((), **at),
}


@pytest.mark.parametrize("name", MAKERS)
def test_makers(device: torch.device, name: str) -> None:
    torch.manual_seed(5)
    plain = MAKERS[name]()
    torch.manual_seed(5)
    for make in (lambda: MAKERS[name](device=device), lambda: MAKERS[name](device="lazy")):
        torch.manual_seed(5)
        lazy = make()
        assert type(lazy) is LazyTensor and lazy.dtype == plain.dtype and lazy.stride() == plain.stride()
        assert torch.equal(lazy.detach().cpu(), plain.detach()) and lazy.requires_grad == plain.requires_grad


def test_modules_are_made_there(device: torch.device) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    torch.manual_seed(0)
    with device:
        lazy = torch.nn.Linear(4, 3)
    assert glass.lazy.is_lazy(lazy) and torch.equal(lazy.weight.cpu(), plain.weight)


@pytest.mark.parametrize("read", [False, True])
def test_random_numbers_are_those_of_eager_code_in_any_order(device: torch.device, read: bool) -> None:
    """Drawn on both devices in turns, and however graphs are cut."""

    def run(where: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(1)
        value = torch.ones(4, 5).to(where)
        found = [torch.nn.functional.dropout(value, 0.4), torch.rand(2), torch.randn_like(value)]
        if read:
            found[0].sum().item()
        found += [torch.empty_like(value).uniform_(-1, 1), value.bernoulli(0.3), torch.randperm(4)]
        found.append(torch.nn.init.kaiming_normal_(torch.empty(3, 3).to(where)))
        found.append(torch.multinomial(value, 2))
        found.append(torch.nn.functional.alpha_dropout(value, 0.2))
        return [one.cpu() for one in found]

    assert all(map(torch.equal, run(torch.device("cpu")), run(device)))


@pytest.mark.parametrize("name", ["cpu", "lazy"])
def test_autocast_is_that_of_the_device_of_the_graph(device: torch.device, name: str) -> None:
    given, weight = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.linear(given, weight).softmax(-1)
    with torch.autocast(name, dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("lazy")
        made = torch.nn.functional.linear(given.to(device), weight.to(device)).softmax(-1)
        with torch.autocast(name, enabled=False):
            assert (given.to(device) @ weight.to(device)).dtype == torch.float32
    assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)


def test_torch_without_lazy_tensors_is_as_it_was(device: torch.device) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with pytest.raises(RuntimeError, match="nonsense"):
        torch.autocast("nonsense")
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[torch.ones(1)]])
    assert list(grouped) == [(torch.device("cpu"), torch.float32)]
