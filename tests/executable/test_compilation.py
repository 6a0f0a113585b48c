"""Compilations: which earlier graph one is compared with, and what is said to differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glassengine.executable import compilation
from glassengine.executable.compilation import (
    FIRST,
    KEPT,
    Occasion,
    Outline,
    changes,
    compilations,
    note_compilation,
)
from glassengine.executable.graph import CapturedGraph, GraphKind, input_spec
from glassengine.results.backends import Cause, Compilation

X, Y = torch.ones(2, 3), torch.zeros(2, 3)
OTHER = Cause("size", "it was too large")


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compilation, "_compilations", [])
    monkeypatch.setattr(compilation, "_earlier", compilation._earlier.copy())
    compilation._earlier.clear()
    monkeypatch.setattr(compilation, "_first_with", {})
    yield


def graph(function: Any, *inputs: torch.Tensor, kind: GraphKind = "inference", names: str = "xyz") -> CapturedGraph:
    module = torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)
    specs = tuple(input_spec(value, name, "input") for value, name in zip(inputs, names, strict=False))
    return CapturedGraph(module, specs, ("out",), kind)


def note(name: str, captured: CapturedGraph | None, *causes: tuple[str, Cause], number: str = "") -> Compilation:
    note_compilation(name, captured, Occasion(causes or (("", FIRST),), number), 2_000_000_000)
    return compilations()[-1]


def differences(before: Any, after: Any) -> list[str]:
    return [str(change) for change in changes(Outline.of(before), Outline.of(after))]


def chain(*steps: str) -> CapturedGraph:
    def function(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = getattr(torch, step)(x)
        return x

    return graph(function, X)


def test_an_op_that_is_left_out_put_in_or_replaced() -> None:
    base = chain("sin", "cos", "exp", "tanh")
    assert differences(base, chain("sin", "exp", "tanh")) == ["op 1 is gone: aten.cos.default(#0)"]
    assert differences(base, chain("sin", "abs", "cos", "exp", "tanh")) == ["op 1 is new: aten.abs.default(#0)"]
    assert differences(base, chain("sin", "abs", "exp", "tanh")) == [
        "op 1: aten.cos.default(#0) -> aten.abs.default(#0)"
    ]
    assert differences(base, chain("sin", "cos", "exp")) == ["op 3 is gone: aten.tanh.default(#2)"]
    assert differences(base, base) == []


def test_an_argument_that_is_another_number_or_another_value() -> None:
    twice = graph(lambda x, y: x * 2 - y, X, Y)
    assert differences(twice, graph(lambda x, y: x * 3 - y, X, Y)) == [
        "op 0: aten.mul.Tensor(<x>, 2) -> aten.mul.Tensor(<x>, 3)"
    ]
    swapped = Outline.of(graph(lambda x, y: y - x * 2, X, Y))
    (change,) = changes(Outline.of(twice), swapped)
    assert (change.what, change.before, change.after) == (
        "order",
        "aten.sub.Tensor(#0, <y>)",
        "aten.sub.Tensor(<y>, #0)",
    )


def test_inputs_are_matched_by_name() -> None:
    before = graph(lambda x, y: x + y, X, Y, names="xy")
    after = graph(lambda y, x: x + y, Y.double(), X, names="yx")
    assert differences(before, after) == ["dtype of y: float32 -> float64"]
    fewer = graph(lambda x: x + x, X)
    assert differences(before, fewer) == [
        "input y is gone: float32[2, 3] stride (3, 1) cpu",
        "op 0: aten.add.Tensor(<x>, <y>) -> aten.add.Tensor(<x>, <x>)",
    ]
    assert differences(fewer, before)[0] == "input y is new: float32[2, 3] stride (3, 1) cpu"


def test_compared_with_the_most_similar_of_the_same_model() -> None:
    note("A/inference-0", chain("sin", "cos", "exp"))
    note("A/inference-1", chain("abs", "abs", "abs"))
    note("B/inference-0", chain("sin", "cos", "tanh"))
    noted = note("A/inference-2", chain("sin", "cos", "tanh"))
    assert noted.nearest == "A/inference-0"
    assert str(noted.changes[0]) == "op 2: aten.exp.default(#1) -> aten.tanh.default(#1)"
    assert note("C/inference-0", chain("sin", "cos", "tanh")).nearest == "B/inference-0"  # an equal graph
    assert note("D/inference-0", chain("sin")).nearest == ""


def test_a_backward_graph_is_compared_with_backward_graphs() -> None:
    note("A/forward-0", graph(torch.sin, X, kind="forward"))
    assert note("A/backward-0", graph(torch.cos, X, kind="backward")).nearest == ""
    assert note("A/backward-1", graph(torch.tan, X, kind="backward")).nearest == "A/backward-0"


def test_the_cause_is_that_of_the_graph_it_is_compared_with() -> None:
    note("A/inference-0", chain("sin", "cos"), number="0/0")
    note("A/inference-1", chain("abs", "abs"), number="0/1")
    noted = note("A/inference-2", chain("sin", "exp"), ("0/1", FIRST), ("0/0", OTHER), number="0/2")
    assert (noted.nearest, noted.cause) == ("A/inference-0", OTHER)
    # Numbers begin anew when the front end is reset: the latest graph with a number is meant.
    note("A/inference-3", chain("tan", "tan"), number="0/0")
    noted = note("A/inference-4", chain("sin", "cos"), ("0/0", OTHER), number="0/1")
    assert noted.nearest == "A/inference-3"


def test_few_outlines_are_kept() -> None:
    for number in range(3 * KEPT):
        note(f"A/inference-{number}", chain("sin", *["cos"] * (number % 3)))
    assert len(compilation._earlier["A"]) == KEPT
    assert len(compilations()) == 3 * KEPT


def test_one_line() -> None:
    note("A/inference-0", chain("sin", "cos"))
    second = note("A/inference-1", graph(lambda x: torch.sin(x).exp(), X.double()), ("", OTHER))
    text = str(second)
    assert text.startswith(f"compiled A/inference-1 (graph {second.graph_hash[:8]}, 2 ops) in 2.00 s because ")
    assert "because it was too large; unlike A/inference-0: dtype of x: float32 -> float64; op 1" in text
    assert "\n" not in text
    assert f"from {__file__}:" in text
    assert "unlike" not in str(note("Z", None))
    assert second.to_dict()["changes"][0]["what"] == "dtype"
