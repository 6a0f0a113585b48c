"""A quantized ONNX file beside its floats: drift where it is right, the op or weight by name where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import glassengine as glass
from glassengine.cli.main import main
from glassengine.results import Comparison
from tests.plugins.quantized.test_port import another_op

KINDS = ("qdq", "qoperator", "dynamic")
Edit = Callable[[onnx.ModelProto], None]


def weight(name: str, *shape: int) -> onnx.TensorProto:
    generator = np.random.default_rng(len(name) + sum(map(ord, name)))
    values = generator.standard_normal(shape) / np.sqrt(shape[0] if len(shape) < 4 else np.prod(shape[1:]))
    return numpy_helper.from_array(values.astype(np.float32), name)


def written(path: Path, nodes: list[Any], weights: list[Any], given: Any, result: Any) -> Path:
    graph = helper.make_graph(nodes, "net", [given], [result], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, str(path))
    return path


def text_model(path: Path) -> Path:
    def node(op: str, inputs: str, output: str) -> Any:
        return helper.make_node(op, inputs.split(), [output], name=output)

    nodes = [
        node("Gather", "table ids", "emb"),
        node("MatMul", "emb w1", "m1"),
        node("Add", "m1 b1", "a1"),
        node("Relu", "a1", "r1"),
        node("MatMul", "r1 w2", "m2"),
        node("Add", "m2 emb", "res"),
        node("MatMul", "res w3", "m3"),
        node("Sigmoid", "m3", "s3"),
        node("MatMul", "s3 wo", "logits"),
    ]
    shapes = {"table": (50, 16), "w1": (16, 32), "b1": (32,), "w2": (32, 16), "w3": (16, 16), "wo": (16, 8)}
    weights = [weight(name, *shape) for name, shape in shapes.items()]
    given = helper.make_tensor_value_info("ids", TensorProto.INT64, [2, 6])
    return written(path, nodes, weights, given, helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 6, 8]))


def image_model(path: Path) -> Path:
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="c1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="r1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="c2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "x"], ["y"], name="y"),
    ]
    shapes = {"w1": (6, 4, 3, 3), "b1": (6,), "w2": (4, 6, 3, 3), "b2": (4,)}
    weights = [weight(name, *shape) for name, shape in shapes.items()]
    sizes = [1, 4, 6, 6]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    return written(path, nodes, weights, given, helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes))


class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        generator = np.random.default_rng(0)
        made = (
            generator.integers(0, 50, (2, 6)) if name == "ids" else generator.standard_normal((1, 4, 6, 6)).astype("f4")
            for _ in range(6)
        )
        self.given = ({name: value} for value in made)

    def get_next(self) -> Any:
        return next(self.given, None)


def quantized(source: Path, kind: str, name: str, *, per_channel: bool = False) -> Path:
    path = source.with_name(f"{source.stem}_{kind}_{per_channel}.onnx")
    # Weights of seven bits: products with uint8 saturate on no processor.
    options = {"weight_type": quantization.QuantType.QInt8, "per_channel": per_channel, "reduce_range": True}
    if kind == "dynamic":
        quantization.quantize_dynamic(str(source), str(path), **options)
    else:
        form = quantization.QuantFormat.QDQ if kind == "qdq" else quantization.QuantFormat.QOperator
        quantization.quantize_static(str(source), str(path), Reader(name), quant_format=form, **options)
    return path


def gemm_model(path: Path) -> Path:
    """A Gemm whose weight the quantizer stores in the other order of its axes."""
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["g1"], name="g1", transB=1),
        helper.make_node("Relu", ["g1"], ["r1"], name="r1"),
        helper.make_node("Gemm", ["r1", "w2", "b2"], ["y"], name="y", transB=1),
    ]
    weights = [weight(name, *shape) for name, shape in {"w1": (8, 6), "b1": (8,), "w2": (8, 8), "b2": (8,)}.items()]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 6])
    return written(path, nodes, weights, given, helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 8]))


def quantized_in_unsigned(source: Path) -> Path:
    """Quantize dynamically with weights of uint8: ONNX Runtime has integer convolutions of no other kind."""
    path = source.with_name(f"{source.stem}_dynamic.onnx")
    quantization.quantize_dynamic(str(source), str(path), weight_type=quantization.QuantType.QUInt8)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("quantized")
    text, image = text_model(folder / "text.onnx"), image_model(folder / "image.onnx")
    made = {"text": text, "image": image}
    made |= {f"text {kind}": quantized(text, kind, "ids") for kind in KINDS}
    made |= {f"image {kind}": quantized(image, kind, "x", per_channel=True) for kind in KINDS[:2]}
    made |= {"image dynamic": quantized_in_unsigned(image), "gemm": (gemm := gemm_model(folder / "gemm.onnx"))}
    made |= {"gemm dynamic": quantized_in_unsigned(gemm)}
    yield made


def checked(baseline: Path, candidate: Path, **options: Any) -> Comparison:
    return glass.check(baseline, candidate=candidate, **options)


RIGHT = [
    *("text qdq", "text qoperator", "text dynamic", "image qdq", "image qoperator"),
    *("image dynamic", "gemm dynamic"),
]


@pytest.mark.parametrize("name", RIGHT)
def test_f8_a_right_file_is_drift_in_order_of_execution(name: str, files: dict[str, Path]) -> None:
    model = name.partition(" ")[0]
    result = checked(files[model], files[name])
    assert result.ok and result.verdict == "rounding", (result.not_ok_because, result.origins)
    assert result.coverage > 0.9 and result.granularity[0].level == "quantized"
    rows = {row.site: row for row in result.drift}
    last = result.drift[-1]
    assert last.kind == "result" and last.site == ("logits" if model == "text" else "y") and 20 < last.snr_db < 60
    inner = [row for row in result.drift if row.kind == "op"]
    assert len(inner) >= 2 and sum(row.share or 0 for row in inner) == pytest.approx(1.0)
    if model == "text":
        assert list(rows).index("m1") < list(rows).index("res") < list(rows).index("s3")
        assert rows["m1"].introduced_db is not None and 20 < rows["m1"].introduced_db < 60
    assert result.results[0].judged_by == "signal"


def edited(path: Path, to: Path, edit: Edit) -> Path:
    model = onnx.load(str(path))
    edit(model)
    onnx.save(model, str(to))
    return to


def rewritten(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = [one for one in model.graph.initializer if one.name == name]
        before = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(before)).astype(before.dtype), name))

    return edit


def another_input(node: str, index: int, name: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        next(one for one in model.graph.node if one.name == node).input[index] = name

    return edit


def read_by_another_grid(name: str) -> Edit:
    """Give one DequantizeLinear a scale of its own, a tenth larger than that of what was quantized."""

    def edit(model: onnx.ModelProto) -> None:
        node = next(one for one in model.graph.node if one.name == name)
        scale = next(one for one in model.graph.initializer if one.name == node.input[1])
        values = numpy_helper.to_array(scale) * np.float32(1.1)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), "another_scale"))
        node.input[1] = "another_scale"

    return edit


MISTAKES: dict[str, tuple[str, Edit, str]] = {
    "another scale": ("text qdq", rewritten("w2_scale", lambda x: x * 2), "w2:param"),
    "rows in another order": ("text qdq", rewritten("w2_quantized", lambda x: x[::-1]), "w2:param"),
    "another bias": ("text qdq", rewritten("b1_quantized", lambda x: x[::-1]), "b1:param"),
    "another activation": ("text qdq", another_op("Sigmoid", "Tanh"), "s3"),
    "no skip connection": ("text qdq", another_input("res", 1, "m2_DequantizeLinear_Output"), "res"),
    "no activation": ("text dynamic", another_op("Relu", "Identity"), "r1"),
    "another zero point": ("text dynamic", rewritten("w3_zero_point", lambda x: x + 9), "w3:param"),
    "another embedding": ("text qoperator", rewritten("table_quantized", lambda x: x[::-1]), "table:param"),
    "another grid where it is read": ("text qdq", read_by_another_grid("r1_DequantizeLinear"), "m2"),
    "another grid of the input": ("image qdq", read_by_another_grid("x_DequantizeLinear"), "r1"),
    "transposed": ("gemm dynamic", rewritten("w2_quantized", lambda x: x.T), "y"),
    "another kernel": ("image qoperator", rewritten("w2_quantized", lambda x: x[..., ::-1]), "w2:param"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_f15_a_mistake_in_a_quantized_file_is_named(mistake: str, files: dict[str, Path], tmp_path: Path) -> None:
    name, edit, guilty = MISTAKES[mistake]
    result = checked(files[name.partition(" ")[0]], edited(files[name], tmp_path / "wrong.onnx", edit))
    assert not result.ok and result.first_divergence is not None, result.origins
    assert result.first_divergence.site == guilty
    assert "not in the results" not in str(result.not_ok_because)


def test_f15_a_budget_for_a_quantized_file(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sides = [str(files["text"]), "--candidate", str(files["text qdq"]), "--no-progress", "-q"]
    assert main(["check", *sides, "--min-snr", "20dB"]) == 0
    shown = capsys.readouterr().out
    assert "explained by the quantization" in shown and "drift, in order of execution" in shown
    assert main(["check", *sides, "--min-snr", "60dB"]) == 1
    assert "--min-snr 60dB" in " ".join(capsys.readouterr().out.split())
