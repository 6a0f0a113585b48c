"""Views and writes: whatever is written through one tensor is read through all that share its memory."""

from __future__ import annotations

import copy
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


def test_overlapping_views_cannot_be_written(device: torch.device) -> None:
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


CHANGES: dict[str, View] = {
    "conj": lambda x: x.conj(),
    "mH": lambda x: x.mH,
    "H": lambda x: x.H,
    "adjoint": lambda x: x.adjoint(),
    "negative": lambda x: torch._neg_view(x),
    "imaginary": lambda x: x.imag if x.is_complex() else x,
    "imaginary part of the conjugate": lambda x: x.conj().imag if x.is_complex() else x,
    "real": lambda x: x.real,
    "row": lambda x: x[1] if x.dim() > 1 else x,
    "rest": lambda x: x[..., 1:],
    "flat": lambda x: x.unsqueeze(0),
    "copy": lambda x: copy.copy(x),
}
WRITES: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda x: x.mul_(2),
    lambda x: x.fill_(3),
    lambda x: x.copy_(torch.full(x.shape, 1 + 2j if x.is_complex() else 5.0, dtype=x.dtype)),
    lambda x: x.__setitem__(0, 7.0),
)


@pytest.mark.parametrize("seed", range(40))
def test_s18_writes_through_conjugates_negatives_and_copies(device: torch.device, seed: int) -> None:
    choose = random.Random(seed)
    kind = choose.choice([torch.complex64, torch.complex64, torch.float32])
    table = torch.randn(3, 3, dtype=kind, generator=torch.Generator().manual_seed(seed))
    names = [choose.choice(list(CHANGES)[:9]), *choose.choices(list(CHANGES), k=choose.randint(0, 2))]
    writes = choose.choices(WRITES, k=2)

    def run(base: torch.Tensor) -> list[torch.Tensor]:
        seen = [base]
        for name in names:
            if {"H": seen[-1].dim() == 2, "mH": seen[-1].dim() > 1, "adjoint": seen[-1].dim() > 1}.get(name, True):
                seen.append(CHANGES[name](seen[-1]))
        writes[0](seen[-1])
        writes[1](seen[len(seen) // 2])
        return [one.cpu().resolve_conj().resolve_neg() for one in seen]

    for ours, theirs in zip(run(table.clone()), run(table.clone().to(device)), strict=True):
        torch.testing.assert_close(theirs, ours)


def test_s18_a_copy_shares_memory_and_attributes(device: torch.device) -> None:
    x = torch.nn.Parameter(torch.ones(2, device=device))
    x.note = "mine"  # type: ignore[attr-defined]
    y = copy.copy(x)
    assert type(y) is type(x) and y.requires_grad and y.is_leaf and y.note == "mine"  # type: ignore[attr-defined]
    with torch.no_grad():
        y.add_(1)
    assert x.tolist() == [2.0, 2.0]
