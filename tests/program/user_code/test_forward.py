"""Compiled and scripted modules: what was written is exported, and is there again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.program import load_model
from glassengine.program.loading.load import fingerprint
from glassengine.program.user_code.forward import as_written, forward_parameters, uncompiled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.softmax(self.layers(x) * scale, -1)


def test_what_is_compiled_is_there_again() -> None:
    model = Net()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    model.layers[2].compile(backend="eager")
    whole = torch.compile(model, backend="eager")
    held, call = model.layers[0], model.layers[2]._compiled_call_impl
    with uncompiled(whole) as root:  # type: ignore[arg-type]
        assert root is model and [*dict(root.named_parameters())] == [*dict(Net().named_parameters())]
        assert root.layers[2]._compiled_call_impl is None  # type: ignore[index,union-attr]
    assert model.layers[0] is held and model.layers[2]._compiled_call_impl is call
    assert as_written(whole) is model  # type: ignore[arg-type]


def test_parameters_of_scripted_code() -> None:
    found = forward_parameters(torch.jit.script(Net()))
    assert [*found] == ["x", "scale"] and found["scale"].default == 1.0
    assert found["x"].default is found["x"].empty


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated, and still what people have
def test_a_fingerprint_of_codes_and_scales() -> None:
    def quantized(change: float = 1) -> nn.Module:
        model = Net()
        model.layers[0].weight.data *= change  # type: ignore[union-attr]
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]

    assert fingerprint(quantized()) == fingerprint(quantized()) != fingerprint(quantized(1.5))


@pytest.mark.parametrize(("how", "factor"), [("whole", 1), ("whole", 1.2), ("in place", 1), ("a part", 1.2)])
def test_a_compiled_candidate_is_judged_op_by_op_and_as_it_runs(how: str, factor: float, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.save({"x": torch.randn(2, 4)}, tmp_path / "x.pt")
    port: nn.Module = Net().eval()
    port.layers[2].weight.data *= factor  # type: ignore[index,union-attr]
    if how == "a part":
        port.layers[2] = torch.compile(port.layers[2], backend="eager")  # type: ignore[index,operator]
    elif how == "in place":
        port.compile(backend="eager")
    else:
        port = torch.compile(port, backend="eager")  # type: ignore[assignment]
    found = check(Net().eval(), candidate=port, inputs=str(tmp_path / "x.pt"))
    assert found.ok == (factor == 1)
    assert {pair.level for pair in found.pairs} == {"program", "candidate", "candidate, untouched"}
    if not found.ok:
        assert found.first_divergence is not None and found.first_divergence.site.startswith("layers.2")


def test_scripted_code_is_judged_by_its_results(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 4)}, tmp_path / "x.pt")
    found = check(Net().eval(), candidate=torch.jit.script(Net().eval()), inputs=str(tmp_path / "x.pt"))
    assert all(result.verdict in ("identical", "rounding") for result in found.results)
    assert not found.origins


def test_a_model_is_loaded_by_what_was_written() -> None:
    loaded = load_model(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]
    assert loaded.metadata["class"].endswith("Net") and loaded.metadata["fingerprint"] == fingerprint(Net())


def test_a_graph_of_an_export_takes_its_arguments_by_name(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    x = torch.randn(2, 4)
    torch.save({"x": x}, tmp_path / "x.pt")
    for factor in (1, 1.2):
        other = Net().eval()
        other.layers[2].weight.data *= factor  # type: ignore[operator,union-attr]
        graph = torch.export.export(other, (x,)).module()
        found = check(Net().eval(), candidate=graph, inputs=str(tmp_path / "x.pt"))
        assert found.ok == (factor == 1)
        assert found.first_divergence is None or found.first_divergence.site.startswith("layers.2")
