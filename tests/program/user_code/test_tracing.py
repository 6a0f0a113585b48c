"""What makes a trace fast leaves nothing behind."""

from __future__ import annotations

import gc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._traceback import CapturedTraceback

from glassengine.program.export.export import export_module
from glassengine.program.representation.naming import source_line
from glassengine.program.representation.stored import load_graph, save_program
from glassengine.program.user_code.forward import explicit_keywords
from glassengine.program.user_code.tracing import (
    fast_tracing,
    fast_writing,
    is_users,
    without_collections,
    written_down,
)


def test_collections_go_on_after_an_error() -> None:
    with pytest.raises(KeyError), without_collections():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("dynamic", "is_cached"), [({"x": {0: "n"}}, False), ({"x": None}, True), (None, True)])
def test_fake_tensors_are_cached_where_sizes_are_fixed(dynamic: object, is_cached: bool) -> None:
    from torch._dynamo import config

    with fast_tracing(dynamic):
        assert config.fake_tensor_cache_enabled is is_cached
    assert config.fake_tensor_cache_enabled


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_a_graph_is_written_once_and_the_same_everywhere(tmp_path: Path) -> None:
    program = export_module(_Scaled(), {"x": torch.ones(2, 3)})
    other = export_module(_Scaled(), {"x": torch.ones(2, 4)})
    for name, one in (("a", program), ("b", program), ("c", other)):
        (tmp_path / name).mkdir()
        save_program(one, tmp_path / name)
    written = {name: (tmp_path / name / "program.pt2").read_bytes() for name in "abc"}
    assert written["a"] == written["b"] != written["c"]
    shapes = [node.meta["val"].shape for node in load_graph(tmp_path / "b").graph.nodes if node.op == "placeholder"]
    assert shapes == [(2, 3)]


def test_what_is_written_fast_is_what_torch_writes(tmp_path: Path) -> None:
    exported = export_module(_Scaled(), {"x": torch.ones(2, 3)}).exported
    torch.export.save(exported, tmp_path / "slow.pt2")
    with fast_writing():
        torch.export.save(exported, tmp_path / "fast.pt2")
    described = [_description(tmp_path / f"{name}.pt2") for name in ("slow", "fast")]
    assert described[0] == described[1]


def _description(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("models/model.json")))


def test_frames_are_those_of_torch() -> None:
    with fast_tracing(None):
        found = [str(frame) for frame in CapturedTraceback.extract().summary()]
    assert found[:-1] == [str(frame) for frame in CapturedTraceback.extract().summary()][:-1]
    assert __file__ in found[-1]


def test_a_program_that_is_read_fast_is_that_of_torch(tmp_path: Path) -> None:
    steps = [{"x": torch.ones(size, 3)} for size in (2, 5)]
    save_program(export_module(_Scaled(), steps), tmp_path)
    fast, plain = load_graph(tmp_path), torch.export.load(tmp_path / "program.pt2")
    assert [str(program) for program in (fast, fast.range_constraints)] == [str(plain), str(plain.range_constraints)]
    values = [[node.meta["val"] for node in program.graph.nodes if "val" in node.meta] for program in (fast, plain)]
    assert str(values[0]) == str(values[1])


class OfNumpy(nn.Module):
    """Calls NumPy, which torch.export cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.from_numpy(np.cos(np.arange(len(x))))[:, None].float()
        return shifted(self.layer(x) * table)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A helper of the forward above."""
    return x.roll(1, 0)


def test_ops_that_are_taken_down_from_a_run_have_their_lines() -> None:
    x = torch.randn(5, 3)
    repeated = written_down(OfNumpy().eval(), {"x": x})
    nodes = torch.export.export(repeated, (), {"x": x}).graph.nodes
    lines = {str(node.target): node.meta.get("stack_trace", "") for node in nodes}
    assert "shifted(self.layer(x) * table)" in lines["aten.mul.Tensor"]
    assert lines["aten.roll.default"].rstrip().endswith("return x.roll(1, 0)")


def test_ops_that_are_taken_down_from_a_run_have_their_modules() -> None:
    x = torch.randn(5, 3)
    repeated = written_down(nn.Sequential(OfNumpy(), nn.GELU()).eval(), {"input": x})
    nodes = torch.export.export(repeated, (), {"input": x}).graph.nodes
    stacks = {str(node.target): [*node.meta.get("nn_module_stack", {}).values()] for node in nodes}
    found = {target: stack[-1][0] for target, stack in stacks.items() if stack}
    assert found["aten.gelu.default"] == "1" and found["aten.mul.Tensor"] == "0"


class OfInputs(OfNumpy):
    """The same of an argument that is called `inputs`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def test_an_argument_called_inputs_is_taken_down() -> None:
    module, given = OfInputs().eval(), {"inputs": torch.randn(5, 3)}
    repeated = written_down(module, given)
    with explicit_keywords(repeated, given):
        exported = torch.export.export(repeated, (), given, dynamic_shapes={"inputs": None})
    assert torch.equal(exported.module()(**given), module(**given))


def test_a_folder_named_torch_is_not_the_library() -> None:
    assert is_users("site-packages/forecasts/torch/models/mixer.py")
    assert not is_users(torch.nn.functional.__file__)
    assert not is_users("/usr/lib/python3/dist-packages/torch/nn/functional.py")


class ByMethod(nn.Module):
    """Calls a layer in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OfTanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x)

    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2)


class OfTanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def test_the_method_that_calls_a_layer_is_among_its_lines() -> None:
    program = export_module(ByMethod().eval(), {"x": torch.randn(3)})
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    lines = ["return self.called(x)", "return self.layer(x * 2)", "return x.tanh()"]
    assert [str(source_line(node, depth)).rpartition(": ")[2] for depth in (1, 2, 3)] == lines
