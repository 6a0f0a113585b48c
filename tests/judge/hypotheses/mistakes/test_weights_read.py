"""Weights that a candidate reads instead of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.judge.hypotheses.mistakes.weights_read import relation
from glassengine.results import Comparison


class Normed(nn.Module):
    """Two norms over channels, by channels first or written out; a converter may exchange what they hold."""

    def __init__(self, *, is_written_out: bool = False, is_exchanged: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.between, self.after = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        for tensor in [*self.before.state_dict().values(), *self.after.state_dict().values()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2)
        if is_exchanged:
            self.before, self.after = self.after, self.before
        self.is_written_out = is_written_out

    def norm(self, own: nn.BatchNorm1d, x: Tensor) -> Tensor:
        if not self.is_written_out:
            return own(x.transpose(1, 2)).transpose(1, 2)
        assert own.running_mean is not None and own.running_var is not None
        return (x - own.running_mean) / (own.running_var + own.eps).sqrt() * own.weight + own.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.after, torch.tanh(self.between(self.norm(self.before, x))))


def judged(candidate: nn.Module, tmp_path: Path) -> Comparison:
    torch.save({"x": torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    return check(Normed().eval(), candidate=candidate.eval(), inputs=str(tmp_path / "x.pt"))


def test_the_weights_of_another_norm_are_told_all_at_once(tmp_path: Path) -> None:
    first = judged(Normed(is_written_out=True, is_exchanged=True), tmp_path).first_divergence
    assert first is not None and first.site.startswith("before")
    assert "the weights of another module are read: of after" in [hint.text for hint in first.hints]


def test_norms_that_are_written_out_are_right(tmp_path: Path) -> None:
    result = judged(Normed(is_written_out=True), tmp_path)
    assert result.ok and not result.origins


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.LSTM(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)[0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)])
def test_gates_in_another_order_are_told_of_all_weights(order: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline, port = Recurrence(), Recurrence()
    weights = baseline.state_dict().items()
    port.load_state_dict({name: torch.cat([tensor.chunk(4)[i] for i in order]) for name, tensor in weights})
    torch.save({"x": torch.randn(6, 2, 4)}, tmp_path / "x.pt")
    result = check(baseline, candidate=port, inputs=str(tmp_path / "x.pt"))
    assert result.ok == (order == (0, 1, 2, 3))
    if result.first_divergence is not None:
        texts = [hint.text for hint in result.first_divergence.hints]
        assert any("blocks of 5" in text and "bias_hh_l0 with it" in text for text in texts), texts


class Halved(nn.Module):
    """A sum that is halved, and a product of it, whose weight a port may hold twice as large."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6, bias=False)
        self.linear.weight.data.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x + x.tanh()) / 2)


def test_what_the_candidate_reads_is_not_said_to_be_another_tensor(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(3, 6)}, tmp_path / "x.pt")
    port = Halved(2.0)
    result = check(Halved(), candidate=Weighed(port), inputs=str(tmp_path / "x.pt"))
    assert result.first_divergence is not None
    texts = [hint.text for hint in result.first_divergence.hints]
    assert not any("instead of" in text for text in texts), texts


class Weighed(nn.Module):
    def __init__(self, own: Halved) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(own.linear.weight / 3), nn.Parameter(torch.full((6, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear((x + x.tanh()) / 2, self.weight * self.gain)


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


def test_f75_a_weight_that_was_rounded_is_not_called_scaled_nor_different_in_no_element() -> None:
    torch.manual_seed(0)
    ours = torch.randn(64, 32).double()
    rounded = (ours.bfloat16().double() * 0.5 + ours * 0.5).contiguous()
    kind, text = relation("a.weight", "a.weight", ours, rounded, {})
    assert kind == "dtype" and "scaled" not in text and " 0 of " not in text
    assert relation("a.weight", "a.weight", ours, ours * 1.004, {}) == ("scale", "a.weight is scaled by 1.004")
    assert relation("a.weight", "a.weight", ours, ours + 0.003, {})[1] == "a.weight is the baseline's plus 0.003"


def test_constants_are_told_by_their_values() -> None:
    table, number = torch.arange(1.0, 9.0).double() ** 0.5, torch.tensor(4.0).double()
    assert (
        relation("table", "table", table, torch.arange(2.0, 10.0).double() ** 0.5, {})[1]
        == "table begins one later along axis 0"
    )
    assert relation("number", "number", number, number + 2, {})[1] == "number is 6, not 4"
    assert (
        relation("table", "table", table, table.where(table != 2, -1), {})[1]
        == "table differs in 1 of 8 elements (-1 for 2)"
    )


class Attends(nn.Module):
    """Attention whose keys and values are parts of one product."""

    def __init__(self, *, is_exchanged: bool) -> None:
        super().__init__()
        self.of_query, self.of_both, self.is_exchanged = nn.Linear(6, 6), nn.Linear(6, 12), is_exchanged

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.of_both(x).chunk(2, dim=-1)
        keys, values = (last, first) if self.is_exchanged else (first, last)
        return x + (self.of_query(x) @ keys.transpose(-1, -2)).softmax(-1) @ values


def test_keys_and_values_that_are_exchanged_are_named_where_they_are_taken_apart(tmp_path: Path) -> None:
    models = []
    for wrong in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(Attends(is_exchanged=False), Attends(is_exchanged=wrong)))
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(2, 5, 6)}).first_divergence
    assert first is not None and first.hints[0].text == "part 0 of of_both/linear.0 and part 1 are exchanged", first
    assert "self.of_both(x).chunk" in str(first.candidate_source), first
