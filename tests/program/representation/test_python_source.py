"""`graph_module.py` of unusual graphs: it runs, and computes what the module computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.program.export.export import export_module
from glassengine.program.representation.listing import Stage, list_nodes, stage_of
from glassengine.program.representation.python_source import module_source
from tests.modules import module_at


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, lambda x: torch.cos(x) - 1, (x,))
        return result


class Tied(nn.Module):
    """A tied weight, a buffer that is not saved, a constant that tracing lifts, nested inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.arange(3.0), persistent=False)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, pair: list[torch.Tensor], count: int = 3) -> dict[str, Any]:
        y = self.second(self.first(pair[0])) + self.offset
        return {"a": y, "b": {"c": y.clamp(max=float("inf")) * torch.tensor([1.0, 2.0, 3.0]) * count}}


class InPlace(nn.Module):
    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.topk(x, 2)
        return values, indices, x.split(2, -1)[1], x.reshape(x.shape[0], -1).to(torch.float64)


CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "branches": (Branches(), {"x": -torch.ones(3)}),
    "tied": (Tied(), {"pair": [torch.randn(2, 3), torch.randn(2)], "count": 4}),
    "in place": (InPlace(), {"state": torch.ones(3), "x": torch.arange(3.0)}),
    "parts": (Parts(), {"x": torch.randn(4, 4)}),
}


def written(stage: Stage, path: Path) -> Any:
    """Return the module that the stage's file defines."""
    source = module_source(stage, list_nodes(stage), 'A "title"\\')
    path.write_text(source)
    return module_at(path)


@pytest.mark.parametrize("name", CASES)
def test_file_computes_what_the_module_computes(name: str, tmp_path: Path) -> None:
    module, inputs = CASES[name]
    before = [tensor.clone() for tensor in _tensors(inputs)]
    stages: list[Stage] = []
    program = export_module(module, inputs, on_stage=stages.append)
    stages.append(stage_of(program, "functional"))
    weights = {**program.exported.state_dict, **program.exported.constants}
    given = {port.name: tensor for port, tensor in zip(program.inputs, _tensors(inputs), strict=True)}
    torch.save({k: v.detach() for k, v in weights.items()}, tmp_path / "weights.pt")
    expected = _tensors(module(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}))
    for stage in stages:
        file = written(stage, tmp_path / f"{stage.name}.py")
        results = file.run(file.load_weights(tmp_path / "weights.pt"), given)
        found = [results[key] for key in results if key not in program.caches.values()]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert "mark" not in (tmp_path / f"{stage.name}.py").read_text()
    assert all(torch.equal(one, other) for one, other in zip(_tensors(inputs), before, strict=True))


def test_random_weights_keep_shapes_and_ties(tmp_path: Path) -> None:
    module, inputs = CASES["tied"]
    file = written(stage_of(export_module(module, inputs), "functional"), tmp_path / "graph_module.py")
    weights = file.random_weights()
    assert weights["second.weight"] is weights["first.weight"]
    assert {name: tuple(weights[name].shape) for name in ("first.weight", "first.bias")} == {
        "first.weight": (3, 3), "first.bias": (3,),
    }  # fmt: skip
    assert torch.equal(file.random_weights()["first.bias"], weights["first.bias"])
    assert file.run(weights, file.example_inputs()).keys() == {"a", "b.c"}


def test_state_dict_without_the_tied_name(tmp_path: Path) -> None:
    module, inputs = CASES["tied"]
    file = written(stage_of(export_module(module, inputs), "functional"), tmp_path / "graph_module.py")
    stored = {"first.weight": torch.ones(3, 3), "first.bias": torch.ones(3), "second.bias": torch.ones(3)}
    torch.save(stored, tmp_path / "w.pt")
    with pytest.raises(SystemExit, match="lacks 2 weights: offset"):
        file.load_weights(tmp_path / "w.pt")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
