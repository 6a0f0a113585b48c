"""Runs of many kinds of meshes against one process and against each other: right ones pass, mistakes are named."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glassengine.cli.main import main
from glassengine.compare import compare
from glassengine.recording.layout.layout import Sharding
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison

VOCAB, WIDTH, INNER, LAYERS, ROWS, LENGTH = 24, 8, 16, 4, 4, 8

Change = Callable[[int, str, Tensor], Tensor]
"""Gets rank, site and what is right there; returns what the rank has."""


def _weights() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    found = {"embed": torch.randn(VOCAB, WIDTH, generator=made)}
    for layer in range(LAYERS):
        for name, shape in (("up", (INNER, WIDTH)), ("down", (WIDTH, INNER)), ("bias", (WIDTH,))):
            found[f"{layer}.{name}"] = torch.randn(*shape, generator=made) * 0.5
    found["head"] = torch.randn(VOCAB, WIDTH, generator=made)
    return found


WEIGHTS = _weights()
IDS = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))


@dataclass
class Mesh:
    """Who has what: each rank its rows, its positions, its share of the weights, its layers.

    Attributes:
        rows: Rank -> rows of the batch.
        positions: Rank -> positions.
        share: Rank -> (which, of how many) shares of every weight.
        layers: Rank -> the layers it has; all others are computed by its peers in other stages.
        peers: Rank -> the ranks that share the work on the same rows, in order of their shares.
        change: What goes wrong.
        numbers_anew: Layers are counted from 0 in each stage.
        reduces: Whether the results of row-parallel layers are added up; by layer.
    """

    rows: Mapping[int, Tensor]
    positions: Mapping[int, Tensor]
    share: Mapping[int, tuple[int, int]]
    peers: Mapping[int, Sequence[int]]
    layers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    change: Change = lambda rank, site, right: right
    numbers_anew: bool = False
    reduces: Callable[[int], bool] = lambda layer: True

    def run(self) -> list[dict[str, Tensor]]:
        """Return the tensors of every rank in order of execution."""
        ranks = sorted(self.rows)
        found: list[dict[str, Tensor]] = [{} for _ in ranks]
        x: dict[int, Tensor] = {}

        def note(rank: int, site: str, right: Tensor) -> Tensor:
            own = self.change(rank, site, right)
            if self.numbers_anew:
                first_own = min(self.layers[rank])
                site = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) - first_own), site)
            found[rank][site] = own
            return own

        first, last = self.layers_of(ranks[0])[0], LAYERS - 1
        for rank in ranks:
            if first not in self.layers_of(rank):
                continue
            ids = note(rank, ".:in[0]", IDS[self.rows[rank]][:, self.positions[rank]])
            x[rank] = note(rank, "embed", WEIGHTS["embed"][ids])
        for layer in range(LAYERS):
            here = [rank for rank in ranks if layer in self.layers_of(rank)]
            if layer and here[0] not in x:
                # From the stage before, rank by rank.
                before = [rank for rank in ranks if layer - 1 in self.layers_of(rank)]
                for one, other in zip(before, here, strict=True):
                    note(one, ".", x[one])
                    x[other] = note(other, ".:in[0]", x[one])
            part = {}
            for rank in here:
                which, count = self.share[rank]
                note(rank, f"layers.{layer}:in[0]", x[rank])
                y = note(rank, f"layers.{layer}.norm", torch.nn.functional.layer_norm(x[rank], (WIDTH,)))
                up = note(rank, f"layers.{layer}.up", y @ WEIGHTS[f"{layer}.up"].chunk(count)[which].T)
                act = note(rank, f"layers.{layer}.act", up.tanh())
                part[rank] = act @ WEIGHTS[f"{layer}.down"].chunk(count, 1)[which].T
            for rank in here:
                peers = self.peers[rank] if self.reduces(layer) else [rank]
                total = torch.stack([part[one] for one in peers]).sum(0)
                down = note(rank, f"layers.{layer}.down", total + WEIGHTS[f"{layer}.bias"])
                x[rank] = note(rank, f"layers.{layer}", x[rank] + down)
            if layer == last:
                for rank in here:
                    note(rank, ".", note(rank, "head", x[rank] @ WEIGHTS["head"].T))
        return found

    def layers_of(self, rank: int) -> Sequence[int]:
        """Return the layers a rank has."""
        return self.layers.get(rank, range(LAYERS))


def mesh(
    data: int = 1,
    context: int = 1,
    tensor: int = 1,
    stages: int = 1,
    *,
    data_is_inner: bool = False,
    zigzag: bool = False,
) -> Mesh:
    """Return a regular mesh; ranks that share the work on the same rows are beside one another, or far apart."""
    world = data * context * tensor * stages
    rows, positions, share, layers, place = {}, {}, {}, {}, {}
    for rank in range(world):
        rest = rank
        stage, rest = divmod(rest, data * context * tensor)
        if data_is_inner:
            which, rest = divmod(rest, data * context)
            d, c = divmod(rest, context)
        else:
            rest, which = divmod(rest, tensor)
            d, c = divmod(rest, context)
        place[rank] = (stage, d, c)
        rows[rank] = torch.arange(ROWS).chunk(data)[d]
        chunks = torch.arange(LENGTH).chunk(2 * context)
        positions[rank] = torch.cat([chunks[c], chunks[-1 - c]]) if zigzag else torch.arange(LENGTH).chunk(context)[c]
        share[rank] = (which, tensor)
        layers[rank] = tuple(torch.arange(LAYERS).chunk(stages)[stage].tolist())
    peers = {
        rank: sorted((other for other in place if place[other] == place[rank]), key=lambda other: share[other][0])
        for rank in place
    }
    return Mesh(rows, positions, share, peers, layers)


def write(path: Path, tensors: Mapping[str, Tensor], *, rank: int = 0) -> Path:
    """Record tensors as one step, whose token ids are its integer inputs."""
    with RecordingWriter(path, metadata={}) as w:
        for site, tensor in tensors.items():
            w.write(site, 0, tensor, rank=rank)
        ids = tensors.get(".:in[0]")
        rows = ids.tolist() if ids is not None and not ids.is_floating_point() else []
        w.commit(0, token_ids=rows)
    return path


def write_ranks(path: Path, each: Sequence[Mapping[str, Tensor]]) -> Path:
    """Record each rank beside the others."""
    for rank, tensors in enumerate(each):
        write(path / f"rank{rank}", tensors, rank=rank)
    return path


MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tensor": 2},
    "dp": {"data": 2},
    "tp x dp": {"data": 2, "tensor": 2},
    "dp x tp": {"data": 2, "tensor": 2, "data_is_inner": True},
    "tp4 x dp2": {"data": 2, "tensor": 4},
    "cp": {"context": 2},
    "cp zigzag": {"context": 2, "zigzag": True},
    "cp zigzag x tp x dp": {"data": 2, "context": 2, "tensor": 2, "zigzag": True},
    "pp": {"stages": 2},
    "pp4": {"stages": 4},
    "pp x tp x dp": {"data": 2, "tensor": 2, "stages": 2},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("one") / "r", mesh().run()[0])


def judged(one: Path, path: Path, of: Mesh) -> Comparison:
    return compare(one, write_ranks(path, of.run()))


@pytest.mark.parametrize("numbers_anew", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_f12_f13_right_runs_on_any_mesh_are_right(name: str, numbers_anew: bool, one: Path, tmp_path: Path) -> None:
    if numbers_anew and "pp" not in name:
        return
    result = judged(one, tmp_path / "r", dataclasses.replace(mesh(**MESHES[name]), numbers_anew=numbers_anew))
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    assert result.counts["unmatched_candidate"] == 0


SITES = ["embed", "layers.0.up", "layers.1.act", "layers.2.norm", "layers.3.down", "layers.1", "head"]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["tp x dp", "dp x tp", "cp zigzag x tp x dp", "pp x tp x dp"])
def test_f12_mistakes_on_a_mesh_are_charged_to_the_right_op_and_rank(
    name: str, site: str, one: Path, tmp_path: Path
) -> None:
    of = mesh(**MESHES[name])
    rank = max(rank for rank, found in enumerate(of.run()) if site in found)

    def change(at: int, where: str, right: Tensor) -> Tensor:
        return right * 1.01 + 0.1 if (at, where) == (rank, site) else right

    found = judged(one, tmp_path / "r", dataclasses.replace(of, change=change)).first_divergence
    assert found is not None and (found.site, found.rank) == (site, rank)


@pytest.mark.parametrize("numbers_anew", [False, True])
@pytest.mark.parametrize("site", ["layers.0.up", "layers.2.norm", "layers.3.down"])
def test_f13_mistakes_in_stages_that_count_anew(site: str, numbers_anew: bool, one: Path, tmp_path: Path) -> None:
    def change(at: int, where: str, right: Tensor) -> Tensor:
        return right * 1.01 + 0.1 if where == site else right

    of = dataclasses.replace(mesh(stages=2), change=change, numbers_anew=numbers_anew)
    found = judged(one, tmp_path / "r", of).first_divergence
    assert found is not None and found.site == site


@pytest.mark.parametrize("name", ["tp", "tp x dp", "pp x tp x dp"])
@pytest.mark.parametrize("layer", [0, 3])
def test_f14_a_reduction_that_is_missing_behind_a_bias(name: str, layer: int, one: Path, tmp_path: Path) -> None:
    of = dataclasses.replace(mesh(**MESHES[name]), reduces=lambda at: at != layer)
    found = judged(one, tmp_path / "r", of).first_divergence
    assert found is not None and found.site == f"layers.{layer}.down"
    assert found.hints[0].evidence == "reduction" and "each rank adds the bias" in found.hints[0].text


def _planted() -> list[tuple[str, str, int]]:
    return [
        *(("tp", site, 1) for site in SITES if site != "embed"),
        ("tp4 x dp2", "layers.0.up", 5),
        ("dp", "layers.2.act", 1),
        ("pp", "layers.1.down", 0),
        ("pp", "layers.2.norm", 1),
        ("pp x tp x dp", "layers.3.up", 7),
        ("cp zigzag", "embed", 1),
    ]


@pytest.mark.parametrize(("name", "site", "rank"), _planted())
def test_f11_ranks_against_ranks_name_op_and_rank(name: str, site: str, rank: int, tmp_path: Path) -> None:
    of = mesh(**MESHES[name])

    def change(at: int, where: str, right: Tensor) -> Tensor:
        return right * 1.01 + 0.1 if (at, where) == (rank, site) else right

    right = write_ranks(tmp_path / "x", of.run())
    wrong = write_ranks(tmp_path / "y", dataclasses.replace(of, change=change).run())
    result = compare(right, wrong)
    found = result.first_divergence
    assert found is not None and (found.site, found.rank) == (site, rank)
    assert result.to_dict()["first_divergence"]["rank"] == rank
    assert compare(right, right).verdict == "identical"


def test_f11_what_all_ranks_have_wrong_is_no_single_ranks(tmp_path: Path) -> None:
    of = mesh(tensor=2)
    right = write_ranks(tmp_path / "x", of.run())
    unreduced = write_ranks(tmp_path / "y", dataclasses.replace(of, reduces=lambda layer: layer != 1).run())
    found = compare(right, unreduced).first_divergence
    assert found is not None and (found.site, found.rank) == ("layers.1.down", None)
    assert found.hints[0].evidence == "reduction"


def test_f11_the_screen_names_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = mesh(tensor=2)

    def change(at: int, where: str, right: Tensor) -> Tensor:
        return right + 1 if (at, where) == (1, "layers.1.up") else right

    right = write_ranks(tmp_path / "x", of.run())
    wrong = write_ranks(tmp_path / "y", dataclasses.replace(of, change=change).run())
    assert main(["compare", str(right), str(wrong)]) == 1
    assert "first divergence: step 0, layers.1.up (rank 1)" in capsys.readouterr().out


def test_f13_an_embedding_whose_rows_are_spread(one: Path, tmp_path: Path) -> None:
    """An embedding counts from its own first row and gives zeros for others; the results are added up behind it."""
    whole = mesh().run()[0]
    norm = torch.nn.LayerNorm(WIDTH, bias=True)
    norm.requires_grad_(False).bias.fill_(0.1)
    whole = {".:in[0]": IDS, "embed:in[0]": IDS, **whole, "layers.0.norm": norm(whole["embed"])}
    each: list[dict[str, Tensor]] = []
    for rank, table in enumerate(WEIGHTS["embed"].chunk(2)):
        start = rank * len(table)
        is_there = (start <= IDS) & (start + len(table) > IDS)
        own = (IDS - start).masked_fill(~is_there, 0)
        part = table[own].masked_fill(~is_there[..., None], 0)
        each.append({**whole, "embed:in[0]": own, "embed": part})
    x = write(tmp_path / "x", whole)
    result = compare(x, write_ranks(tmp_path / "y", each))
    assert result.ok, result.first_divergence
    # What is never added up is still a mistake, and so are numbers of rows that nobody has.
    unreduced = [{**one, "layers.0:in[0]": one["embed"], "layers.0.norm": norm(one["embed"])} for one in each]
    found = compare(x, write_ranks(tmp_path / "z", unreduced)).first_divergence
    assert found is not None and (found.site, found.hints[0].evidence) == ("embed", "reduction")
    shifted = [each[0], {**each[1], "embed:in[0]": each[1]["embed:in[0]"].roll(1, -1)}]
    found = compare(x, write_ranks(tmp_path / "w", shifted)).first_divergence
    assert found is not None and found.site == "embed:in[0]"


def test_f13_experts_that_each_rank_counts_anew(tmp_path: Path) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    tables = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
    outputs = [x @ table for table in tables]
    common = {"gate": x.softmax(-1), "moe": torch.stack(outputs).sum(0)}
    whole = {"gate": common["gate"], **{f"moe.experts.{i}": y for i, y in enumerate(outputs)}, "moe": common["moe"]}
    each = [
        {"gate": common["gate"], **{f"moe.experts.{i}": outputs[2 * rank + i] for i in range(2)}, "moe": common["moe"]}
        for rank in range(2)
    ]
    baseline = write(tmp_path / "x", whole)
    result = compare(baseline, write_ranks(tmp_path / "y", each))
    assert (result.ok, result.coverage) == (True, 1.0)
    each[1]["moe.experts.0"] = each[1]["moe.experts.0"] * 1.1
    found = compare(baseline, write_ranks(tmp_path / "z", each)).first_divergence
    assert found is not None and found.site == "moe.experts.2"


@pytest.mark.parametrize("names_ranks", [True, False])
def test_f12_each_row_of_a_mesh_spreads_a_tensor_of_its_own(names_ranks: bool, tmp_path: Path) -> None:
    of = mesh(data=2, tensor=2)
    whole, each = mesh().run()[0], of.run()

    def record(path: Path, change: int | None = None) -> Path:
        for rank, tensors in enumerate(each):
            group = (0, 1) if rank < 2 else (2, 3)
            with RecordingWriter(path / f"rank{rank}", metadata={}) as w:
                for site, tensor in tensors.items():
                    sharding = None
                    if site.endswith((".up", ".act")):
                        shape = (*tensor.shape[:2], INNER)
                        ranks = group if names_ranks else ()
                        sharding = Sharding(shape, ("S(2)",), (2,), (), (rank % 2,), ranks)
                    is_wrong = rank == change and site == "layers.1.up"
                    w.write(site, 0, tensor + 1 if is_wrong else tensor, rank=rank, sharding=sharding)
                w.commit(0)
        return path

    x = write(tmp_path / "x", whole)
    result = compare(x, record(tmp_path / "y"))
    assert (result.ok, result.coverage) == (True, 1.0), result.skipped
    # Under distributed tensors, too, the rank is named.
    found = compare(x, record(tmp_path / "z", 2)).first_divergence
    assert found is not None and (found.site, found.rank) == ("layers.1.up", 2)
    assert found.hints[0].evidence == "rank"


def test_f12_shares_of_a_share(tmp_path: Path) -> None:
    """A weight that is spread for tensor parallelism first, and what each has of it over the data-parallel ranks."""
    weight = torch.randn(8, 3)
    x = write(tmp_path / "x", {"w:param": weight})
    for rank in range(4):
        data, tensor = divmod(rank, 2)
        part = weight.chunk(2)[tensor].chunk(2)[data]
        sharding = Sharding((8, 3), ("_S(0, 2)", "S(0)"), (2, 2), ("dp", "tp"), (data, tensor), (0, 1, 2, 3))
        with RecordingWriter(tmp_path / "y" / f"rank{rank}", metadata={}) as w:
            w.write("w:param", 0, part, rank=rank, sharding=sharding)
            w.commit(0)
    assert compare(x, tmp_path / "y").verdict == "identical"


def test_f14_hints_of_many_ranks_are_found_in_no_time(tmp_path: Path) -> None:
    whole = torch.randn(64, 1024)
    parts = list(whole.chunk(64, 1))
    parts[3], parts[40] = parts[40], parts[3]
    x = write(tmp_path / "x", {"y": whole})
    y = write_ranks(tmp_path / "y", [{"y": part} for part in parts])
    start = time.process_time()
    found = compare(x, y).first_divergence
    assert time.process_time() - start < 60
    assert found is not None and found.hints[0].evidence == "order"
    assert "with the part of rank 40 for 3, 3 for 40 they agree" in found.hints[0].text
