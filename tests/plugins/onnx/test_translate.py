"""An ONNX file as a program: its values are the sites, and what they are judged with computes what the file says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.capture.observers import run_program
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program import load_model, sites
from glassengine.program.loading.stored import onnx_model, onnx_program
from glassengine.program.onnx.file import OnnxFile
from glassengine.program.onnx.function import OneNode, OnnxFunction
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import load_program, save_program
from tests import children
from tests.onnx_models import onnx_control_flow, onnx_mlp

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

GENERATOR = np.random.default_rng(0)


def program_of(model: Any) -> Program:
    return onnx_program(OnnxFile(Path("model.onnx"), model))


def random(*shape: int) -> Any:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def as_the_runtime_says(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Every value of the translated graph is that of ONNX Runtime, in float32; in float64 it is the same number."""
    program = program_of(model)
    expected = onnx_model(program.onnx.file, program).values(inputs)  # type: ignore[union-attr]
    found: dict[str, torch.Tensor] = {}
    named = {site.node: site.name for site in program.sites if site.kind == "op"}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if node.name in named:
            found[named[node.name]] = value

    run_program(program, inputs, keep)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)


X = "float[2, 3, 8, 8] x"
GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemm": (
        "g (float[5, 4] x) => (a, b, c) { a = Gemm <transB = 1> (x, w, bias) b = Gemm <transA = 1, alpha = 0.5> (x, v)"
        " c = Gemm <beta = 2.0> (x, u, row) }",
        {"w": random(3, 4), "bias": random(3), "v": random(5, 2), "u": random(4, 3), "row": random(5, 3)},
    ),
    "conv": (
        f"g ({X}) => (a, b, c, d) {{ a = Conv <strides = [2, 2], pads = [1, 0, 2, 1], group = 3> (x, w, bias)"
        ' b = Conv <auto_pad = "SAME_LOWER"> (x, v)'
        " c = ConvTranspose <strides = [2, 2], output_padding = [1, 0], pads = [1, 1, 0, 0]> (x, t)"
        " d = ConvTranspose <strides = [3, 2], output_shape = [23, 15]> (x, t) }",
        {"w": random(6, 1, 3, 3), "bias": random(6), "v": random(4, 3, 2, 3), "t": random(3, 2, 3, 2)},
    ),
    "pools": (
        f"g ({X}) => (a, b, c, d, e) {{ a = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)"
        " b = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1> (x)"
        " c = AveragePool <kernel_shape = [2, 2], pads = [1, 0, 1, 0], count_include_pad = 1> (x)"
        " d = GlobalAveragePool (x) e = GlobalMaxPool (x) }",
        {},
    ),
    "norms": (
        f"g ({X}) => (a, b, c, d, e) {{ a = BatchNormalization (x, s, s, s, positive)"
        " b = InstanceNormalization (x, s, s)"
        " c = LayerNormalization <axis = 2> (x, plane) d = LpNormalization <p = 1> (x)"
        " e = LRN <size = 3> (x) }",
        {"s": random(3), "positive": np.abs(random(3)) + 1, "plane": random(8, 8)},
    ),
    "reduce": (
        f"g ({X}) => (a, b, c, d, e, f, h) {{ a = ReduceMean <keepdims = 0> (x, two)"
        " b = ReduceL2 (x) c = ReduceMax (x, two)"
        " d = ReduceLogSumExp (x, two) e = ReduceSum <noop_with_empty_axes = 1> (x, none)"
        " f = ReduceProd <keepdims = 0> (x)"
        " h = CumSum <reverse = 1, exclusive = 1> (x, one) }",
        {"two": np.array([-1, 1]), "none": np.array([], np.int64), "one": np.int64(1)},
    ),
    "moves": (
        f"g ({X}) => (a, b, c, d, e, f) {{ a = Slice (x, starts, ends, axes, steps) p = Pad (x, pads) b = Transpose (p)"
        ' c = Pad <mode = "reflect"> (x, pads) d = Gather <axis = 2> (x, index) e = Tile (x, times)'
        " f = Expand (x, wide) }",
        {
            "starts": np.array([-1, 7]),
            "ends": np.array([-100, 1]),
            "axes": np.array([1, 3]),
            "steps": np.array([-1, -2]),
            "pads": np.array([0, 0, 1, 2, 0, 0, 0, 3]),
            "index": np.array([[0, -1], [3, 3]]),
            "times": np.array([1, 2, 1, 3]),
            "wide": np.array([4, 1, 1, 1, 1]),
        },
    ),
    "scatter": (
        "g (float[3, 4] x) => (a, b, c, d, e) { a = GatherND (x, places) b = ScatterND (x, places, new)"
        ' c = ScatterElements <axis = 1, reduction = "add"> (x, index, x) d = GatherElements <axis = 1> (x, index)'
        " v, i = TopK <axis = -1, largest = 0> (x, two) e = OneHot (i, depth, values) }",
        {
            "places": np.array([[0, 1], [2, -1]]),
            "new": random(2),
            "index": np.array([[0, 1, 1, 0], [3, 3, 2, 2], [0, -1, 1, 0]]),
            "two": np.array([2]),
            "depth": np.int64(5),
            "values": np.array([0.5, 2], np.float32),
        },
    ),
    "sizes": (
        "g (float[3, 4] x) => (a, b, c, d, e) { s = Shape (x) r = Reshape (x, turned) a = Flatten <axis = 2> (x)"
        " b = Range (start, limit, delta) c = ConstantOfShape <value: tensor = float[1] {2.5}> (s)"
        " p, q = Split <axis = 1, num_outputs = 2> (x) d = Concat <axis = 0> (p, q) z = Slice (x, zero, zero)"
        " e = ReduceMin <keepdims = 0> (z, one) }",
        {
            "turned": np.array([0, -1, 2]),
            "start": np.float32(0.5),
            "limit": np.float32(2),
            "delta": np.float32(0.4),
            "zero": np.array([0]),
            "one": np.array([0]),
        },
    ),
    "resize": (
        f'g ({X}) => (a, b, c) {{ a = Resize <mode = "linear"> (x, , scales)'
        ' b = Resize <coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (x, , scales)'
        ' c = Resize <mode = "cubic"> (x, , , sizes) }',
        {"scales": np.array([1, 1, 2, 1.5], np.float32), "sizes": np.array([2, 3, 5, 16])},
    ),
    "quantized": (
        "g (float[4, 8] x) => (b, c, d) { a = QuantizeLinear (x, scale, zero) b = DequantizeLinear (a, scale, zero)"
        " u, s, z = DynamicQuantizeLinear (x) c = MatMulInteger (u, w, z) d = QuantizeLinear <axis = 1> (x, each) }",
        {
            "scale": np.float32(0.05),
            "zero": np.int8(3),
            "w": GENERATOR.integers(0, 255, (8, 3)).astype(np.uint8),
            "each": np.linspace(0.01, 0.1, 8, dtype=np.float32),
        },
    ),
    "pointwise": (
        "g (float[4, 8] x) => (a, b, c, d, e, f, h) { a = Clip (x, low, high) b = Elu <alpha = 0.5> (x) c = Selu (x)"
        ' d = HardSigmoid (x) e = Gelu <approximate = "tanh"> (x) f = PRelu (x, slope) i = Cast <to = 7> (x)'
        " two = Add (i, i) h = Div (two, three) }",
        {"low": np.float32(-0.5), "high": np.float32(1), "slope": random(8), "three": np.int64(3)},
    ),
    "without a translation": (
        "g (float[2, 3, 8, 8] x) => (a, b) { a = LpPool <kernel_shape = [2, 2], p = 2> (x) b = LRN <size = 3> (x) }",
        {},
    ),
    "unsigned": ("g (float[4] x) => (d) { y = Abs (x) u = Cast <to = 12> (y) d = Add (u, u) }", {}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_values_are_those_of_the_runtime(name: str) -> None:
    model = untyped(*GRAPHS[name])
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    as_the_runtime_says(model, {"x": torch.from_numpy(random(*shape))})


def untyped(text: str, weights: dict[str, Any]) -> Any:
    """Return the model of a graph whose results have no types, which the text form asks for."""
    head, _, rest = text.partition("=> (")
    names, _, body = rest.partition(")")
    typed = ", ".join(f"float {name}" for name in names.split(", "))
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]>\n{head}=> ({typed}){body}')
    for result in model.graph.output:
        result.ClearField("type")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return model


@pytest.mark.parametrize("opset", [17, 20, 21])
@pytest.mark.parametrize("sign", [1, -1])
def test_branches_loops_and_functions(opset: int, sign: int) -> None:
    as_the_runtime_says(onnx_control_flow(opset=opset), {"x": sign * torch.rand(2, 4)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # the examples are computed when they are loaded
def test_the_operators_own_examples() -> None:
    """The examples that come with the package onnx: what is translated gives their results."""
    from onnx.backend.test.loader import load_model_tests

    num_right, wrong = 0, []
    for case in load_model_tests(kind="node"):
        if any(word in case.name for word in (*NOT_OURS, "_expanded")):
            continue
        try:
            program = program_of(case.model)
        except UsageError:
            continue  # text, sequences, types that torch does not have
        called = [node.target.function for node in program.graph.nodes if isinstance(node.target, OnnxFunction)]
        if any(isinstance(function, OneNode) for function in called):
            continue  # evaluated by the package itself
        for inputs, results in case.data_sets:
            if any(np.array(value).dtype.kind not in "fiub" for value in (*inputs, *results)):
                continue  # sequences, and inputs that are left out
            given = {
                port.name: torch.from_numpy(np.array(value))
                for port, value in zip(program.inputs, inputs, strict=False)
            }
            found = run_program(program, given)
            same = [
                torch.allclose(
                    ours.double(),
                    torch.from_numpy(np.array(theirs)).double(),
                    1e-3,
                    2e-3 if ours.dtype is torch.float16 else 1e-5,
                    equal_nan=True,
                )
                for ours, theirs in zip(found.values(), results, strict=True)
            ]
            num_right += all(same)
            wrong += [] if all(same) else [case.name]
    assert wrong == []
    assert num_right > 900


NOT_OURS = (
    "training",
    "bernoulli",  # random
    "downsample_scales_linear_align_corners",  # the runtimes round the size first
    "downsample_scales_cubic_align_corners",
    "quantizelinear_blocked",  # its result is no array
)


def test_float64_goes_all_the_way_through() -> None:
    from glassengine.judge.replay.reference import ReferenceRun

    for model in (onnx_mlp(), onnx_control_flow()):
        program = program_of(model)
        x = torch.rand(2, int(model.graph.input[0].type.tensor_type.shape.dim[1].dim_value))
        seen: list[torch.dtype] = []
        run = ReferenceRun(program)
        run.step({"x": x}, lambda node, reference, seen=seen: seen.append(reference.exact.dtype), lambda *_: None)
        assert {dtype for dtype in seen if dtype.is_floating_point} == {torch.float64}


def test_sites_are_the_values_of_the_file(tmp_path: Path) -> None:
    onnx.save(onnx_mlp(), tmp_path / "mlp.onnx")
    found = sites(tmp_path / "mlp.onnx")
    assert [site.name for site in found] == [".:in.x", "normal", "wide", "/mlp/act", "scores", "y", ".:out.y"]
    act = found[3]
    assert (act.op, act.dtype, act.shape) == ("Relu", "float32", ("N", 32))
    assert act.source == "mlp.onnx:2: Relu(wide)"
    assert [site.name for site in sites(tmp_path / "mlp.onnx", "*act")] == ["/mlp/act"]
    with pytest.raises(UnknownNameError, match="scores"):
        sites(tmp_path / "mlp.onnx", "score")


def test_what_the_exporter_noted_is_kept() -> None:
    model = onnx_mlp()
    node = model.graph.node[3]
    node.name = "node_linear_7"
    trace = 'File "models/net.py", line 12, in forward\n    return self.head(x)'
    node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model', 'model.head', 'linear']")
    site = program_of(model).sites.get("scores")
    assert site is not None
    assert site.source == "models/net.py:12: return self.head(x)"
    assert site.aliases == ("node_linear_7", "model.head/MatMul.0")


def test_names_never_become_code(tmp_path: Path) -> None:
    evil = 'y\n    open("planted", "w"); "'
    model = onnx_mlp()
    model.graph.output[0].name = model.graph.node[-1].output[0] = evil
    model.graph.input[0].name = model.graph.node[0].input[0] = "lambda"
    model.graph.node[1].name = "__import__('os')"
    program = program_of(model)
    assert all(node.name.isidentifier() for node in program.graph.nodes)
    assert list(run_program(program, {"lambda": torch.rand(2, 16)})) == [evil]
    save_program(program, tmp_path)
    again = load_program(tmp_path, program.exported.state_dict)
    assert list(run_program(again, {"lambda": torch.rand(2, 16)})) == [evil]


def test_a_stored_program_is_the_same_again(tmp_path: Path) -> None:
    program = program_of(onnx_control_flow())
    save_program(program, tmp_path)
    assert not (tmp_path / "program.pt2").exists()
    assert b"matrix" in (tmp_path / "program.onnx").read_bytes()
    again = load_program(tmp_path, program.exported.state_dict)
    assert again.onnx is not None and program.onnx is not None
    assert again.onnx.values == program.onnx.values
    x = torch.rand(2, 4)
    for ours, theirs in zip(
        run_program(program, {"x": x}).values(), run_program(again, {"x": x}).values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert json.loads((tmp_path / "program.json").read_text())["output_nodes"] == program.output_nodes


def twice(graph: Any) -> None:
    graph.node[2].output[0] = "wide"


def nothing(graph: Any) -> None:
    graph.node[0].input[0] = "nobody"


def text_input(graph: Any) -> None:
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.STRING


def no_rank(graph: Any) -> None:
    graph.input[0].type.tensor_type.ClearField("shape")


def returned_twice(graph: Any) -> None:
    graph.output.append(graph.output[0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (twice, "yields a value twice"),
        (nothing, r"reads a value that nothing yields[\s\S]*nobody"),
        (text_input, "takes 'x', which is not a tensor"),
        (no_rank, "takes 'x', which is not a tensor"),
        (returned_twice, "returns a value twice"),
    ],
)
def test_a_graph_that_is_none_is_refused(change: Callable[[Any], None], problem: str) -> None:
    model = onnx_mlp()
    change(model.graph)
    with pytest.raises(UsageError, match=problem):
        program_of(model)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"attn_implementation": "eager"}, {"adapter": "lora"}])
def test_a_stored_program_is_what_it_is(tmp_path: Path, options: dict[str, Any]) -> None:
    onnx.save(onnx_mlp(), tmp_path / "mlp.onnx")
    with pytest.raises(UsageError, match="stored program"):
        load_model(tmp_path / "mlp.onnx", **options)
    assert load_model(tmp_path / "mlp.onnx", dtype="float32").kind == "module"


def test_the_table_is_filled_by_whoever_translates() -> None:
    """In an interpreter of its own: other tests import the operators themselves."""
    code = "from glassengine.plugins.onnx.translate import TRANSLATIONS as t; print(*sorted(t))"
    known = children.run([sys.executable, "-c", code], check=True).stdout.split()
    assert {"Add", "Conv", "MaxPool", "QuantizeLinear", "LSTM", "Resize", "Gather"} <= set(known) and len(known) > 100
