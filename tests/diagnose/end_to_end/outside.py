"""Candidates whose operations are right and whose answer is wrong all the same: what lies around a forward pass.

Each entry makes a baseline, a candidate and the arguments of `check`. None of the candidates may be called ok.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Given = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """One wrong candidate: baseline, candidate, inputs, and further arguments of `check`."""

    baseline: nn.Module
    candidate: Any
    inputs: Any
    options: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """[B, 8] -> [B, 4], with statistics and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.bn, self.drop, self.last = (
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.Dropout(0.2),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.last(self.drop(torch.relu(self.bn(self.first(x)))))}


class Words(nn.Module):
    """Token ids [B, S] and a mask -> logits [B, S, 40]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.mix, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        self.norm = nn.LayerNorm(16)

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        keep = (mask[:, None, :] > 0) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        shares = (x @ x.transpose(-1, -2) / 4).masked_fill(~keep, -1e9).softmax(-1)
        return self.norm(x + torch.tanh(self.mix(shares @ x)))

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.hidden(ids, mask))}


class Image(nn.Module):
    """[B, 3, 8, 8] -> features and scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.norm(self.conv(pixels)))
        return x, self.head(x.mean((2, 3)))


class Decoder(nn.Module):
    """One token at a time, [B, 1, 8] -> [B, 1, 8], with a cache of keys in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cache: Tensor | None = None

    def remembered(self, x: Tensor) -> Tensor:
        self.cache = x if self.cache is None else torch.cat([self.cache, x], 1)
        return self.cache

    def forward(self, x: Tensor) -> Tensor:
        seen = self.remembered(x)
        shares = (x @ self.keys(seen).transpose(-1, -2)).softmax(-1)
        return shares @ self.values(seen)


def x() -> Given:
    return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}


def ids() -> Given:
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    return {"ids": tokens, "mask": mask}


def pixels() -> Given:
    return {"pixels": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))}


def tokens() -> list[Given]:
    generator = torch.Generator().manual_seed(6)
    return [{"x": torch.randn(2, 1, 8, generator=generator)} for _ in range(4)]


def changed(base: type[nn.Module], forward: Callable[..., Any]) -> nn.Module:
    """Return a module of a class with another forward, in evaluation mode."""
    return type(f"Other{base.__name__}", (base,), {"forward": forward})().eval()


def _modes() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def training(base: type[nn.Module], given: Callable[[], Given], *names: str) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            candidate = base().eval()
            for name in names:
                candidate.get_submodule(name).train()
            return Wrong(base().eval(), candidate, given())

        return make

    def functional(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            return {"y": self.last(F.dropout(torch.relu(self.bn(self.first(x))), 0.2))}

        return Wrong(Net().eval(), changed(Net, forward), x())

    def instance(_: Path) -> Wrong:
        def forward(self: Any, pixels: Tensor) -> Any:
            norm = self.norm
            made = F.batch_norm(self.conv(pixels), None, None, norm.weight, norm.bias, training=True)
            return F.gelu(made), self.head(F.gelu(made).mean((2, 3)))

        return Wrong(Image().eval(), changed(Image, forward), pixels())

    def baseline_alone(_: Path) -> Wrong:
        return Wrong(Net(), Net().eval(), x())

    def path_dropped(_: Path) -> Wrong:
        class Drop(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if not self.training:
                    return x
                return x * torch.empty(x.shape[0], 1).bernoulli_(0.95) / 0.95

        class Other(Net):
            def __init__(self) -> None:
                super().__init__()
                self.drop = Drop()  # type: ignore[assignment]

        candidate = Other().eval()
        candidate.drop.train()
        return Wrong(Net().eval(), candidate, x())

    def noise_in_training(_: Path) -> Wrong:
        def forward(self: Any, pixels: Tensor) -> Any:
            if self.conv.training:
                pixels = pixels + 0.01 * torch.randn_like(pixels)
            return Image.forward(self, pixels)

        candidate = changed(Image, forward)
        candidate.conv.train()  # type: ignore[operator, union-attr]
        return Wrong(Image().eval(), candidate, pixels())

    yield "bn", training(Net, x, "bn")
    yield "drop", training(Net, x, "drop")
    yield "both", training(Net, x, "bn", "drop")
    yield "whole", training(Net, x, "")
    yield "bn2d", training(Image, pixels, "norm")

    def attention(_: Path) -> Wrong:
        class Attention(nn.Module):
            drop = 0.0

            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=self.drop)

        class Dropping(Attention):
            drop = 0.1

        return Wrong(Attention().eval(), Dropping().eval(), x())

    yield "dropout of the scores", attention
    yield "functional dropout", functional
    yield "statistics of the batch", instance
    yield "baseline alone", baseline_alone
    yield "drop path", path_dropped
    yield "noise in training", noise_in_training


def _written() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def net(change: Callable[[Tensor], Any]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, x: Tensor) -> Any:
                change(x)
                return Net.forward(self, x)

            return Wrong(Net().eval(), changed(Net, forward), x())

        return make

    def words(change: Callable[[Tensor, Tensor], Any]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
                change(ids, mask)
                return Words.forward(self, ids, mask)

            return Wrong(Words().eval(), changed(Words, forward), ids())

        return make

    def afterwards(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            found = Net.forward(self, x)
            x.zero_()
            return found

        return Wrong(Net().eval(), changed(Net, forward), x())

    def steps(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            x.mul_(1.5)
            return Decoder.forward(self, x)

        return Wrong(Decoder().eval(), changed(Decoder, forward), tokens())

    yield "subtracts the mean", net(lambda x: x.sub_(x.mean(-1, keepdim=True)))
    yield "clamps", net(lambda x: x.clamp_(-0.5, 0.5))
    yield "fills a column", net(lambda x: x[:, 0].fill_(0.0))
    yield "through numpy", net(lambda x: np.multiply(x.numpy(), 2, out=x.numpy()))
    yield "copies", net(lambda x: x.copy_(x.flip(0)))
    yield "through data", net(lambda x: x.data.add_(0.1))
    yield "through a view", net(lambda x: x.view(-1)[:8].neg_())
    yield "exchanges two rows", net(lambda x: x.copy_(x[[1, 0, 2, 3, 4, 5]]))
    yield "through a slice", net(lambda x: x[2:4].zero_())
    yield "clamps ids", words(lambda ids, mask: ids.clamp_(max=20))
    yield "fills the mask", words(lambda ids, mask: mask.fill_(1))
    yield "masks ids", words(lambda ids, mask: ids.masked_fill_(mask == 0, 7))
    yield "shifts ids", words(lambda ids, mask: ids.copy_(ids.roll(1, -1)))
    yield "after its forward", afterwards
    yield "in every step", steps


def _random() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def noise(draw: Callable[[Tensor], Tensor]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, x: Tensor) -> Any:
                return {"y": Net.forward(self, x)["y"] + draw(x)[:, :4]}

            return Wrong(Net().eval(), changed(Net, forward), x())

        return make

    def seeded(x: Tensor) -> Tensor:
        return 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    def untrained(_: Path) -> Wrong:
        candidate = Net().eval()
        torch.manual_seed(99)
        candidate.last.reset_parameters()
        return Wrong(Net().eval(), candidate, x())

    def one_layer(_: Path) -> Wrong:
        candidate = Words().eval()
        nn.init.normal_(candidate.mix.weight, std=0.3)
        return Wrong(Words().eval(), candidate, ids())

    def sampled(_: Path) -> Wrong:
        def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
            found = Words.forward(self, ids, mask)["logits"]
            return {"logits": found + -torch.log(-torch.log(torch.rand_like(found).clamp_min(1e-9)))}

        return Wrong(Words().eval(), changed(Words, forward), ids())

    def permuted(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            return Net.forward(self, x[torch.randperm(x.shape[0])])

        return Wrong(Net().eval(), changed(Net, forward), x())

    yield "noise", noise(lambda x: 0.01 * torch.randn_like(x))
    yield "noise of a seed", noise(seeded)
    yield "uniform", noise(lambda x: 0.01 * torch.rand_like(x))
    yield "never trained", untrained
    yield "one layer never loaded", one_layer
    yield "sampled logits", sampled
    yield "rows in a random order", permuted


def _caches() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def decoder(remembered: Callable[[Any, Tensor], Tensor]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            other = type("Other", (Decoder,), {"remembered": remembered})().eval()
            return Wrong(Decoder().eval(), other, tokens())

        return make

    def stale(self: Any, x: Tensor) -> Tensor:
        before, self.cache = self.cache, x if self.cache is None else torch.cat([self.cache, x], 1)
        return x if before is None else before

    def first_alone(self: Any, x: Tensor) -> Tensor:
        self.cache = x if self.cache is None else self.cache
        return torch.cat([self.cache, x], 1)

    def never(self: Any, x: Tensor) -> Tensor:
        return x

    def in_front(self: Any, x: Tensor) -> Tensor:
        self.cache = x if self.cache is None else torch.cat([x, self.cache[:, :-1]], 1)
        return torch.cat([self.cache, x], 1)

    def shared_rows(self: Any, x: Tensor) -> Tensor:
        seen = Decoder.remembered(self, x)
        return seen[:1].expand_as(seen)

    def twice(self: Any, x: Tensor) -> Tensor:
        return Decoder.remembered(self, x if self.cache is None else torch.cat([x, x], 1))

    class Result(Net):
        held: Any = None

        def forward(self, x: Tensor) -> Any:
            if type(self).held is None:
                type(self).held = super().forward(x)
            return type(self).held

    def class_attribute(_: Path) -> Wrong:
        Result.held = None
        return Wrong(Net().eval(), Result().eval(), x())

    def by_shape(_: Path) -> Wrong:
        known: dict[Any, Any] = {}

        def forward(self: Any, x: Tensor) -> Any:
            if x.shape not in known:
                known[x.shape] = Net.forward(self, x)
            return known[x.shape]

        return Wrong(Net().eval(), changed(Net, forward), x())

    def hidden_state(_: Path) -> Wrong:
        known: dict[Any, Tensor] = {}

        def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
            # A prefix cache by the length alone: the states of another prompt.
            found = known.setdefault(ids.shape[1], self.hidden(ids, mask))
            return {"logits": self.head(found)}

        return Wrong(Words().eval(), changed(Words, forward), ids())

    yield "stale", decoder(stale)
    yield "the first alone", decoder(first_alone)
    yield "none", decoder(never)
    yield "in another order", decoder(in_front)
    yield "of another row", decoder(shared_rows)
    yield "appended twice", decoder(twice)
    yield "result of a class", class_attribute
    yield "result by shape", by_shape
    yield "states by length", hidden_state


def _results() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def image(change: Callable[[Tensor, Tensor], Any]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, pixels: Tensor) -> Any:
                return change(*Image.forward(self, pixels))

            return Wrong(Image().eval(), changed(Image, forward), pixels())

        return make

    def words(change: Callable[[Tensor], Any]) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
                return change(Words.forward(self, ids, mask)["logits"])

            return Wrong(Words().eval(), changed(Words, forward), ids())

        return make

    class Two(nn.Module):
        """Two results of one shape."""

        order = ("mean", "spread")

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return {name: getattr(self, made)(x) for name, made in zip(("mean", "spread"), self.order, strict=True)}

    class Exchanged(Two):
        order = ("spread", "mean")

    class Same(Two):
        order = ("mean", "mean")

    def loss(value: float) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, x: Tensor) -> Any:
                return {**Net.forward(self, x), "loss": self.number}

            ours, theirs = changed(Net, forward), changed(Net, forward)
            object.__setattr__(ours, "number", 1.25)
            object.__setattr__(theirs, "number", value)
            return Wrong(ours, theirs, x())

        return make

    yield "dropped", image(lambda a, b: (b,))
    yield "the other dropped", image(lambda a, b: (a,))
    yield "rows exchanged", image(lambda a, b: (a, b.flip(0)))
    yield "cut off", image(lambda a, b: (a, b[:, :-1]))
    yield "of another type", image(lambda a, b: (a, b.argmax(-1)))
    yield "None for a tensor", image(lambda a, b: (a, None))
    yield "of a coarser dtype", image(lambda a, b: (a, (b.half() + 1).float() - 1))
    yield "not finite", image(lambda a, b: (a, b / (b > 0)))
    yield "detail lost", image(lambda a, b: (a.mean(1, keepdim=True).expand_as(a), b))
    yield "last position alone", words(lambda z: {"logits": z[:, -1:]})
    yield "softmax of logits", words(lambda z: {"logits": z.softmax(-1)})
    yield "shifted positions", words(lambda z: {"logits": z.roll(1, 1)})
    yield "one row for all", words(lambda z: {"logits": z[:1].expand_as(z)})
    yield "two exchanged", lambda _: Wrong(Two().eval(), Exchanged().eval(), x())
    yield "one for both", lambda _: Wrong(Two().eval(), Same().eval(), x())
    yield "another number", loss(1.5)
    yield "not a number", loss(float("nan"))


def _files() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def dump(change: Callable[[Given, Tensor], Given]) -> Callable[[Path], Wrong]:
        def make(folder: Path) -> Wrong:
            net, given = Net().eval(), x()
            with torch.no_grad():
                y = net(given["x"])["y"]
            np.savez(folder / "dump.npz", **{k: v.numpy() for k, v in change(given, y).items()})
            return Wrong(net, folder / "dump.npz", None, {"min_coverage": 0.0})

        return make

    def program(other: Callable[[], nn.Module]) -> Callable[[Path], Wrong]:
        def make(folder: Path) -> Wrong:
            exported = torch.export.export(other(), (), x())
            torch.export.save(exported, folder / "other.pt2")
            return Wrong(Net().eval(), folder / "other.pt2", x())

        return make

    def another_seed() -> nn.Module:
        net = Net().eval()
        torch.manual_seed(4)
        net.first.reset_parameters()
        return net

    def other_statistics() -> nn.Module:
        net = Net().eval()
        net.bn.running_mean.add_(0.3)  # type: ignore[union-attr, operator]
        return net

    def old(folder: Path) -> Wrong:
        """A recording of an older checkpoint under the name of the new one."""
        net = Net().eval()
        values = {name: value.numpy() for name, value in another_seed()(x()["x"]).items()}
        np.savez(folder / "dump.npz", x=x()["x"].numpy(), y=values["y"])
        return Wrong(net, folder / "dump.npz", None, {"min_coverage": 0.0})

    yield "random result", dump(lambda given, y: {**given, "y": torch.randn(y.shape)})
    yield "inputs alone", dump(lambda given, y: given)
    yield "result of other inputs", dump(lambda given, y: {**given, "y": y.roll(1, 0)})
    yield "result cut off", dump(lambda given, y: {**given, "y": y[:3]})
    yield "an older recording", lambda folder: old_with_grad(folder, old)
    yield "a program of another seed", program(another_seed)
    yield "a program of other statistics", program(other_statistics)


def old_with_grad(folder: Path, make: Callable[[Path], Wrong]) -> Wrong:
    with torch.no_grad():
        return make(folder)


def _precision() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    def weights(dtype: torch.dtype) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            candidate = Net().eval()
            for parameter in candidate.parameters():
                parameter.data = parameter.data.to(dtype).float()
            return Wrong(Net().eval(), candidate, x())

        return make

    def inside(dtype: torch.dtype) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            def forward(self: Any, x: Tensor) -> Any:
                hidden = torch.relu(self.bn(self.first(x))).to(dtype)
                return {"y": self.last(hidden.float())}

            return Wrong(Net().eval(), changed(Net, forward), x())

        return make

    def result(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            return {"y": (Net.forward(self, x)["y"] * 4).round() / 4}

        return Wrong(Net().eval(), changed(Net, forward), x())

    def budget(_: Path) -> Wrong:
        candidate = copy.deepcopy(Net().eval()).to(torch.bfloat16)

        def forward(self: Any, x: Tensor) -> Any:
            return {"y": Net.forward(self, x.to(torch.bfloat16))["y"].float()}

        other = changed(Net, forward)
        other.load_state_dict(candidate.float().state_dict())
        return Wrong(Net().eval(), other.to(torch.bfloat16), x(), {"min_snr": 80.0})

    yield "weights in bfloat16", weights(torch.bfloat16)
    yield "weights in half", weights(torch.float16)
    yield "a tensor in bfloat16", inside(torch.bfloat16)
    yield "a tensor in half", inside(torch.float16)
    yield "a result in steps", result

    def rounded_inputs(_: Path) -> Wrong:
        def forward(self: Any, pixels: Tensor) -> Any:
            return Image.forward(self, (pixels * 127).round() / 127)

        return Wrong(Image().eval(), changed(Image, forward), pixels())

    def positions(_: Path) -> Wrong:
        def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
            return Words.forward(self, ids.to(torch.float8_e4m3fn).float().long().clamp(max=39), mask)

        return Wrong(Words().eval(), changed(Words, forward), ids())

    yield "inputs in 8 bits", rounded_inputs
    yield "ids through 8 bits", positions
    yield "beyond the budget", budget


def _objects() -> Iterator[tuple[str, Callable[[Path], Wrong]]]:
    class Memory(nn.Module):
        """Returns what it was given when it was made."""

        def __init__(self, y: Tensor, how: str) -> None:
            super().__init__()
            self.how = how
            if how == "buffer":
                self.register_buffer("y", y)
            elif how == "parameter":
                self.y = nn.Parameter(y)
            else:
                object.__setattr__(self, "held", [y])

        def forward(self, x: Tensor) -> Any:
            y = self.held[0] if self.how == "list" else self.y
            return {"y": y + 0 * x.sum() if self.how == "parameter" else y}

    def memory(how: str) -> Callable[[Path], Wrong]:
        def make(_: Path) -> Wrong:
            net = Net().eval()
            with torch.no_grad():
                y = net(x()["x"])["y"]
            return Wrong(net, Memory(y, how).eval(), x(), {"min_coverage": 0.0})

        return make

    def same(_: Path) -> Wrong:
        net = Net().eval()
        return Wrong(net, net, x())

    def overwritten(_: Path) -> Wrong:
        held: list[Tensor] = []

        def forward(self: Any, x: Tensor) -> Any:
            y = Net.forward(self, x)["y"]
            held[:] = held or [torch.empty_like(y)]
            held[0].copy_(y)
            return {"y": held[0]}

        return Wrong(Net().eval(), changed(Net, forward), x())

    def its_input(_: Path) -> Wrong:
        class Copy(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return {"y": x.relu()}

        class View(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return {"y": x.relu_()}

        return Wrong(Copy().eval(), View().eval(), x())

    def asks_the_baseline(_: Path) -> Wrong:
        net = Net().eval()

        class Other(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                object.__setattr__(self, "answers", {})

            def forward(self, x: Tensor) -> Any:
                key = round(float(x.sum()), 3)
                if key not in self.answers:
                    self.answers[key] = net(x)["y"] if not self.answers else torch.zeros(x.shape[0], 4)
                return {"y": self.answers[key]}

        return Wrong(net, Other().eval(), x(), {"min_coverage": 0.0})

    yield "result in a buffer", memory("buffer")
    yield "result in a parameter", memory("parameter")
    yield "result in a list", memory("list")

    def its_weight(_: Path) -> Wrong:
        def forward(self: Any, x: Tensor) -> Any:
            return {"y": self.last.bias.expand(x.shape[0], 4) + 0 * Net.forward(self, x)["y"]}

        return Wrong(Net().eval(), changed(Net, forward), x())

    yield "a weight as result", its_weight
    yield "one object", same
    yield "result overwritten", overwritten
    yield "result in the input", its_input
    yield "answers of the baseline", asks_the_baseline


KINDS = {
    "mode": _modes,
    "inputs": _written,
    "random": _random,
    "cache": _caches,
    "results": _results,
    "file": _files,
    "precision": _precision,
    "object": _objects,
}


def wrong() -> dict[str, Callable[[Path], Wrong]]:
    """Return every wrong candidate by its name: "mode: bn"."""
    return {f"{kind}: {name}": make for kind, entries in KINDS.items() for name, make in entries()}
