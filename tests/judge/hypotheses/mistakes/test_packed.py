"""Weights that a port keeps as one, or in part: rows in another order, whole weights exchanged, tables by columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

ORDERS = {
    "head by head": ("permuted", "holds the rows of"),
    "keys first": ("swapped", ""),
    "right": ("", ""),
}


class Apart(nn.Module):
    """Two heads of eight over x [2, 5, 16], with a product for each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (made(x).view(2, 5, 2, 8).transpose(1, 2) for made in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(*parts)


class Packed(nn.Module):
    """The same with one product."""

    def __init__(self, own: Apart, mistake: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        parts = (own.k, own.q, own.v) if mistake == "keys first" else (own.q, own.k, own.v)
        for name in ("weight", "bias"):
            held = torch.stack([getattr(part, name).data for part in parts])
            held = held.unflatten(1, (2, 8)).transpose(0, 1) if mistake == "head by head" else held
            getattr(self.qkv, name).data = held.reshape(getattr(self.qkv, name).shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("mistake", ORDERS)
def test_rows_of_a_packed_weight_are_those_of_several_in_another_order(mistake: str, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    own = Apart().eval()
    result = check(own, candidate=Packed(own, mistake).eval(), inputs=str(tmp_path / "x.pt"))
    kind, says = ORDERS[mistake]
    assert result.ok == (not kind)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        assert hint.kind == kind and says in hint.text and hint.proven, hint


class Table(nn.Module):
    """Positions of a class and nine patches, added to what is given; a port adds that of the class to its token."""

    def __init__(self, *, is_port: bool = False, by_columns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        token, places = torch.randn(1, 1, 8), torch.randn(1, 10, 8)
        self.is_port = is_port
        patches = places[:, 1:].view(1, 3, 3, 8).transpose(1, 2).reshape(1, 9, 8) if by_columns else places[:, 1:]
        self.token = nn.Parameter(token + places[:, :1] if is_port else token)
        self.places = nn.Parameter(patches.clone() if is_port else places)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(2, -1, -1)
        if self.is_port:
            return torch.cat([token, x + self.places], 1).tanh()
        return (torch.cat([token, x], 1) + self.places).tanh()


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_table_that_a_port_keeps_without_its_first_row_is_in_another_order(by_columns: bool, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    port = Table(is_port=True, by_columns=by_columns)
    result = check(Table().eval(), candidate=port.eval(), inputs=str(tmp_path / "x.pt"))
    assert result.ok == (not by_columns)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        assert hint.kind == "permuted" and "in another order" in hint.text and hint.proven, hint


class Gated(nn.Module):
    """A gate and what it gates, of one product."""

    def __init__(self, *, is_split: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.is_split = nn.Linear(6, 8), is_split

    def forward(self, x: Tensor) -> Tensor:
        made = self.both(x)
        if not self.is_split:
            return made.tanh()
        gate, up = made.chunk(2, -1)
        return gate.sigmoid() * up


@pytest.mark.parametrize(("is_split", "kind"), [(True, "swapped"), (False, "permuted")])
def test_halves_that_are_taken_apart_are_two_weights(is_split: bool, kind: str, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 6, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    own, port = Gated(is_split=is_split), Gated(is_split=is_split)
    for tensor in port.parameters():
        tensor.data = tensor.data.roll(4, 0)
    first = check(own, candidate=port, inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints[0].kind == kind, first
