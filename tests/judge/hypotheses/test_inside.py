"""Inside of If, Loop and Scan: the op that is wrong is named; bodies that are written otherwise are no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from tests.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

LOOP = """g (float[B, 4] x) => (float[B, 4] y)
    <float[4, 4] w = {0.5, -0.2, 0.1, 0.3, -0.4, 0.2, 0.6, 0.1, 0.2, -0.5, 0.3, 0.4, 0.1, 0.2, -0.3, 0.5}> {
    most = Constant <value = int64 {5}> ()
    go = Constant <value = bool {1}> ()
    y = Loop (most, go, x) <body = body (int64 i, bool c, float[B, 4] h) => (bool d, float[B, 4] next) {
        d = Identity (c) half = Constant <value = float {0.5}> () moved = MatMul (h, w)
        act = Tanh (moved) small = Mul (act, half) next = Add (small, h) }> }"""
SCAN = """g (float[4] start, float[6, 4] x) => (float[4] last, float[6, 4] all) {
    last, all = Scan <num_scan_inputs = 1, body = body (float[4] s, float[4] e) => (float[4] next, float[4] out) {
        k = Constant <value = float {0.5}> () t = Mul (e, k) u = Add (s, t) next = Tanh (u)
        out = Sigmoid (u) }> (start, x) }"""
IF = """g (float[B, 4] x) => (float[B, 4] y) {
    least = Constant <value = float {-1000}> () s = ReduceSum <keepdims = 0> (x) c = Greater (s, least)
    y = If (c) <then_branch = yes () => (float[B, 4] a) {
            k = Constant <value = float {2}> () m = Mul (x, k) a = Relu (m) },
        else_branch = no () => (float[B, 4] b) {
            l = Constant <value = float {3}> () n = Mul (x, l) b = Sigmoid (n) }> }"""


def halve(graph: Any) -> None:
    """Make all of a graph, and of the graphs in it, float16."""
    tensors = list(graph.initializer)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == 1:
            value.type.tensor_type.elem_type = 10
    for attribute in (entry for node in graph.node for entry in node.attribute):
        tensors += [attribute.t] if attribute.HasField("t") else []
        if attribute.HasField("g"):
            halve(attribute.g)
    for tensor in (one for one in tensors if one.data_type == 1):
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype("float16"), tensor.name))


def checked(tmp_path: Path, ours: str, theirs: str, form: str = "float32") -> glass.Comparison:
    for name, text in (("ours", ours), ("theirs", theirs)):
        model = onnx_text(text)
        if form == "float16":
            halve(model.graph)
        onnx.save(model, tmp_path / f"{name}.onnx")
    return glass.check(tmp_path / "ours.onnx", candidate=tmp_path / "theirs.onnx")


STATES = """g (float[2, 4] x) => (float[2, 4] y) {
    most = Constant <value = int64 {3}> () go = Constant <value = bool {1}> ()
    none = Sub (x, x)
    y, c = Loop (most, go, none, none) <body = body (int64 i, bool t, float[2, 4] h, float[2, 4] m) =>
        (bool d, float[2, 4] next, float[2, 4] kept) {
        d = Identity (t) a = Add (h, x) left, right = Split <axis = 1, num_outputs = 2> (a) gate = Sigmoid (a)
        forgets = Mul (gate, m) new = Tanh (a) adds = Mul (gate, new) kept = Add (forgets, adds)
        b = Concat <axis = 1> (right, left) act = Tanh (kept) next = Mul (act, b) }> }"""


MISTAKES: list[Any] = [
    (STATES, "forgets = Mul (gate, m)", "forgets = Add (gate, m)", "y", ("Mul forgets in the baseline, Add",)),
    (LOOP, "act = Tanh (moved)", "act = Sigmoid (moved)", "y", ("Tanh act", "Sigmoid act")),
    (
        LOOP,
        "half = Constant <value = float {0.5}>",
        "half = Constant <value = float {0.51}>",
        "y",
        ("Mul small", "half: 0.5 in the baseline"),
    ),
    (
        LOOP,
        "most = Constant <value = int64 {5}>",
        "most = Constant <value = int64 {4}>",
        "y",
        ("5 times in the baseline, 4 times",),
    ),
    (LOOP, "next = Add (small, h)", "next = Add (small, x)", "y", ("Add next",)),
    (SCAN, "t = Mul (e, k)", "t = Mul (s, k)", "last", ("Mul t",)),
    (SCAN, "out = Sigmoid (u)", "out = Sigmoid (t)", "all", ("Sigmoid out",)),
    (IF, "value = float {2}", "value = float {2.02}", "y", ("Mul m", "k: 2 in the baseline")),
    (IF, "b = Sigmoid (n)", "b = Tanh (n)", "y", ("no input takes", "Sigmoid b", "Tanh b")),
]


@pytest.mark.parametrize("form", ["float32", "float16"])
@pytest.mark.parametrize(("text", "right", "wrong", "site", "says"), MISTAKES)
def test_a_mistake_in_a_body_is_named(
    tmp_path: Path, text: str, right: str, wrong: str, site: str, says: tuple[str, ...], form: str
) -> None:
    assert right in text
    other = text.replace(right, wrong)
    result = checked(tmp_path, text, other, form)
    assert not result.ok
    first = result.first_divergence
    assert first is not None and first.site == site
    assert all(part in first.hints[0].text for part in says), first.hints[0].text


TWINS = [
    (LOOP, "small = Mul (act, half)", "two = Constant <value = float {2}> () small = Div (act, two)"),
    (LOOP, "half = Constant <value = float {0.5}> ()", "root = Constant <value = float {0.25}> () half = Sqrt (root)"),
    (LOOP, "next = Add (small, h)", "next = Add (h, small)"),
    (SCAN, "t = Mul (e, k) u = Add (s, t)", "two = Constant <value = float {2}> () t = Div (e, two) u = Add (t, s)"),
    (IF, "n = Mul (x, l) b = Sigmoid (n)", "one = Constant <value = float {1}> () n = Mul (x, l) p = Neg (n) "
     "q = Exp (p) r = Add (one, q) b = Div (one, r)"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["float32", "float16"])
@pytest.mark.parametrize(("text", "right", "twin"), TWINS)
def test_a_body_that_is_written_otherwise_is_right(tmp_path: Path, text: str, right: str, twin: str, form: str) -> None:
    assert right in text
    assert checked(tmp_path, text, text.replace(right, twin), form).ok


def test_a_branch_that_no_input_takes_is_told(tmp_path: Path) -> None:
    onnx.save(onnx_text(IF), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok
    assert ("y", "no input led into its else_branch") in [(item.site, item.reason) for item in result.skipped]


def test_a_loop_is_a_region(tmp_path: Path) -> None:
    result = checked(tmp_path, LOOP, LOOP)
    granularity = result.granularity[0]
    assert (granularity.largest_region, granularity.largest_region_end) == (5, "y")


FUNCTIONS = """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
g (float[B, 4] x) => (float[B, 4] y) <float[4] w = {1.5, 2.5, -0.5, 0.25}> { t = local.gated (x, w) y = Tanh (t) }
<opset_import: ["" : 17, "local" : 1], domain: "local">
gated (a, b) => (c) { s = Sigmoid (a) m = Mul (s, b) c = local.inner (m, a) }
<opset_import: ["" : 17], domain: "local">
inner (a, b) => (c) { k = Constant <value = float {0.5}> () u = Mul (a, k) c = Add (u, b) }"""


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_functions_of_a_file_are_judged_op_by_op(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    model = onnx.parser.parse_model(FUNCTIONS)
    onnx.save(model, tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend=backend)
    assert result.ok and result.granularity[0].num_sites == 5
    model.functions[0].node[0].op_type = "Tanh"
    onnx.save(model, tmp_path / "other.onnx")
    found = glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx").first_divergence
    assert found is not None and "sigmoid in the baseline, tanh" in found.hints[0].text


def test_a_mistake_that_a_maximum_hides_is_named(tmp_path: Path) -> None:
    text = """g (float[B, 4] x) => (float[B, 4] y) <float[4] b = {3.0, 4.0, 5.0, 6.0}> {
        s = Sigmoid (x) a = Add (s, b) h = Add (a, b) m = Exp (s) n = Add (m, b) o = Add (n, n) y = Max (o, h) }"""
    found = checked(tmp_path, text, text.replace("a = Add (s, b)", "a = Sub (s, b)"))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "a"
    twin = text.replace(
        "a = Add (s, b)", "minus = Constant <value = float[4] {-3., -4., -5., -6.}> () a = Sub (s, minus)"
    )
    assert checked(tmp_path, text, twin).ok
