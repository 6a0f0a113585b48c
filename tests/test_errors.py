"""Messages: what is said of errors of others, and of names that are not there."""

from __future__ import annotations

import pytest

from glassengine.errors import UnknownNameError, first_line

OPENVINO = (
    "Exception from src/inference/src/cpp/infer_request.cpp:104:\n"
    "Exception from src/inference/src/cpp/infer_request.cpp:67:\n"
    "Check 'shape.compatible(ov::PartialShape(tensor->get_shape()))' failed at src/plugins/cpu/infer.cpp:385:\n"
    "Can't set the input tensor with index: 0\n\n"
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (OPENVINO, "Can't set the input tensor with index: 0"),
        ("mat1 and mat2 shapes cannot be multiplied\nmore", "mat1 and mat2 shapes cannot be multiplied"),
        ("\n  reason\n", "reason"),
        ("Exception from src/core.cpp:1:\n", "Exception from src/core.cpp:1:"),
        ("", ""),
        ("core.cpp:12: what went wrong", "core.cpp:12: what went wrong"),
    ],
)
def test_f41_the_reason_and_not_the_place_in_somebodys_code(text: str, line: str) -> None:
    assert first_line(RuntimeError(text)) == line


def test_f41_names_of_which_there_are_none() -> None:
    assert "expected: nothing: there is no site" in str(UnknownNameError("site", "x", []))
    assert "0 names" not in str(UnknownNameError("site", "x", []))
