"""Grids of activations that are too wide, beside right ones that are wide on purpose or made for other inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.plugins.quantized.test_port import GIVEN, checked, files

__all__ = ["files"]


def rescaled(source: Path, to: Path, name: str, factor: float) -> Path:
    model = onnx.load(str(source))
    (scale,) = [one for one in model.graph.initializer if one.name == name]
    value = np.asarray(numpy_helper.to_array(scale) * np.float32(factor))
    scale.CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(model, str(to))
    return to


@pytest.mark.parametrize(
    ("name", "form", "scale", "site"),
    [
        ("text", "QDQ", "/Add_1_output_0_scale", "/Add_1_output_0"),
        ("text", "QDQ", "/Softmax_output_0_scale", "/Softmax_output_0"),
        ("text", "QOperator", "/up/Add_output_0_scale", "/up/Add_output_0"),
        ("picture", "QDQ", "x_scale", "x"),
        ("picture", "QOperator", "/two/Conv_output_0_scale", "/two/Conv_output_0"),
    ],
)
def test_f53_a_scale_of_activations_that_is_four_times_too_large_is_named(
    name: str, form: str, scale: str, site: str, files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    result = checked(name, rescaled(files[name, form], tmp_path / "wide.onnx", scale, 4), tmp_path)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == site
    assert "times as far as its values" in result.first_divergence.hints[0].text


def test_f53_a_file_that_was_calibrated_on_larger_inputs_raises_no_alarm(
    files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    result = checked("picture", files["picture", "QDQ"], tmp_path, x=GIVEN["picture"]["x"] / 4)
    assert result.ok and result.verdict == "rounding", result.origins
