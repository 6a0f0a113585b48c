"""Inputs that are made up for ONNX files: what the graph does with each of them says what they are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.program import load_model
from glassengine.program.inputs.modules import stored_inputs
from glassengine.program.kinds.example_inputs import MadeUp
from tests.corpus.mistakes.input_mutations import unseen
from tests.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

_DRAWN = np.random.default_rng(0)


def drawn(*shape: int) -> Any:
    return _DRAWN.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


ONE, BIG, ZERO = np.float32(1), np.float32(-10000), np.int64(0)
WIDTHS = drawn(1, 8)

GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "table": (
        "(int64[B,S] ids) => (float[B,S,8] y) { y = Gather(table, ids) }",
        {"table": drawn(50, 8)},
    ),
    "table-of-two": (
        """(int32[2,S] ids, int32[2,S] types) => (float[2,S,8] y) {
            a = Gather(table, ids) b = Gather(two, types) y = Add(a, b) }""",
        {"table": drawn(9, 8), "two": drawn(2, 8)},
    ),
    "table-behind": (
        """(int64[B,7] ids) => (float[B,k] y) {
            moved = Add(ids, offsets) cut = Slice(moved, start, end, axes) wide = Cast<to = 7>(cut)
            rows = Gather(table, wide) y = Flatten(rows) }""",
        {
            "table": drawn(30, 8),
            "offsets": ints(0, 3, 6, 9, 12, 15, 18),
            "start": ints(0),
            "end": ints(100),
            "axes": ints(1),
        },
    ),
    "masked-attention": (
        """(int64[B,S] ids, int64[B,S] mask) => (float[B,S,8] y) {
            x = Gather(table, ids) float_mask = Cast<to = 1>(mask) turned = Sub(one, float_mask)
            hidden = Mul(turned, big) rows = Unsqueeze(hidden, middle) keys = Transpose<perm = [0, 2, 1]>(x)
            scores = MatMul(x, keys) masked = Add(scores, rows) p = Softmax<axis = -1>(masked) y = MatMul(p, x) }""",
        {"table": drawn(50, 8), "one": ONE, "big": BIG, "middle": ints(1)},
    ),
    "masked-mean": (
        """(float[B,S,8] x, int64[B,S] mask) => (float[B,8] y) {
            m = Cast<to = 1>(mask) wide = Unsqueeze(m, last) kept = Mul(x, wide)
            order = CumSum(kept, one_i) total = ReduceSum<keepdims = 0>(order, middle)
            number = ReduceSum<keepdims = 0>(wide, middle) y = Div(total, number) }""",
        {"last": ints(-1), "middle": ints(1), "one_i": np.int64(1)},
    ),
    "chosen": (
        """(float[B,S] x, bool[B,S] keep) => (float[B,S] y) { low = Neg(x) c = Cos(low) y = Where(keep, x, c) }""",
        {},
    ),
    "rotary": (
        """(float[B,S,8] x, int64[B,S] positions) => (float[B,S,8] y) {
            p = Cast<to = 1>(positions) wide = Unsqueeze(p, last) angles = MatMul(wide, widths)
            c = Cos(angles) y = Mul(x, c) }""",
        {"last": ints(-1), "widths": WIDTHS},
    ),
    "image": (
        """(float[N,3,H,W] x) => (float[N,k] y) {
            c = Conv<pads = [0, 0, 0, 0], strides = [2, 2]>(x, w) r = Relu(c) d = Conv<strides = [2, 2]>(r, v)
            p = GlobalAveragePool(d) f = Flatten(p) y = MatMul(f, m) }""",
        {"w": drawn(4, 3, 5, 5), "v": drawn(4, 4, 5, 5), "m": drawn(4, 6)},
    ),
    "pixels": (
        """(uint8[1,H,W,3] x) => (float[1,k,h,w] y) {
            f = Cast<to = 1>(x) s = Div(f, scale) t = Transpose<perm = [0, 3, 1, 2]>(s) y = Conv(t, w) }""",
        {"scale": np.float32(255), "w": drawn(4, 3, 5, 5)},
    ),
    "sound": (
        """(float[1,1,N] x) => (float[1,4,M] y) { c = Conv<strides = [16]>(x, w) y = Tanh(c) }""",
        {"w": drawn(4, 1, 64)},
    ),
    "rate": (
        """(float[B,N] x, int64 rate) => (float[B,M] y) {
            is_fast = Equal(rate, fast)
            y = If (is_fast) <
                then_branch = one () => (float[B,O] t) { t = MatMul(x, a) },
                else_branch = other () => (float[B,P] e) { e = MatMul(x, b) }
            > }""",
        {"fast": np.int64(16000), "a": drawn(32, 4), "b": drawn(32, 4)},
    ),
    "lstm": (
        """(float[S,B,4] x, float[1,B,8] h, float[1,B,8] c) => (float[S,d,B,8] y, float[1,B,8] h2, float[1,B,8] c2) {
            y, h2, c2 = LSTM<hidden_size = 8>(x, w, r, bias, , h, c) }""",
        {"w": drawn(1, 32, 4), "r": drawn(1, 32, 8), "bias": drawn(1, 64)},
    ),
    "lengths": (
        """(float[B,S,4] x, int64[B] lengths) => (float[B,S,4] y) {
            shape = Shape(x) size = Gather(shape, one_i) places = Range(zero, size, one_i)
            column = Unsqueeze(lengths, last) inside = Less(places, column) wide = Cast<to = 1>(inside)
            m = Unsqueeze(wide, last) y = Mul(x, m)
        }""",
        {"one_i": np.int64(1), "zero": ZERO, "last": ints(-1)},
    ),
    "cache": (
        """(int64[B,S] ids, int64[B,"P + S"] mask, float[B,2,P,4] past) => (float[B,2,T,4] present, float[B,2,S,4] y) {
            x = Gather(table, ids) parted = Reshape(x, parts) heads = Transpose<perm = [0, 2, 1, 3]>(parted)
            present = Concat<axis = 2>(past, heads) keys = Transpose<perm = [0, 1, 3, 2]>(present)
            scores = MatMul(heads, keys) f = Cast<to = 1>(mask) t = Sub(one, f) h = Mul(t, big)
            wide = Unsqueeze(h, middle) masked = Add(scores, wide) p = Softmax<axis = -1>(masked)
            y = MatMul(p, present) }""",
        {"table": drawn(40, 8), "parts": ints(0, 0, 2, 4), "one": ONE, "big": BIG, "middle": ints(1, 2)},
    ),
    "even": (
        """(float[B,S] x) => (float[B,T,8] y) { parted = Reshape(x, parts) y = Tanh(parted) }""",
        {"parts": ints(0, -1, 8)},
    ),
    "equal": (
        """(float[N,4] x, float[N,4] y, float[?,4] z) => (float[N,4] r) { a = Mul(x, y) r = Sub(a, z) }""",
        {},
    ),
    "fixed": (
        """(int64[1,6] ids, float[1,3,8,8] image) => (float[1,6,8] y) {
            c = Conv(image, w) f = Flatten(c) t = MatMul(f, m) x = Gather(table, ids) y = Add(x, t) }""",
        {"w": drawn(1, 3, 8, 8), "m": drawn(1, 8), "table": drawn(5, 8)},
    ),
    "pads": (
        """(int64[B,S] ids) => (float[B,S,8] y) {
            x = Gather(table, ids) real = Equal(ids, one_i) other = Not(real) f = Cast<to = 1>(other)
            wide = Unsqueeze(f, last) total = CumSum(wide, middle) y = Mul(x, total) }""",
        {"table": drawn(40, 8), "one_i": np.int64(1), "last": ints(-1), "middle": np.int64(1)},
    ),
}


def made(name: str, folder: Path) -> tuple[Any, MadeUp]:
    text, weights = GRAPHS[name]
    path = folder / f"{name}.onnx"
    onnx.save(onnx_text(f"g {text}", weights), path)
    model = load_model(path)
    assert model.stored is not None
    return model.module, stored_inputs(model.module, model.stored)


@pytest.mark.parametrize("name", GRAPHS)
def test_f3_what_is_made_up_shows_what_a_port_does_to_its_inputs(name: str, tmp_path: Path) -> None:
    module, steps = made(name, tmp_path)
    assert unseen(lambda step: module(**step), steps) == []
    assert set(steps.recipes) == set(steps[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("table", {"ids": "below 50"}),
        ("table-of-two", {"ids": "below 9", "types": "below 2"}),
        ("table-behind", {"ids": "below 12"}),
        ("masked-attention", {"ids": "below 50", "mask": "padding on the right"}),
        ("masked-mean", {"mask": "padding on the right"}),
        ("chosen", {"keep": "padding on the right"}),
        ("rotary", {"positions": "positions: increasing"}),
        ("image", {"x": "image of normalized numbers"}),
        ("pixels", {"x": "pixels from 0 to 255"}),
        ("sound", {"x": "sound"}),
        ("rate", {"rate": "16000"}),
        ("lengths", {"lengths": "lengths: different ones"}),
        ("cache", {"ids": "below 40", "mask": "padding on the right", "past": "random"}),
        ("pads", {"ids": "1, which the model compares them with"}),
    ],
)
def test_f3_the_kind_of_each_input_is_read_off_the_graph(name: str, words: dict[str, str], tmp_path: Path) -> None:
    _, steps = made(name, tmp_path)
    for key, text in words.items():
        assert text in steps.recipes[key], steps.recipes[key]


@pytest.mark.parametrize("name", ["table", "masked-attention", "image", "cache", "even", "equal", "lstm"])
def test_f3_dynamic_dimensions_have_two_sizes(name: str, tmp_path: Path) -> None:
    _, steps = made(name, tmp_path)
    assert len(steps) == 2
    assert {tuple(value.shape) for value in steps[0].values()} != {tuple(value.shape) for value in steps[1].values()}


def test_f3_they_are_the_same_every_time(tmp_path: Path) -> None:
    for (_, one), (_, other) in zip(
        (made(name, tmp_path) for name in ("pixels", "cache")),
        (made(name, tmp_path) for name in ("pixels", "cache")),
        strict=True,
    ):
        for step, again in zip(one, other, strict=True):
            assert all(torch.equal(step[key], again[key]) for key in step)


def test_f3_a_file_that_reads_its_ids_backwards(tmp_path: Path) -> None:
    weights = {"table": drawn(50, 8), "start": ints(-1), "end": ints(-10000), "axes": ints(1), "steps": ints(-1)}
    right = "(int64[B,S] ids) => (float[B,S,8] y) { y = Gather(table, ids) }"
    wrong = "(int64[B,S] ids) => (float[B,S,8] y) { r = Slice(ids, start, end, axes, steps) y = Gather(table, r) }"
    onnx.save(onnx_text(f"g {right}", {"table": weights["table"]}), tmp_path / "right.onnx")
    onnx.save(onnx_text(f"g {wrong}", weights), tmp_path / "wrong.onnx")
    assert not glass.check(tmp_path / "right.onnx", candidate=tmp_path / "wrong.onnx").ok
    assert glass.check(tmp_path / "right.onnx", candidate=tmp_path / "right.onnx").ok


@pytest.mark.parametrize("size", [-1, 0])
def test_f18_a_size_of_minus_one_is_dynamic(size: int, tmp_path: Path) -> None:
    text = "g (float[N,3,H,W] x) => (float[N,4,h,w] y) { y = Conv(x, w) }"
    model = onnx_text(text, {"w": drawn(4, 3, 7, 7)})
    for value in (*model.graph.input, *model.graph.output):
        for place in (0, 2, 3):
            value.type.tensor_type.shape.dim[place].dim_value = size
    onnx.save(model, tmp_path / "old.onnx")
    assert glass.check(tmp_path / "old.onnx").ok


def test_f18_what_takes_nothing_is_told_before_anything_is_built(tmp_path: Path) -> None:
    text = "g (float[N,4] x, int64[K] n) => (float[N,M] y) { y = Reshape(x, n) }"
    onnx.save(
        onnx_text(text.replace("[K]", "[5]").replace("y = Reshape(x, n)", "t = Tile(x, n) y = MatMul(t, x)")),
        tmp_path / "no.onnx",
    )
    with pytest.raises(UsageError) as raised:
        glass.check(tmp_path / "no.onnx")
    assert "give inputs with --inputs" in raised.value.what
    assert "x: float32 [N, 4]; n: int64 [5]" in str(raised.value)
    assert "def inputs():" in str(raised.value)
    made_by_stub: dict[str, Any] = {}
    exec(str(raised.value.hint).partition("\n")[2], made_by_stub)
    assert set(made_by_stub["inputs"]()) == {"x", "n"}


class Lookup(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_f3_inputs_in_a_pt2_file_that_show_nothing_are_not_all(tmp_path: Path) -> None:
    sizes = {"ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(Lookup(), (torch.zeros(2, 5, dtype=torch.int64),), dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "lookup.pt2")
    model = load_model(tmp_path / "lookup.pt2")
    assert model.stored is not None
    steps = stored_inputs(model.module, model.stored)
    assert steps.num_in_file == 1 and not steps[0]["ids"].any()
    assert unseen(lambda step: model.module(**step), steps[1:]) == []
    assert len({tuple(step["ids"].shape) for step in steps[1:]}) == 2
    assert "below 20" in steps.recipes["ids"]
