"""Row A3 of docs/compatibility.md: what an output is, where nothing else was asked for, is what was computed."""

from __future__ import annotations

from pathlib import Path

import torch

import glassengine as glass


def test_outputs_keep_the_dtype_they_are_computed_in(checkpoint: Path, tmp_path: Path) -> None:
    # A norm of a bfloat16 model computes in float32, its mask is of bools, and its ids are integers.
    names = ["model.layers.0.input_layernorm/pow.0", "model.layers.0.mlp", "re:/le\\.0$"]
    engine = glass.build(checkpoint, tmp_path / "e", backend="eager", dtype="bfloat16", add_output=names)
    session = engine.session(1, 4, debug=True)
    session.prefill(torch.tensor([[5, 6, 7]]))
    found = {name.rsplit("/", 1)[-1]: tensor.dtype for name, tensor in session.debug_buffers.items()}
    assert found["pow.0"] is torch.float32 and found["model.layers.0.mlp"] is torch.bfloat16
    assert found["le.0"] is torch.bool and found["input_ids"] is torch.int64
    assert [entry.cast_from for entry in engine.manifest.added_outputs] == [None] * len(engine.added_outputs)
