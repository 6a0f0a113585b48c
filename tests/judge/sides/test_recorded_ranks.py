"""A record of ranks that share a model, judged with the model: mistakes are named where they were made."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison

WIDTH, INNER, STEPS = 16, 32, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def ranks_of(model: Net, x: Tensor, ranks: int, mistakes: Collection[str]) -> list[dict[str, Tensor]]:
    """What each of several ranks makes, as Megatron shares a feed-forward: columns, then rows and a sum."""
    made: list[dict[str, Tensor]] = [{".:in.x": x} for _ in range(ranks)]
    each = [x] * ranks
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        terms = []
        for rank in range(ranks):
            at = 0 if f"shard {number}" in mistakes and rank == 1 else rank
            up = nn.functional.linear(each[rank], block.up.weight.chunk(ranks)[at], block.up.bias.chunk(ranks)[at])
            act = block.act(up)
            made[rank] |= {f"blocks.{number}.up": up, f"blocks.{number}.act": act}
            at = 0 if f"rows {number}" in mistakes and rank == 1 else rank
            terms.append(act @ block.down.weight.chunk(ranks, 1)[at].T * (f"no term {number}" not in mistakes or rank))
        times = ranks if f"bias {number}" in mistakes else 1
        for rank in range(ranks):
            summed = terms[rank] if f"no sum {number}" in mistakes else torch.stack(terms).sum(0)
            down = summed + times * block.down.bias
            if f"stale {number}" in mistakes and rank == ranks - 1:
                down = down.roll(1, 0)
            each[rank] = each[rank] + down
            made[rank] |= {f"blocks.{number}.down": down, f"blocks.{number}": each[rank]}
    for rank in range(ranks):
        made[rank] |= {"head": model.head(each[rank])}
    return made


def checked(path: Path, *mistakes: str, ranks: int = 2) -> Comparison:
    model = net()
    steps = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    with torch.no_grad():
        made = [ranks_of(model, x, ranks, mistakes) for x in steps]
    for rank in range(ranks):
        with RecordingWriter(path / f"rank{rank}", metadata={}) as writer:
            for step, found in enumerate(made):
                for site, tensor in found[rank].items():
                    writer.write(site, step, tensor, rank=rank)
                writer.commit(step)
    return glass.check(model, candidate=path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_model_are_right(tmp_path: Path, ranks: int) -> None:
    result = checked(tmp_path / "r", ranks=ranks)
    assert (result.ok, result.coverage, result.origins) == (True, 1.0, ())
    assert {pair.step for pair in result.pairs} == {0, 1}


@pytest.mark.parametrize(
    ("mistake", "site", "rank", "kind"),
    [
        ("shard 1", "blocks.1.up", 1, None),
        ("no sum 1", "blocks.1.down", None, "reduction"),
        ("bias 2", "blocks.2.down", None, "bias"),
        ("stale 0", "blocks.0.down", 1, None),
        ("rows 1", "blocks.1.down", 1, "rank"),
        ("no term 0", "blocks.0.down", 0, "rank"),
    ],
)
def test_a_mistake_between_ranks_is_named(
    tmp_path: Path, mistake: str, site: str, rank: int | None, kind: str | None
) -> None:
    result = checked(tmp_path / "r", mistake)
    assert not result.ok
    assert [(found.site.partition("/")[0], found.rank, found.step) for found in result.origins] == [(site, rank, 0)]
    assert kind is None or kind in {hint.evidence for hint in result.origins[0].hints}


def test_each_of_several_mistakes_is_named(tmp_path: Path) -> None:
    result = checked(tmp_path / "r", "shard 0", "bias 1", "stale 2")
    assert [(found.site.partition("/")[0], found.rank) for found in result.origins] == [
        ("blocks.0.up", 1),
        ("blocks.1.down", None),
        ("blocks.2.down", 1),
    ]


def test_ranks_with_data_of_their_own_are_judged_one_by_one(tmp_path: Path) -> None:
    model = net()
    for rank in range(2):
        with glass.record(model, tmp_path / f"rank{rank}"):
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)))
    alone = glass.check(model, candidate=tmp_path / "rank1")
    assert alone.ok and alone.coverage == 1.0
    with pytest.raises(UsageError, match="data of their own"):
        together(tmp_path)


def together(path: Path) -> Comparison:
    model = net()
    for rank in range(2):
        with RecordingWriter(path / "r" / f"rank{rank}", metadata={}) as writer:
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
            writer.write(".:in.x", 0, x, rank=rank)
            writer.write("head", 0, model(x).detach(), rank=rank)
            writer.commit(0)
    return glass.check(model, candidate=path / "r")
