"""Distributed tensors: recorded is the part of this process, and what the whole is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from glassengine.capture.record import record
from glassengine.cli.main import main
from glassengine.recording.layout.layout import Sharding
from glassengine.recording.layout.records import sharding_from
from glassengine.recording.reader import Recording

tensor_parallel = pytest.importorskip("torch.distributed.tensor")

WHOLE = torch.arange(12.0).view(3, 4)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    finally:
        distributed.destroy_process_group()


def _spread(mesh: Any, *placements: Any) -> torch.Tensor:
    spread: torch.Tensor = tensor_parallel.distribute_tensor(WHOLE, mesh, list(placements))
    return spread


def test_placements_mesh_and_the_shape_of_the_whole(
    mesh: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Identity()
    replicate, shard, partial = tensor_parallel.Replicate(), tensor_parallel.Shard(1), tensor_parallel.Partial()
    with record(model, tmp_path / "r"):
        model(_spread(mesh, replicate, shard))
        # The same site, dtype and shape, spread otherwise.
        model(tensor_parallel.DTensor.from_local(WHOLE, mesh, [replicate, partial]))
        model(WHOLE)
    opened = Recording.open(tmp_path / "r")
    same = {"shape": (3, 4), "mesh": (1, 1), "names": ("data", "tensor"), "coordinate": (0, 0), "ranks": (0,)}
    assert opened.entry(".", 0).sharding == Sharding(placements=("R", "S(1)"), **same)  # type: ignore[arg-type]
    assert opened.entry(".", 1).sharding == Sharding(placements=("R", "P(sum)"), **same)  # type: ignore[arg-type]
    assert opened.entry(".", 2).sharding is None
    assert all(torch.equal(opened.tensor(".", step), WHOLE) for step in range(3))
    assert main(["show", str(tmp_path / "r"), "."]) == 0
    assert "step 0, rank 0, .: shard R S(1) of [3,4] on a mesh of [1,1]" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "r"), "--json", "--step", "0"]) == 0
    (found,) = [item for item in json.loads(capsys.readouterr().out)["tensors"] if item["site"] == "."]
    assert found["sharding"]["placements"] == ["R", "S(1)"] and found["sharding"]["shape"] == [3, 4]


def test_parameters_and_their_gradients(mesh: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(_spread(mesh, tensor_parallel.Replicate(), tensor_parallel.Shard(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = _spread(mesh, tensor_parallel.Replicate(), tensor_parallel.Replicate())
    with record(model, tmp_path / "r", gradients=True, optimizer=optimizer):
        model(x).sum().backward()
        optimizer.step()
    opened = Recording.open(tmp_path / "r")
    for site in ("weight:grad", "weight:param", ":grad_out"):
        site = f".{site}" if site.startswith(":") else site
        assert opened.entry(site, 0).sharding is not None
    assert opened.entry("weight:param", 0).sharding.placements == ("R", "S(0)")  # type: ignore[union-attr]


def test_gradients_are_those_that_all_ranks_agree_on(mesh: Any, tmp_path: Path) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))

    def doubled(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and not at their text
        # In place of an average over ranks, of which there is one.
        done = torch.futures.Future()
        done.set_result(bucket.buffer() * 2)
        return done

    model.register_comm_hook(None, doubled)
    with record(model, tmp_path / "r", gradients=True):
        for _ in range(2):
            model.zero_grad()
            model(WHOLE).sum().backward()
    opened = Recording.open(tmp_path / "r")
    for name, parameter in model.module.named_parameters():
        assert torch.equal(opened.tensor(f"{name}:grad", 1), parameter.grad), name


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1]},
        {"shape": None},
        {"placements": [1, 2]},
        {"placements": ["R"]},
        {"mesh": [2]},
        {"names": ["a"]},
        {"names": "ab"},
        {"coordinate": [0]},
        {"coordinate": ["0", "0"]},
    ],
)
def test_shardings_named_by_a_file_are_not_trusted(change: dict[str, Any]) -> None:
    good = {"shape": [2], "placements": ["R", "S(0)"], "mesh": [2, 1], "names": [], "coordinate": [1, 0]}
    assert sharding_from(good) == Sharding((2,), ("R", "S(0)"), (2, 1), (), (1, 0))
    assert sharding_from(None) is None
    bad: object
    for bad in ({**good, **change}, [], "x"):
        with pytest.raises(ValueError, match="sharding"):
            sharding_from(bad)


class Subclass(nn.parallel.DistributedDataParallel):
    """What a training framework makes of it."""


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, Subclass])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_wrappers_are_no_part_of_a_name(wrap: Any, is_compiled: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with record(model, tmp_path / "plain", gradients=True):
        model(WHOLE).sum().backward()
    wrapped = wrap(torch.compile(model, backend="eager") if is_compiled else model)
    with record(wrapped, tmp_path / "r", gradients=True):
        wrapped(WHOLE).sum().backward()
    opened, plain = Recording.open(tmp_path / "r"), Recording.open(tmp_path / "plain")
    inside = {site for site in plain.sites() if site[0].isdigit() and not site.endswith((".weight:grad", ".bias:grad"))}
    assert set(opened.sites()) == set(plain.sites()) - (inside if is_compiled else set())
    assert set(opened.metadata.get("not_seen", ())) == ({"0", "1"} if is_compiled else set())
