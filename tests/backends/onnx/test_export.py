"""A graph converted as it is equals that of the long way; an op that has to be decomposed takes the long way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes, _registration

from glassengine.backends.onnx import export
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program
from glassengine.testing import models


class Other(nn.Module):
    """Ops under names without a translation, one op with several results, and sizes that are computed with."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        values, places = x.topk(2, dim=-1)
        left, right = x.split(3, dim=-1)
        both = (keep & (x > 0)) | (keep ^ (left.sum() > 0))
        rows = x.reshape(x.shape[0] * 2, -1).sum(1)
        return {"low": torch.min(left, right), "high": torch.max(left, right), "both": both, "rows": rows} | {
            "best": values,
            "places": places,
        }


class Mixed(nn.Module):
    """Operands that have to be cast, and an op that a rule with two results begins with."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = keep.long().cumsum(0)
        first, second = torch.split(x.relu(), 3, dim=-1)
        return {
            "sum": x + whole,
            "half": (x.half() * whole).float() + x.mean(-1, keepdim=True),
            "double": torch.where(whole > 1, x, whole.double()),
            "number": (whole * 1.5).sum() + keep.sum(),
            "quotient": whole / 2,
            "parts": torch.sin(whole)[:, :3] * first - second,
        }


class Differences(nn.Module):
    """An op that is decomposed, since it has no translation."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, x, 0.0).diff(dim=-1)


def program_of(module: nn.Module) -> Program:
    steps = [{"x": torch.randn(rows, 6), "keep": torch.ones(rows, 6, dtype=torch.bool)} for rows in (2, 3)]
    return export_module(module.eval(), steps)


def converted(program: Program, directory: Path) -> tuple[Any, ...]:
    """Return all of an ONNX graph but the names of its inner values."""
    directory.mkdir()
    export.export_onnx(program, directory)
    model = onnx.load(directory / export.MODEL_FILE)
    numbers: dict[str, int] = {}
    weights = {each.name: (tuple(each.dims), each.data_type, each.raw_data) for each in model.graph.initializer}

    def known(names: Any) -> list[Any]:
        return [weights.get(name) or numbers.setdefault(name, len(numbers)) for name in names]

    ports = [known(each.name for each in model.graph.input)]
    layers = [
        (
            *(each.op_type, each.name, known(each.input), known(each.output)),
            *(str(attribute) for attribute in each.attribute),
            *(item.value for item in each.metadata_props if item.key.startswith("glassengine")),
        )
        for each in model.graph.node
    ]
    return ports, layers, known(each.name for each in model.graph.output), list(map(str, model.metadata_props))


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that fills with the graphs that go the long way."""
    found: list[Any] = []
    real = _fx_passes.decompose_with_registry
    monkeypatch.setattr(
        _fx_passes,
        "decompose_with_registry",
        lambda exported, registry: (found.append(exported), real(exported, registry))[1],
    )
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: program_of(Other()),
        lambda: program_of(Mixed()),
        pytest.param(
            lambda: export_module(models.vision().eval(), [models.vision_inputs(batch) for batch in (2, 3)]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["others", "mixed", "vision"],
)
def test_both_ways_give_the_same_graph(
    make: Callable[[], Program], tmp_path: Path, long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make()
    short = converted(program, tmp_path / "short")
    assert not long_ways
    monkeypatch.setattr(export, "fast_conversion", contextlib.nullcontext)
    long = converted(program, tmp_path / "long")
    assert len(long_ways) == 1
    assert short == long and len(short[1]) > 10


def test_programs_that_need_decomposition_are_converted_by_it(tmp_path: Path, long_ways: list[Any]) -> None:
    _, layers, *_ = converted(program_of(Differences()), tmp_path / "graph")
    assert len(long_ways) == 1 and "Sub" in {layer[0] for layer in layers}


def test_a_wrong_other_name_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(Other())
    right = converted(program, tmp_path / "right")
    aten = torch.ops.aten
    monkeypatch.setitem(export._OTHER_NAMES, aten.min.other, aten.maximum.default)
    assert converted(program, tmp_path / "wrong") != right


def test_translations_of_one_conversion_are_not_those_of_the_next() -> None:
    def own(x: Any) -> Any:
        return x

    read = _registration.ONNXRegistry.from_torchlib
    with export.fast_conversion():
        first = _registration.ONNXRegistry.from_torchlib(opset_version=export.OPSET)
        first.register_op(torch.ops.aten.relu.default, own)
        second = _registration.ONNXRegistry.from_torchlib(opset_version=export.OPSET)
    assert first.get_decomps(torch.ops.aten.relu.default)[0].onnx_function is own
    assert second.get_decomps(torch.ops.aten.relu.default)[0].onnx_function is not own
    assert read == _registration.ONNXRegistry.from_torchlib
