"""Programs on disk: small, complete, and refused when something does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.observers import run_program
from glassengine.errors import CorruptError
from glassengine.program.export.export import export_module
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import SCHEMA_VERSION, load_names, load_program, save_program

Exported = Callable[[str], tuple[nn.Module, Program]]


def weights_of(program: Program) -> dict[str, torch.Tensor]:
    return {**program.exported.state_dict, **program.exported.constants}


def inputs_of(program: Program) -> dict[str, torch.Tensor]:
    assert program.layout is not None
    ids = torch.arange(3, 12).reshape(1, 9)
    mask = (torch.arange(12) < 9).long()[None]
    named = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(9)[None]}
    return {**named, "cache_position": torch.arange(9), **program.layout.allocate(1, 12, torch.float32)}


@pytest.fixture
def saved(exported: Exported, tmp_path: Path) -> tuple[Program, Path]:
    _, program = exported("llama")
    save_program(program, tmp_path)
    return program, tmp_path


def test_a_program_survives_without_its_weights(saved: tuple[Program, Path]) -> None:
    program, directory = saved
    weights = weights_of(program)
    assert {file.name for file in directory.iterdir()} == {"program.pt2", "program.json"}
    loaded = load_program(directory, weights)
    assert list(loaded.sites) == list(program.sites)
    for name in ("kind", "inputs", "output_nodes", "caches", "layout", "metadata", "called_as"):
        assert getattr(loaded, name) == getattr(program, name), name
    # Shared, not copied; and the program that was saved still has its own.
    for name, tensor in loaded.exported.state_dict.items():
        assert tensor.data_ptr() == weights[name].data_ptr(), name
    assert not any(tensor.is_meta for tensor in program.weights().values())
    inputs = inputs_of(program)
    expected, actual = run_program(program, inputs), run_program(loaded, inputs)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])  # tied weights; lifted constants
def test_a_program_with_tied_weights_and_added_outputs(exported: Exported, family: str, tmp_path: Path) -> None:
    _, program = exported(family)
    node = program.sites.resolve(["re:/linear.0$|/addmm.0$"])[0].node
    watched = add_outputs(program, [node])
    save_program(watched, tmp_path)
    loaded = load_program(tmp_path, weights_of(watched))
    inputs = inputs_of(watched)
    expected, actual = run_program(watched, inputs), run_program(loaded, inputs)
    assert f"dbg.{node}" in actual
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_weights_are_not_in_the_file(tmp_path: Path) -> None:
    """A module whose weights are far larger than its graph."""
    program = export_module(nn.Linear(1024, 1024), {"input": torch.ones(1, 1024)})
    save_program(program, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200_000


class Table(nn.Module):
    """A large tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(200_000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def test_a_lifted_constant_is_not_in_the_file_either(tmp_path: Path) -> None:
    program = export_module(Table(), {"x": torch.zeros(1)})
    save_program(program, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000
    loaded = load_program(tmp_path, weights_of(program))
    assert torch.equal(run_program(loaded, {"x": torch.zeros(1)})["output"], torch.arange(200_000.0))


def renamed(weights: dict[str, Any], change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    name = "user.model.layers.0.mlp.up_proj.weight"
    changed = change(weights[name])
    return {**{k: v for k, v in weights.items() if k != name}, **({} if changed is None else {name: changed})}


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda w: None, "nothing"),
        (lambda w: w[:-1], r"torch.float32 \(127, 64\)"),
        (lambda w: w.double(), r"torch.float64 \(128, 64\)"),
    ],
)
def test_weights_that_do_not_fit(saved: tuple[Program, Path], change: Callable[[torch.Tensor], Any], got: str) -> None:
    program, directory = saved
    with pytest.raises(CorruptError, match=rf"up_proj.weight' does not fit[\s\S]*{got}[\s\S]*\(128, 64\)"):
        load_program(directory, renamed(weights_of(program), change))


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"nonsense" * 100])
def test_a_damaged_graph(saved: tuple[Program, Path], damage: Callable[[bytes], bytes]) -> None:
    program, directory = saved
    path = directory / "program.pt2"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptError, match=r"program.pt2 cannot be read\n.*got"):
        load_program(directory, weights_of(program))


def test_a_missing_file(saved: tuple[Program, Path]) -> None:
    program, directory = saved
    (directory / "program.pt2").unlink()
    with pytest.raises(CorruptError, match=r"cannot be read\n.*program.pt2"):
        load_program(directory, weights_of(program))
    (directory / "program.json").unlink()
    with pytest.raises(CorruptError, match=r"program.json"):
        load_names(directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {**data, "sites": data["sites"] * 2},
        lambda data: {**data, "sites": 3},
        lambda data: {**data, "sites": [{"name": "x"}]},
        lambda data: {**data, "inputs": [{"name": "x"}]},
        lambda data: {**data, "layout": [[1]]},
        lambda data: {k: v for k, v in data.items() if k != "caches"},
        lambda data: {k: v for k, v in data.items() if k != "schema_version"},
    ],
)
def test_names_that_are_damaged(saved: tuple[Program, Path], change: Callable[[Any], Any]) -> None:
    path = saved[1] / "program.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CorruptError, match=r"program.json"):
        load_names(saved[1])


@pytest.mark.parametrize("text", ["{", "", "\0" * 10, "[" * 100_000])
def test_names_that_are_no_json(saved: tuple[Program, Path], text: str) -> None:
    (saved[1] / "program.json").write_text(text)
    with pytest.raises(CorruptError, match=r"program.json"):
        load_names(saved[1])


def test_names_of_another_graph(saved: tuple[Program, Path]) -> None:
    program, directory = saved
    path = directory / "program.json"
    data = json.loads(path.read_text())
    data["output_nodes"]["logits"] = "another"
    path.write_text(json.dumps(data))
    with pytest.raises(CorruptError, match=r"does not belong to program.pt2\n.*another"):
        load_program(directory, weights_of(program))


def test_a_newer_schema_is_refused_politely(saved: tuple[Program, Path]) -> None:
    path = saved[1] / "program.json"
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1, "new": "content"}))
    with pytest.raises(CorruptError, match=r"written by a newer version[\s\S]*version 2\n.*at most 1\n.*update"):
        load_names(saved[1])
