"""Engines of plain modules, checked inputs, and the stored program with its weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.capture.observers import run_program
from glassengine.engine import Engine
from glassengine.errors import CorruptError, UsageError
from glassengine.testing import models


class MLP(nn.Module):
    """The example of the TensorRT-LLM document, as a user ports it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 8)
        self.proj = nn.Linear(8, 4)

    register_network_output = glass.compat.register_network_output

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        inter = torch.relu(self.fc(hidden_states)) * scale
        self.register_network_output("inter", inter)
        return self.proj(inter)


STEPS = [{"hidden_states": torch.randn(size, 4), "scale": 2.0} for size in (3, 5)]


@pytest.fixture(scope="module")
def module_engine() -> Engine:
    return glass.build(MLP(), backend="eager", inputs=STEPS)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow), "onnxruntime"])
def test_outputs_by_name(backend: str) -> None:
    module = MLP()
    engine = glass.build(module, backend=backend, inputs=STEPS)
    x = torch.randn(7, 4)
    outputs = engine(hidden_states=x, scale=2.0)
    assert list(outputs) == ["output", "inter"]
    torch.testing.assert_close(outputs["inter"], torch.relu(module.fc(x)) * 2)
    torch.testing.assert_close(outputs["output"], module(x, 2.0))
    assert engine.manifest.kind == "module" and engine.manifest.max_batch_size is None


def test_temporary_directory_lives_as_long_as_the_engine() -> None:
    engine = glass.build(nn.ReLU(), backend="eager", inputs={"input": torch.zeros(2)})
    directory = engine.directory
    assert directory.is_dir()
    del engine
    assert not directory.parent.exists()


def test_failed_build_leaves_no_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="unknown site"):
        glass.build(nn.ReLU(), backend="eager", inputs={"input": torch.zeros(2)}, add_output=["nothing"])
    assert list(tmp_path.iterdir()) == []


def test_taps_and_outputs_asked_for() -> None:
    engine = glass.build(MLP(), backend="eager", inputs=STEPS, add_output=["fc=first"])
    assert list(engine(**STEPS[0])) == ["output", "first", "inter"]


def test_named_results_and_vision() -> None:
    model = models.vision()
    engine = glass.build(model, backend="eager", inputs=models.vision_inputs(), add_output=["norm"])
    outputs = engine(**models.vision_inputs())
    expected = model(**models.vision_inputs())
    assert list(outputs) == ["logits", "patches", "norm"]
    torch.testing.assert_close(outputs["logits"], expected["logits"])


def test_inputs_of_a_module_are_made_up_where_none_are_given() -> None:
    assert glass.build(MLP(), backend="eager")


def test_factory_with_inputs_from_a_file(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("import torch\ndef model():\n    return torch.nn.Linear(2, 3)\n")
    torch.save({"input": torch.ones(4, 2)}, tmp_path / "inputs.pt")
    engine = glass.build(f"{code}:model", tmp_path / "e", backend="eager", inputs=str(tmp_path / "inputs.pt"))
    assert engine(input=torch.ones(4, 2))["output"].shape == (4, 3)
    # Nothing of an engine is ever run: the weights are stored, the factory is not called again.
    code.unlink()
    assert glass.load(tmp_path / "e").program.weights()


def call(engine: Engine, **inputs: Any) -> str:
    with pytest.raises(UsageError, match="do not fit the engine") as caught:
        engine(**inputs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        (
            torch.zeros(3, 4, dtype=torch.float64),
            r"hidden_states  float64  cpu +\[3, 4\] .* dtype must be float32 +pass \.to\(torch\.float32\)",
        ),
        (torch.zeros(3, 4, device="meta"), r"float32  meta +\[3, 4\] .* must be on the CPU +pass \.cpu\(\)"),
        (torch.zeros(3, 5), r"dimension 1 must be 4  build with --inputs of two steps that differ in it"),
        (torch.zeros(1, 4), r"dimension 0 must be 2 to any"),
        (torch.zeros(4), r"pass 2 dimensions"),
    ],
    ids=["dtype", "device", "shape", "range", "dimensions"],
)
def test_input_that_does_not_fit(module_engine: Engine, tensor: torch.Tensor, row: str) -> None:
    message = call(module_engine, hidden_states=tensor, scale=2.0)
    assert re.search(row, message), message
    assert "built for" in message and "float32 cpu [2.., 4]" in message


def test_missing_and_unknown_inputs_share_one_table(module_engine: Engine) -> None:
    message = call(module_engine, hidden=torch.zeros(3, 4))
    lines = [line.split() for line in message.splitlines()]
    assert any(line[:1] == ["hidden_states"] and "missing" in line for line in lines)
    assert any(line[:1] == ["hidden"] and line[-6:-3] == ["not", "an", "input"] for line in lines)


def test_value_that_was_built_in(module_engine: Engine) -> None:
    assert "its value was built in" in call(module_engine, hidden_states=torch.zeros(3, 4), scale=3.0)
    module_engine(hidden_states=torch.zeros(3, 4))  # left out: the built value holds


def test_unknown_plain_value(module_engine: Engine) -> None:
    assert "its value was built in" in call(module_engine, hidden_states=torch.zeros(3, 4), bias=True)


class Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b["x"], a * 2


def test_sizes_that_must_agree_and_nested_inputs() -> None:
    steps = [{"a": torch.zeros(n, 2), "b": {"x": torch.zeros(n, 2)}} for n in (3, 5)]
    engine = glass.build(Pair(), backend="eager", inputs=steps)
    assert engine(a=torch.ones(4, 2), b={"x": torch.ones(4, 2)})["0"].eq(2).all()
    assert "as in the inputs above" in call(engine, a=torch.ones(4, 2), b={"x": torch.ones(5, 2)})


def test_generating_engine_is_not_called(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"engine\.generate\(PROMPT\)"):
        engine(input_ids=torch.zeros(1, 1))


def test_sites_of_an_engine(engine: Engine) -> None:
    assert engine.sites.match("layers.1.mlp")[0].name == "model.layers.1.mlp"
    assert [site.name for site in glass.sites(engine.directory, "layers.1.mlp")] == ["model.layers.1.mlp"]


def logits_of_program(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    session = engine.session(1, 4, debug=True)
    session.prefill(ids)
    inputs = {
        key: value for key, value in session.debug_buffers.items() if key in {e.name for e in engine.manifest.inputs}
    }
    return run_program(engine.program, inputs)["logits"]


@pytest.mark.parametrize("name", ["engine", "frozen_engine"])
def test_stored_program_has_the_weights(name: str, model: Any, request: pytest.FixtureRequest) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    actual = logits_of_program(request.getfixturevalue(name), ids)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def changed_checkpoint(frozen_engine: Engine, checkpoint: Path, tmp_path: Path) -> Callable[[], Engine]:
    """Return a function that loads an engine whose checkpoint has since got other weights."""

    def make() -> Engine:
        other = tmp_path / "other"
        shutil.copytree(checkpoint, other)
        changed = models.llama(vocab_size=259)
        with torch.no_grad():
            next(changed.parameters()).add_(1)
        changed.save_pretrained(other)
        engine = glass.load(frozen_engine.directory)
        engine.manifest.model["directory"] = str(other)
        return engine

    return make


def test_changed_checkpoint_is_refused(changed_checkpoint: Callable[[], Engine]) -> None:
    with pytest.raises(CorruptError, match="the checkpoint was changed since the engine was built"):
        _ = changed_checkpoint().program


def test_vanished_checkpoint(frozen_engine: Engine, tmp_path: Path) -> None:
    engine = glass.load(frozen_engine.directory)
    engine.manifest.model["directory"] = str(tmp_path / "gone")
    with pytest.raises(UsageError, match="gone"):
        _ = engine.program
    engine.generate(input_ids=[[5]], max_new_tokens=2, debug=True)  # running needs no checkpoint


def test_values_that_depend_on_weights_alone(tmp_path: Path) -> None:
    # Gemma adds 1 to its norm weights in the graph: such nodes are computed from the weights when they are read.
    engine = glass.build(models.gemma3(), tmp_path / "e", backend="eager", add_output=["re:^model.norm/"])
    weights_alone = [e.name for e in engine.manifest.added_outputs if e.derived == "depends on weights alone"]
    assert weights_alone
    session = engine.session(1, 4, debug=weights_alone)
    session.prefill(torch.tensor([[5, 6]]))
    assert session.debug_buffers.keys() == set(weights_alone)
    assert all(torch.isfinite(value).all() for value in session.debug_buffers.values())


def test_repr(engine: Engine) -> None:
    assert "backend='eager'" in repr(engine) and "dtype='float32'" in repr(engine)
