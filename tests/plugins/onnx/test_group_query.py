"""GroupQueryAttention has a reference that makes what ONNX Runtime makes, in each of its forms, over several steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers import run_program
from glassengine.program.loading.stored import onnx_model, onnx_program
from glassengine.program.onnx.file import read_onnx
from glassengine.program.onnx.function import is_of_runtime_alone

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

H, K, D, LONGEST = 4, 2, 32, 16
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed and rotated": {"packed": True, "do_rotary": 1},
    "pairs rotated, a part of each head": {"do_rotary": 1, "rotary_interleaved": 1, "turned": 16},
    "window": {"local_window_size": 3},
    "scale and soft cap": {"scale": 0.3, "softcap": 2.0},
    "sinks": {"sink": True},
    "bias": {"bias": True},
}


def saved(
    path: Path,
    *,
    packed: bool = False,
    sink: bool = False,
    bias: bool = False,
    turned: int = D,
    **attributes: Any,
) -> Path:
    random = np.random.default_rng(0)
    angles = np.arange(LONGEST)[:, None] / (1 + np.arange(turned // 2))
    weights: dict[str, Any] = {"cos": np.cos(angles), "sin": np.sin(angles)}
    weights |= {"sink": random.standard_normal(H)} if sink else {}
    width = (H + 2 * K) * D if packed else H * D
    rotates = bool(attributes.get("do_rotary"))
    inputs = ["query", "" if packed else "key", "" if packed else "value", "past_key", "past_value", "seqlens", "total"]
    inputs += [
        "cos" if rotates else "",
        "sin" if rotates else "",
        "",
        "bias" if bias else "",
        "sink" if sink else "",
        "",
        "",
    ]
    while not inputs[-1]:
        inputs.pop()
    names = ["attended", "present_key", "present_value"]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        inputs,
        names,
        name="gqa",
        domain="com.microsoft",
        num_heads=H,
        kv_num_heads=K,
        **attributes,
    )
    value = onnx.helper.make_tensor_value_info
    ports = [value("query", 1, ["batch", "new", width])]
    ports += [] if packed else [value(name, 1, ["batch", "new", K * D]) for name in ("key", "value")]
    ports += [value(name, 1, ["batch", K, "past", D]) for name in ("past_key", "past_value")]
    ports += [value("seqlens", 6, ["batch"]), value("total", 6, [])]
    ports += [value("bias", 1, ["batch", 1, "new", "all"])] if bias else []
    results = [value("attended", 1, ["batch", "new", H * D])]
    results += [value(name, 1, ["batch", K, "all", D]) for name in names[1:]]
    held = [
        onnx.numpy_helper.from_array(one.astype(np.float32), name) for name, one in weights.items() if name in inputs
    ]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "g", ports, results, held)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def given(past: int, new: int, *, batch: int = 2, packed: bool = False, bias: bool = False) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(past)
    width = (H + 2 * K) * D if packed else H * D
    found = {"query": torch.randn(batch, new, width, generator=random)}
    if not packed:
        found |= {name: torch.randn(batch, new, K * D, generator=random) for name in ("key", "value")}
    found |= {name: torch.randn(batch, K, past, D, generator=random) for name in ("past_key", "past_value")}
    if bias:
        found["bias"] = torch.randn(batch, 1, new, past + new, generator=random)
    total = past + new
    return found | {
        "seqlens": torch.full((batch,), total - 1, dtype=torch.int32),
        "total": torch.tensor(total, dtype=torch.int32),
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_makes_what_the_runtime_makes(form: str, tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path / "model.onnx", **FORMS[form]))
    program = onnx_program(file)
    assert not any(is_of_runtime_alone(one.target) for one in program.graph.nodes)
    options = {name: FORMS[form].get(name, False) for name in ("packed", "bias")}
    model = onnx_model(file, program)
    for past, new, batch in ((0, 5, 2), (5, 1, 2), (4, 3, 1)):
        inputs = given(past, new, batch=batch, **options)
        expected = model.values(inputs)
        found = run_program(program, inputs)
        for name in ("attended", "present_key", "present_value"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


def test_rows_of_several_lengths(tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path / "model.onnx", do_rotary=1))
    program = onnx_program(file)
    inputs = {**given(6, 1), "seqlens": torch.tensor([6, 3], dtype=torch.int32)}
    expected, found = onnx_model(file, program).values(inputs), run_program(program, inputs)
    torch.testing.assert_close(found["attended"], expected["attended"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["present_key"][1, :, :4], expected["present_key"][1, :, :4], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "value"), [("scale", 0.4), ("local_window_size", 2), ("softcap", 1.0)])
def test_a_file_is_judged_by_it(setting: str, value: float, tmp_path: Path) -> None:
    torch.save(given(4, 3, batch=1), tmp_path / "inputs.pt")
    path = saved(tmp_path / "model.onnx", do_rotary=1)
    found = glass.check(path, backend="onnxruntime", inputs=str(tmp_path / "inputs.pt"))
    assert found.ok and found.verdict in ("rounding", "identical") and not found.origins
    saved(tmp_path / "changed.onnx", do_rotary=1, **{setting: value})
    found = glass.check(path, candidate=tmp_path / "changed.onnx", inputs=str(tmp_path / "inputs.pt"))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "attended"
