"""MaxPool with the places of its values: judged like any choice, with ties where values are alike."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from tests.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

POOL = """g (float[2, 3, {sizes}] x) => (float[2, 3, {out}] y, int64[2, 3, {out}] places) {{
    zero = Constant <value = float {{0}}> ()
    r = Max (x, zero)
    y, places = MaxPool <kernel_shape = {kernel}, strides = {strides}, pads = {pads}> (r) }}"""
FORMS = {
    "plane": POOL.format(sizes="7, 9", out="A, B", kernel="[3, 2]", strides="[2, 1]", pads="[1, 0, 1, 1]"),
    "line": POOL.format(sizes="11", out="A", kernel="[3]", strides="[2]", pads="[1, 1]"),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_places_are_judged(form: str, tmp_path: Path) -> None:
    onnx.save(onnx_text(FORMS[form]), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok, result.not_ok_because
    assert {found.name for found in result.results} == {"y", "places"}


@pytest.mark.parametrize("form", list(FORMS))
def test_a_wrong_pool_is_named(form: str, tmp_path: Path) -> None:
    onnx.save(onnx_text(FORMS[form]), tmp_path / "one.onnx")
    text = FORMS[form].replace("kernel_shape = [3", "kernel_shape = [2")
    text = text.replace("pads = [1, 0, 1, 1]", "pads = [1, 0, 0, 1]").replace("pads = [1, 1]", "pads = [1, 0]")
    onnx.save(onnx_text(text), tmp_path / "other.onnx")
    result = glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site in ("y", "places")
