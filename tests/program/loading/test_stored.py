"""Files that describe no program are refused, whatever it is that they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassengine.errors import CorruptError, GlassError
from glassengine.program.loading.stored import read_stored

onnx = pytest.importorskip("onnx")


def model(change: Callable[[Any], None], path: Path) -> Path:
    helper = onnx.helper
    float_ = onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, float_, [2, 3]) for name in "xy")
    node = helper.make_node("Softmax", ["x"], ["y"], axis=-1)
    made = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
    change(made)
    path.write_bytes(made.SerializeToString())
    return path


def size(value: int) -> Callable[[Any], None]:
    return lambda made: setattr(made.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", value)


def dimensions(made: Any) -> None:
    for _ in range(70):
        made.graph.input[0].type.tensor_type.shape.dim.add(dim_value=1)


def without_branch(made: Any) -> None:
    node = made.graph.node[0]
    node.op_type = "If"
    del node.attribute[:]


def unknown_input(made: Any) -> None:
    made.graph.node[0].input[0] = "nobody"


IMPOSSIBLE = {"size": size(1 << 62), "64 dimensions": dimensions, "no branch": without_branch, "input": unknown_input}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_s11_an_onnx_file_that_says_what_cannot_be(change: Callable[[Any], None], tmp_path: Path) -> None:
    path = model(change, tmp_path / "model.onnx")
    with pytest.raises(GlassError):
        read_stored(path)


def test_a_right_file_is_read_also_with_sizes_that_are_none(tmp_path: Path) -> None:
    assert read_stored(model(lambda made: None, tmp_path / "model.onnx"))[1].graph is not None
    assert read_stored(model(size(-1), tmp_path / "model.onnx"))[1].graph is not None


def test_s4_sizes_are_said(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="'x' is larger than a tensor can be"):
        read_stored(model(size(1 << 40), tmp_path / "model.onnx"))
    with pytest.raises(CorruptError, match="'x' is larger than a tensor can be"):
        read_stored(model(size((1 << 31) - 1), tmp_path / "model.onnx"))
