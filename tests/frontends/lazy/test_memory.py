"""Views and writes: whatever is written through one tensor is read through all that share its memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import glassengine as glass

View = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, View] = {
    "view": lambda x: x.view(-1),
    "reshape of what is transposed": lambda x: x.t().unsqueeze(0),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, -2),
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3, ::2],
    "slice from the end": lambda x: x[-3:, -4:-1],
    "diagonal": lambda x: x.diagonal(1),
    "split": lambda x: x.split(4, 1)[1],
    "split with sizes": lambda x: x.split([1, 3])[1],
    "unbind": lambda x: x.unbind(1)[2],
    "squeeze": lambda x: x[1:2].squeeze(0),
    "detach": lambda x: x.detach(),
    "other dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "as_strided": lambda x: x.as_strided((2, 2), (7, 2), 3),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "movedim": lambda x: x.movedim(0, 1),
    "several": lambda x: x[1:].t()[2:5].select(1, 0).unsqueeze(-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)))[..., 1],
}


def table() -> torch.Tensor:
    return torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("order", ["view", "base", "both"])
@pytest.mark.parametrize("step", [False, True])
def test_a_write_is_seen_by_all_that_share_the_memory(device: torch.device, name: str, order: str, step: bool) -> None:
    def run(base: torch.Tensor) -> list[torch.Tensor]:
        view, other = VIEWS[name](base), base.view(2, 12)
        before = base * 1
        if step and base.device == device:
            repr(other)
        if order != "base":
            view.add_(100)
            view.mul_(-1)
        if order != "view":
            base[2] = 7
            base.clamp_(max=50)
        if order == "both":
            view.copy_(torch.full((), 3.0).expand(view.shape))
        return [base, view, other, before]

    plain, lazy = run(table()), run(table().to(device))
    for ours, theirs in zip(plain, lazy, strict=True):
        assert torch.equal(theirs.cpu(), ours)
        assert theirs.stride() == ours.stride() and theirs.storage_offset() == ours.storage_offset()


def test_a_view_of_a_view_that_nothing_inverts_is_written_with_atens_own(device: torch.device) -> None:
    def run(base: torch.Tensor) -> list[torch.Tensor]:
        base.unfold(0, 2, 2)[1].fill_(-1)
        return [base]

    assert torch.equal(run(table().to(device))[0].cpu(), run(table())[0])


def test_what_shares_elements_with_itself_cannot_be_written(device: torch.device) -> None:
    for base in (torch.ones(1, 3), torch.ones(1, 3).to(device)):
        with pytest.raises(RuntimeError, match="single memory location"):
            base.expand(2, 3).add_(1)


def test_shapes_change_in_place(device: torch.device) -> None:
    lazy = table().to(device)
    lazy.t_().unsqueeze_(0).squeeze_().transpose_(0, 1).add_(1)
    assert lazy.shape == (4, 6) and torch.equal(lazy.cpu(), table() + 1)
    with pytest.raises(RuntimeError, match=r"another shape: it was \[4, 6\], and \[2, 3\]"):
        lazy.resize_(2, 3)


@pytest.mark.parametrize("seed", range(12))
def test_programs_of_views_and_writes_by_chance(device: torch.device, seed: int) -> None:
    """A dozen tensors of one memory, made, written, read and computed in an order that a seed gives."""
    names = list(VIEWS)
    numbers = random.Random(seed)
    program = [
        (numbers.choice(["view", "write", "add", "read", "step"]), numbers.choice(names), numbers.randrange(99))
        for _ in range(40)
    ]

    def run(where: torch.device) -> list[torch.Tensor]:
        base = table().to(where)
        tensors, made = [base], []
        for what, name, number in program:
            one = tensors[number % len(tensors)]
            if what == "view":
                tensors.append(VIEWS[name](base))
            elif what == "write":
                one.mul_(0.5).add_(number)
            elif what == "add":
                made.append(one + number)
            elif what == "read":
                one.sum().item()
            elif where == device:
                glass.mark_step()
        return [*tensors, *made]

    for ours, theirs in zip(run(torch.device("cpu")), run(device), strict=True):
        assert torch.equal(theirs.cpu().nan_to_num(), ours.nan_to_num())
