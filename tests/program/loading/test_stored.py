"""`.pt2` files: the graph is the program's, the names are those of the modules, reading runs nothing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.capture.observers import run_program
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program import sites
from glassengine.program.loading.stored import read_exported, read_stored


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, times: int = 2) -> dict[str, Tensor]:
        y = self.body(x) + self.shift * times
        y.mul_(pair[0])
        return {"y": y, "rest": y.sum(-1) + pair[1].sum()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("stored") / "net.pt2"
    given = (torch.randn(3, 4), (torch.full((8,), 2.0), torch.ones(3)))
    dynamic = {"x": {0: torch.export.Dim("n", min=2, max=64)}, "pair": (None, None), "times": None}
    torch.export.save(torch.export.export(Net().eval(), given, {"times": 3}, dynamic_shapes=dynamic), path)
    return path


def test_names_inputs_and_sizes(stored: Path) -> None:
    module, program = read_exported(stored)
    assert [port.name for port in program.inputs] == ["x", "pair[0]", "pair[1]"]
    assert program.metadata["fixed_inputs"] == {"times": 3}
    assert list(program.output_nodes) == ["y", "rest"]
    names = [site.name for site in program.sites]
    assert {"body.0/linear.0", "body.2/relu.0", "./sum.0", "./mul.0"} <= set(names)
    (symbol,) = program.exported.range_constraints
    assert program.inputs[0].shape == (str(symbol), 4)
    assert set(module.state_dict()) >= {"body.0.weight", "body.1.running_mean", "shift"}


def test_a_loaded_program_computes_what_was_stored(stored: Path) -> None:
    module, program = read_exported(stored)
    given: dict[str, Any] = {"x": torch.randn(5, 4), "pair": (torch.full((8,), 2.0), torch.ones(3))}
    expected = torch.export.load(stored).module()(given["x"], given["pair"], times=3)
    named = {"x": given["x"], "pair[0]": given["pair"][0], "pair[1]": given["pair"][1]}
    found = run_program(program, named)
    own = module(**given)
    for name, value in expected.items():
        assert torch.equal(own[name], value)
        assert torch.equal(found[name], value)
    # Tensors that are written into later are kept as they were.
    values = module.values(given)
    assert torch.equal(values["./add.0"] * 2.0, expected["y"])
    with pytest.raises(UsageError, match=r"inputs are missing[\s\S]*pair"):
        module(x=given["x"])


def test_sites_lists_it(stored: Path) -> None:
    assert [site.name for site in sites(stored, "body.*/linear*")] == ["body.0/linear.0"]


def rewritten(path: Path, target: Path, change: Any) -> Path:
    """Copy an archive with its description changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("models/model.json"):
                model = json.loads(content)
                change(model)
                content = json.dumps(model).encode()
            new.writestr(info.filename, content)
    return target


def code_as_guard(model: dict[str, Any]) -> None:
    model["guards_code"] = ["open('planted', 'w')"]


def code_as_size(model: dict[str, Any]) -> None:
    name = next(iter(model["graph_module"]["graph"]["tensor_values"]))
    model["graph_module"]["graph"]["tensor_values"][name]["sizes"] = [
        {"as_expr": {"expr_str": "open('planted', 'w')", "hint": None}}
    ]


def code_as_name(model: dict[str, Any]) -> None:
    model["graph_module"]["graph"]["nodes"][0]["outputs"][0]["as_tensor"]["name"] = "x; open('planted', 'w')"


def code_as_operator(model: dict[str, Any]) -> None:
    model["graph_module"]["graph"]["nodes"][0]["target"] = "os.system"


def test_guards_are_left_out(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, _ = read_exported(rewritten(stored, tmp_path / "guards.pt2", code_as_guard))
    module(x=torch.randn(5, 4), pair=(torch.ones(8), torch.ones(3)))
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("change", [code_as_size, code_as_name, code_as_operator])
def test_code_in_a_file_is_refused(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptError, match="not a stored program"):
        read_exported(rewritten(stored, tmp_path / "evil.pt2", change))
    assert not (tmp_path / "planted").exists()


def test_archives_of_other_kinds(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.pt2"
    path.write_bytes(b"no archive")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_exported(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("net/data/weights/weight_0", bytes(1 << 20))
    with pytest.raises(CorruptError, match="compressed entries"):
        read_exported(path)
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("net/data/aotinductor/model/model.so", b"")
    with pytest.raises(CorruptError, match="an entry"):
        read_exported(path)
    whole = stored.read_bytes()
    for size in range(0, len(whole), 1999):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError):
            read_exported(path)


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
