"""A step's tensors by every name they have."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.engine.run.engine import Engine
from glassengine.engine.session.debug_buffers import DebugBuffers
from glassengine.engine.store.manifest import AddedOutput
from glassengine.errors import UsageError


def added(name: str, site: str, node: str) -> AddedOutput:
    return AddedOutput(name, site, node, None, "float32", (1,), {}, None)


@pytest.fixture
def buffers() -> DebugBuffers:
    entries = [
        added("model.layers.5.mlp_output", "model.layers.5.mlp_output", "linear_5"),
        added("model.layers.6.mlp_output", "model.layers.6.mlp_output", "linear_6"),
        added("head", "lm_head/linear.0", "linear_9"),
    ]
    names = ["input_ids", *(entry.name for entry in entries)]
    values = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    return DebugBuffers(values, {entry.name: entry for entry in entries})


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("input_ids", 0),
        ("model.layers.6.mlp_output", 2),
        ("layers.6.mlp_output", 2),
        ("6.mlp_output", 2),
        ("layers.?.mlp_output", None),
        ("layers.[6].mlp_output", None),
        ("linear_5", 1),
        ("lm_head/linear.0", 3),
        ("head", 3),
        ("re:layers.5", 1),
        ("mlp_output", None),
        ("layers.7.mlp_output", None),
    ],
)
def test_names(buffers: DebugBuffers, wanted: str, index: int | None) -> None:
    if index is not None:
        assert buffers[wanted].item() == index
        return
    with pytest.raises(KeyError) as caught:
        buffers[wanted]
    assert isinstance(caught.value, UsageError) and "model.layers.6.mlp_output" in str(caught.value)


def test_debug_buffers_are_a_dict_of_the_requested_names(buffers: DebugBuffers) -> None:
    assert "layers.6.mlp_output" not in buffers and buffers.get("layers.6.mlp_output") is None
    assert next(iter(buffers)) == "input_ids" and len(buffers) == 4


def test_saved_debug_buffers_are_a_plain_dict(buffers: DebugBuffers, tmp_path: Path) -> None:
    torch.save(buffers, tmp_path / "step0.pt")
    found = torch.load(tmp_path / "step0.pt", weights_only=True)
    assert list(found) == list(buffers) and all(torch.equal(found[name], buffers[name]) for name in found)
    assert list(copy.deepcopy(buffers)) == list(buffers)
    assert glass.compare(tmp_path / "step0.pt", tmp_path / "step0.pt").ok


def test_the_line_of_the_document(engine: Engine) -> None:
    """`debug_buffer['layers.6.mlp_output']`, on an engine whose sites begin with `model.`."""
    session = engine.session(1, 4, debug=True)
    session.prefill(torch.tensor([[5, 6, 7]]))
    debug_buffer = session.debug_buffers
    for layer in range(2):
        assert debug_buffer[f"layers.{layer}.mlp"] is debug_buffer[f"model.layers.{layer}.mlp"]
    assert debug_buffer["lm_head/linear.0"] is debug_buffer["head"]
