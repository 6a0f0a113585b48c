"""Nothing that a stored program names is imported, executed or opened, and what programs need is let through."""

from __future__ import annotations

import collections
import copy
import enum
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import CorruptError
from glassengine.program.loading.stored import read_exported
from glassengine.program.representation.archive import _is_harmless, is_expression, problems

Change = Callable[[dict[str, Any]], None]
X = torch.ones(2, 4)
LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    torch.export.save(torch.export.export(Net().eval(), (X,)), path)
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glass.build(Net().eval(), tmp_path_factory.mktemp("e") / "e", backend="eager", inputs={"x": X}).directory


def changed(path: Path, target: Path, change: Change) -> Path:
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in files if name.endswith("models/model.json"))
    model = json.loads(files[name])
    change(model)
    files[name] = json.dumps(model).encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target


def signature(model: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["graph_module"]["module_call_graph"][0]["signature"]
    return found


def results(context: Any) -> Change:
    spec = {"type": "builtins.dict", "context": context, "children_spec": [LEAF]}
    return lambda model: signature(model).update(out_spec=json.dumps([1, spec]))


def keyed(module: str, name: str) -> Change:
    return results(json.dumps([{"__enum__": True, "fqn": module, "name": name}]))


def factory(module: str, name: str) -> Change:
    made = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["y"]}
    spec = {"type": "collections.defaultdict", "context": made, "children_spec": [LEAF]}
    return lambda model: signature(model).update(out_spec=json.dumps([1, spec]))


def arguments(*names: str) -> Change:
    return lambda model: signature(model).update(forward_arg_names=list(names))


def keywords(*names: str) -> Change:
    args = {"type": "builtins.tuple", "context": "null", "children_spec": []}
    kwargs = {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [LEAF] * len(names)}
    both = {"type": "builtins.tuple", "context": "null", "children_spec": [args, kwargs]}
    return lambda model: signature(model).update(in_spec=json.dumps([1, both]), forward_arg_names=None)


def called(target: str, *values: tuple[str, str, Any]) -> Change:
    """Add a call of `target`, whose arguments are (name, kind of value, value); its result is used by nobody."""

    def change(model: dict[str, Any]) -> None:
        graph = model["graph_module"]["graph"]
        graph["tensor_values"]["evil"] = copy.deepcopy(graph["tensor_values"]["relu"])
        inputs = [{"name": name, "arg": {kind: value}, "kind": 1} for name, kind, value in values]
        output = [{"as_tensor": {"name": "evil"}}]
        node = {"target": target, "inputs": inputs, "outputs": output, "metadata": {}, "name": "evil"}
        graph["nodes"].append({**node, "is_hop_single_tensor_return": True})

    return change


def weight_called(name: str) -> Change:
    def change(model: dict[str, Any]) -> None:
        model["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = name

    return change


# They read and write memory where they are told to.
TRUSTING = (
    "inductor._reinterpret_tensor.default", "inductor._alloc_from_pool.default",
    "inductor.resize_storage_bytes_.default",
    "symm_mem.memset32_.default", "mkl._mkl_linear.default", "aten._sparse_coo_tensor_unsafe.default",
    "aten._sparse_csr_tensor_unsafe.default", "static_runtime.create_owned_ref.default", "c10d.send.default",
)  # fmt: skip


def attacks(mark: str) -> dict[str, tuple[Change, str]]:
    code = f"__import__('pathlib').Path({mark!r}).touch()"
    touch = ("", "as_string", f"touch {mark}")
    wrap = "torch.ops.higher_order.wrap"
    file = [("filename", "as_string", mark), ("shared", "as_bool", True), ("size", "as_int", 8)]
    return {
        "library": (keyed("ctypes:cdll", mark), "a key 'ctypes:cdll' that is imported"),
        "module": (keyed("evil_module:Kind", "A"), "a key 'evil_module:Kind' that is imported"),
        "looked up": (keyed("os:environ", "HOME"), "a key 'os:environ' that is imported"),
        "nested": (results(json.dumps([[{"a": {"__enum__": 1, "fqn": "evil_module:A", "name": "A"}}]])), "is imported"),
        "factory": (factory("evil_module", "factory"), "a factory 'factory' that is imported"),
        "argument": (arguments("x", f"y={code}"), "an argument called .y="),
        "keyword": (keywords(f"y={code}"), "an argument called"),
        "callable": (called(wrap, ("", "as_operator", "torch.os.system"), touch), "an operator 'torch.os.system'"),
        "eval": (called(wrap, ("", "as_operator", "torch.os.sys.modules"), touch), "an operator 'torch.os.sys"),
        "method": (called("torch.ops.load_library.__call__", ("", "as_string", mark)), "an operator 'torch.ops.load_"),
        "import": (called("torch.ops.import_module.__call__", ("", "as_string", "evil_module")), "an operator 'torch"),
        "number": (called("_operator.call", touch), "an operator '_operator.call'"),
        "file": (called("torch.ops.aten.from_file.default", *file), "an operator 'torch.ops.aten.from_file"),
        "save": (called("torch.ops.aten.save.default", ("", "as_string", mark)), "an operator 'torch.ops.aten.save"),
        "passed on": (called(wrap, ("", "as_operator", "torch.ops.aten.from_file.default")), "an operator 'torch.ops"),
        "delegate": (called("torch.ops.higher_order.aoti_call_delegate"), "an operator 'torch.ops.higher_order.aoti"),
        "weight": (weight_called(f'fc.weight"), {code}, ("'), "a weight called"),
        **{name: (called(f"torch.ops.{name}"), f"an operator 'torch.ops.{name}") for name in TRUSTING},
        "library's": (called("torch.ops.test_stored_names.write.default", ("", "as_string", mark)), "given the text"),
    }


@pytest.fixture(scope="module", autouse=True)
def operator_of_a_library() -> Iterator[None]:
    """An installed package registers operators that open files: of images, of sound."""
    library = torch.library.Library("test_stored_names", "FRAGMENT")
    library.define("write(Tensor x, str name) -> Tensor")

    def write(x: torch.Tensor, name: str) -> torch.Tensor:
        Path(name).write_bytes(b"")
        return x.clone()

    library.impl("write", write, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.parametrize("name", attacks(""))
def test_s1_what_a_program_names_is_not_reached(
    name: str, program: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil_module.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    change, found = attacks(str(mark))[name]
    evil = changed(program, tmp_path / "evil.pt2", change)
    with pytest.raises(CorruptError, match=found):
        read_exported(evil)
    changed(engine / "main" / "program.pt2", tmp_path / "program.pt2", change)
    with pytest.raises(CorruptError, match=found):
        engine_of_inert_programs(tmp_path)
    assert not mark.exists()


def engine_of_inert_programs(directory: Path) -> Any:
    from glassengine.program.representation.stored import load_graph

    return load_graph(directory)


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every text in a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        if isinstance(item, str):
            yield (*path, key)
        else:
            yield from strings(item, (*path, key))


@pytest.mark.slow
def test_s1_no_text_of_a_program_is_executed(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in the place of every text in turn: as an argument, in quotes, after the end of a line, as a default."""
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    with zipfile.ZipFile(program) as archive:
        name = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        model = json.loads(archive.read(name))
    # One place of each kind: what lies in lists is alike.
    places = {tuple(key for key in path if not isinstance(key, int)): path for path in strings(model)}
    assert len(places) > 15
    for path in places.values():
        for text in (f"x={code}", f"x:{code}", f"x\n    {code}", f'x"), {code}, ("'):

            def change(model: dict[str, Any], path: tuple[Any, ...] = path, text: str = text) -> None:
                value: Any = model
                for key in path[:-1]:
                    value = value[key]
                value[path[-1]] = text

            changed(program, tmp_path / "evil.pt2", change)
            try:
                module, read = read_exported(tmp_path / "evil.pt2")
                module(x=X)
                read.exported.module()
            except Exception as error:
                assert not isinstance(error, SyntaxError), (path, error)
            assert not mark.exists(), (path, text)


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


torch.utils._pytree._register_namedtuple(Point, serialized_type_name="test_stored_names.Point")


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, pair: dict[str, Any], *, scale: torch.Tensor) -> Any:
        branch = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
        table = collections.defaultdict(list, {"a b": branch})
        padded = torch.nn.functional.pad(x, (1, 1), mode="reflect")
        return {Color.RED: x + pair["k-1"], "q": [table, Point(x * scale, padded)]}, collections.OrderedDict(z=x.gelu())


def test_programs_with_all_that_is_let_through_are_read(tmp_path: Path) -> None:
    class Gelu(Nested):
        def forward(self, x: torch.Tensor, pair: dict[str, Any], *, scale: torch.Tensor) -> Any:
            torch.Tensor.gelu = lambda self: torch.nn.functional.gelu(self, approximate="tanh")  # type: ignore[attr-defined]
            return super().forward(x, pair, scale=scale)

    path = tmp_path / "m.pt2"
    exported = torch.export.export(Gelu(), (X, {"k-1": X}), {"scale": X})
    torch.export.save(exported, path)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        assert not list(problems(json.loads(archive.read(name))))
    module, _ = read_exported(path)
    (found, _), (expected, _) = module(x=X, pair={"k-1": X}, scale=X), exported.module()(X, {"k-1": X}, scale=X)
    assert torch.equal(found[Color.RED], expected[Color.RED])


def test_an_operator_of_a_library_is_called_with_what_is_no_path(tmp_path: Path) -> None:
    text = called("torch.ops.test_stored_names.write.default", ("name", "as_string", "per_channel"))
    model: dict[str, Any] = {"graph_module": {"graph": {"nodes": [], "tensor_values": {"relu": {}}}}}
    text(model)
    assert not list(problems(model))
    # What is not registered is left to torch, which says that it is to be imported.
    model["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.nobodys.op.default"
    assert not list(problems(model))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("9**9**9", False),
        ("((((9**60)**60)**60)**60)", False),
        ("Pow(Symbol('s0'), Pow(Integer(9), Integer(9)))", False),
        ("PowByNatural(Integer(9), Integer(999999999))", False),
        ("s0**s1", False),
        ("s0**", False),
        ("s0**2 + s1**2", True),
        ("Pow(Symbol('s77', integer=True), Integer(2))", True),
        ("Mul(Integer(64), Pow(Symbol('s58', positive=True), Integer(-1)))", True),
    ],
)
def test_powers_of_sizes_are_small(text: str, ends: bool) -> None:
    assert is_expression(text) is ends


@pytest.mark.parametrize("name", TRUSTING)
def test_s1_an_operator_that_reaches_any_memory_is_refused_and_is_there(name: str) -> None:
    library, operator, _ = name.split(".")
    if hasattr(getattr(torch.ops, library), operator):  # of this build of torch
        assert not _is_harmless(library, operator, "default")
    for plain in ("view", "as_strided", "sparse_coo_tensor", "_unsafe_view", "_unsafe_index"):
        assert _is_harmless("aten", plain, getattr(torch.ops.aten, plain).overloads()[0])
