"""The one statement that differs: another part or layer that is read, which no op shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glassengine.diagnose import check


class Gated(nn.Module):
    """Adds the halves of a condition to those of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin().chunk(2, -1)
        ga, gb = x.exp().split(4, -1)
        a, b = a + ga, b + gb
        return a.tanh() * b.sigmoid()


class GatedOtherwise(nn.Module):
    """Adds each to the other half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin().chunk(2, -1)
        ga, gb = x.exp().split(4, -1)
        a, b = a + gb, b + ga
        return a.tanh() * b.sigmoid()


class Fed(nn.Module):
    """Feeds each frame but the last one into a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames, made = x.unbind(1), []
        for place in range(2, len(frames), 2):
            y = frames[place - 1]
            made.append(self.step(y))
        return torch.stack(made)


class FedOtherwise(Fed):
    """Feeds the frame before that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames, made = x.unbind(1), []
        for place in range(2, len(frames), 2):
            y = frames[place - 2]
            made.append(self.step(y))
        return torch.stack(made)


class Decoding(nn.Module):
    """Attends to what one layer made, each of which has other rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.attend = Attending()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, y = [], x
        for layer in self.layers:
            y = layer(y)[:, :-1].tanh()
            made.append(y)
        for place in range(2):
            memory = made[place]
            x = x + self.attend(x, memory)
        return x


class DecodingTheLast(Decoding):
    """Attends to what the last layer made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, y = [], x
        for layer in self.layers:
            y = layer(y)[:, :-1].tanh()
            made.append(y)
        for _ in range(2):
            memory = made[-1]
            x = x + self.attend(x, memory)
        return x


class Attending(nn.Module):
    """An attention that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys(memory), self.values(memory)
        shares = torch.einsum("bid,bjd->bij", x, keys).softmax(-1)
        return torch.einsum("bij,bjd->bid", shares, values)


class Putting(nn.Module):
    """Puts axes together in one module, and reads the result in another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True) + self.inner(x.tanh())[:, :2]


class Together(nn.Module):
    """Puts axes together in one order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 1)


class TogetherOtherwise(nn.Module):
    """Puts them together in the other order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 1, 2)


@pytest.mark.parametrize(
    ("right", "wrong", "shape", "both"),
    [
        (Gated(), GatedOtherwise(), (3, 8), ("a, b = a + ga, b + gb", "a, b = a + gb, b + ga")),
        (Fed(), FedOtherwise(), (2, 6, 4), ("y = frames[place - 1]", "y = frames[place - 2]")),
        (Decoding(), DecodingTheLast(), (2, 6, 8), ("memory = made[place]", "memory = made[-1]")),
        (
            Putting(Together()),
            Putting(TogetherOtherwise()),
            (3, 3, 3),
            ("return x.permute(0, 2, 1)", "return x.permute(0, 1, 2)"),
        ),
    ],
)
def test_the_line_that_reads_another_tensor_is_quoted(
    right: nn.Module, wrong: nn.Module, shape: tuple[int, ...], both: tuple[str, str]
) -> None:
    inputs = {"x": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
    first = check(right, candidate=wrong, inputs=inputs).first_divergence
    assert first is not None
    assert (first.source or "").endswith(both[0]), first.source
    assert (first.candidate_source or "").endswith(both[1]), first.candidate_source


class Halved(nn.Module):
    """Takes a number from its own configuration, after a line that people write in two ways."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + x.exp()
        return torch.tanh(y * self.share)


class HalvedOtherwise(Halved):
    """The same, with the terms of the sum in exchange."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp() + x.sin()
        return torch.tanh(y * self.share)


def test_a_line_that_differs_and_is_right_is_not_quoted() -> None:
    first = check(Halved(0.5), candidate=HalvedOtherwise(0.25), inputs={"x": torch.randn(4, 8)}).first_divergence
    assert first is not None and "0.25" in first.hints[0].text, first
    assert (first.candidate_source or "").endswith("return torch.tanh(y * self.share)"), first


class Parts(nn.Module):
    """Returns what is slow and what is left."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slow = x.cumsum(-1) / 8
        return x - slow, slow


class Mixed(nn.Module):
    """Gives each of two results of a module to another layer, by way of lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.fast, self.slow = Parts(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ups, downs = [], []
        up, down = self.parts(x)
        ups.append(up.permute(1, 0))
        downs.append(down.permute(1, 0))
        return self.fast(ups[0]) + self.slow(downs[0])


class MixedOtherwise(Mixed):
    """Takes each result for the other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ups, downs = [], []
        down, up = self.parts(x)
        ups.append(up.permute(1, 0))
        downs.append(down.permute(1, 0))
        return self.fast(ups[0]) + self.slow(downs[0])


def test_results_that_are_taken_for_each_other_are_named_where_they_are_taken() -> None:
    first = check(Mixed(), candidate=MixedOtherwise(), inputs={"x": torch.randn(8, 8)}).first_divergence
    assert first is not None and str(first.candidate_source).endswith(": down, up = self.parts(x)")


class Stacked(nn.Module):
    """Makes of each number two shares that add up to one, and picks among them."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.randint(0, 2, (6, 5), generator=torch.Generator().manual_seed(0)).float()
        self.register_buffer("picked", torch.stack([ones, 1 - ones], -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([-x.sin(), x.sin()], -1)
        share = (1 - both.abs()).relu() ** 2 / 2
        bins = torch.where(both >= 0, 1 - share, share)
        return torch.einsum("bds,dcs->bdc", bins, self.picked).prod(-2)


class StackedOtherwise(Stacked):
    """Stacks them the other way around: where the shares were exchanged, values would be the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x.sin(), -x.sin()], -1)
        share = (1 - both.abs()).relu() ** 2 / 2
        bins = torch.where(both >= 0, 1 - share, share)
        return torch.einsum("bds,dcs->bdc", bins, self.picked).prod(-2)


def test_an_exchange_is_told_of_the_line_that_the_candidate_has_otherwise() -> None:
    first = check(Stacked(), candidate=StackedOtherwise(), inputs={"x": torch.randn(4, 6)}).first_divergence
    assert first is not None and first.hints[0].text == "parts 0 and 1 of stack are exchanged"
    assert str(first.candidate_source).endswith("both = torch.stack([x.sin(), -x.sin()], -1)")


class Norm(nn.LayerNorm):
    """A module of one line."""

    def __init__(self) -> None:
        super().__init__(8)
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Normed(nn.Module):
    """Two norms in each layer; a port may leave the second one out."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.products = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.before, self.after = (nn.ModuleList(Norm() for _ in range(3)) for _ in range(2))
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product, before, after in zip(self.products, self.before, self.after, strict=True):
            x = x + product(before(x)).tanh()
            if not self.skips:
                x = after(x)
        return x


def test_a_module_that_is_not_called_is_named_where_it_is_called() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    first = check(Normed(), candidate=Normed(skips=True), inputs={"x": x}).first_divergence
    assert first is not None and first.hints[0].text == "layer_norm is missing", first
    assert first.source is not None and first.source.endswith("x = after(x)"), first.source
    assert first.candidate_source is None


class Hops(nn.Module):
    """Passes what it is given on to its neighbors, two times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hop, self.out = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(2):
            h = self.hop(h).roll(1, 0).tanh()
        return self.out(torch.cat([x, h], -1))


class MoreHops(Hops):
    """The same, once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(3):
            h = self.hop(h).roll(1, 0).tanh()
        return self.out(torch.cat([x, h], -1))


def test_a_loop_that_goes_round_once_more_is_quoted() -> None:
    first = check(Hops(), candidate=MoreHops(), inputs={"x": torch.randn(8, 8)}).first_divergence
    assert first is not None and str(first.source).endswith("for _ in range(2):"), first
    assert str(first.candidate_source).endswith("for _ in range(3):"), first


class Trees(nn.Module):
    """Trees that attend to each other, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(2, 0, 1)
        x, _ = self.attention(x, x, x)
        x = x.permute(1, 2, 0)
        return x.mean(-1)


class TreesOtherwise(Trees):
    """Samples attend to each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 1)
        x, _ = self.attention(x, x, x)
        x = x.permute(0, 2, 1)
        return x.mean(-1)


def test_axes_are_quoted_where_an_op_is_given_them() -> None:
    x = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0))
    first = check(Trees(), candidate=TreesOtherwise(), inputs={"x": x}).first_divergence
    assert first is not None and str(first.source).endswith("x = x.permute(2, 0, 1)"), first
    line = TreesOtherwise.forward.__code__.co_firstlineno + 1
    assert str(first.candidate_source).endswith(f":{line}: x = x.permute(0, 2, 1)"), first
