"""Sides in two forms: a model inside of another module, and a flat record of a server beside one of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.compare.compare import compare
from glassengine.compare.matching.sources import OpenedSource
from glassengine.compare.normalizers import inner_model
from glassengine.errors import IncomparableError
from glassengine.recording.source import open_source
from glassengine.recording.write.writer import RecordingWriter


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.act(self.up(x)) * self.factor)
        return found


class Trainer(nn.Module):
    """Calls the model as a part of itself, with a loss of its own."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net, self.loss = net, nn.MSELoss()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.loss(self.net(batch[0]), batch[1])
        return found


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def alone(path: Path) -> Path:
    net = Net()
    with glass.record(net, path):
        net(X)
    return path


def inside(path: Path, rows: Tensor, factor: float = 1.0) -> Path:
    trainer = Trainer(Net(factor))
    with glass.record(trainer, path):
        trainer((rows, rows))
    return path


def ranks(path: Path, factor: float) -> Path:
    """Two processes with rows of their own, the second one with a factor."""
    for rank, rows in enumerate(X.chunk(2)):
        one = open_source(inside(path / f"of{rank}", rows, factor if rank else 1.0))
        with RecordingWriter(path / "all" / f"rank{rank}", metadata={}) as writer:
            for entry in one.entries:
                writer.write(entry.site, entry.step, one.tensor(entry), rank=rank)
            writer.commit(0)
    return path / "all"


def test_names_of_a_model_inside_are_those_of_the_model(tmp_path: Path) -> None:
    one, other = alone(tmp_path / "one"), inside(tmp_path / "other", X)
    found = compare(one, other)
    assert (found.ok, found.coverage, found.verdict) == (True, 1.0, "identical")
    assert found.environment["candidate"]["renamed"] == "'net' of the candidate is compared as '.'"
    around = {skipped.site for skipped in found.skipped if skipped.side == "candidate"}
    assert {"loss", "(around the model)"} <= around
    back = compare(other, one)
    assert back.verdict == "identical" and {pair.site for pair in back.pairs} >= {"net", "net:in[0]", "net.up"}
    wrong = compare(one, inside(tmp_path / "wrong", X, 1.1)).first_divergence
    assert wrong is not None and (wrong.site, wrong.candidate_site) == ("down:in[0]", "down:in[0]")


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_ranks_of_a_model_inside(factor: float, tmp_path: Path) -> None:
    found = compare(alone(tmp_path / "one"), ranks(tmp_path, factor))
    if factor == 1:
        assert (found.ok, found.coverage) == (True, 1.0)
        return
    first = found.first_divergence
    assert not found.ok and first is not None and (first.site, first.rank) == ("down:in[0]", 1)


def test_names_that_fit_in_part_are_left_alone(tmp_path: Path) -> None:
    """Another model with a module of the same name is no model inside of another; nor is one that shares names."""
    one = alone(tmp_path / "one")
    with RecordingWriter(tmp_path / "other", metadata={}) as writer:
        for site in ("net.up", "net.left", "net.right"):
            writer.write(site, 0, X)
        writer.commit(0)
    with pytest.raises(IncomparableError, match="nothing to compare"):
        compare(one, tmp_path / "other")
    sides = OpenedSource(open_source(one)), OpenedSource(open_source(one))
    assert inner_model(*sides) == sides


SITES = [f"model.layers.{layer}.mlp" for layer in range(6)]


def flat_file(path: Path, *, flat: set[str] = frozenset(), changed: str = "") -> Path:  # type: ignore[assignment]
    torch.manual_seed(0)
    values = {site: torch.randn(1, 5, 8) for site in SITES} | {"logits": torch.randn(1, 16)}
    if changed:
        values[changed] = values[changed].roll(1, 1)
    save_file({name: value[0].clone() if name in flat else value for name, value in values.items()}, path)
    return path


def test_a_flat_record_is_compared_as_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, flat = flat_file(tmp_path / "rows.safetensors"), flat_file(tmp_path / "flat.safetensors", flat={*SITES})
    for one, other, side in ((rows, flat, "candidate"), (flat, rows, "baseline")):
        found = glass.compare(one, other)
        assert found.ok and found.verdict == "identical"
        assert found.environment[side]["flat"] == {"flat [5, 8] for [1, 5, 8]": 6}
    assert main(["compare", str(rows), str(flat)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no dimension for rows (flat [5, 8] for [1, 5, 8]): 6 of its tensors" in said


def test_errors_in_a_flat_record_are_wrong(tmp_path: Path) -> None:
    rows = flat_file(tmp_path / "rows.safetensors")
    found = glass.compare(rows, flat_file(tmp_path / "flat.safetensors", flat={*SITES}, changed=SITES[3]))
    assert not found.ok and [pair.site for pair in found.pairs if pair.verdict == "wrong"] == [SITES[3]]


def test_one_tensor_without_the_dimension_is_a_mistake(tmp_path: Path) -> None:
    rows = flat_file(tmp_path / "rows.safetensors")
    found = glass.compare(rows, flat_file(tmp_path / "other.safetensors", flat={SITES[2]}))
    assert not found.ok and [pair.site for pair in found.pairs if pair.verdict == "wrong"] == [SITES[2]]
