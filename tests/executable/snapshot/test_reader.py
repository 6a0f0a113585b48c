"""Snapshots on disk: what they hold, what they share, that they run again, and that reading them is safe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import dropout

import glassengine as glass
from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.executable.run.executable import Executable
from glassengine.executable.snapshot.layout import directory_name, sealed
from glassengine.executable.snapshot.tensors import TensorFile, copied, restored, write_tensors

MakeExecutable = Callable[..., Executable]
X = torch.arange(6.0).reshape(2, 3)
W = torch.linspace(-1, 1, 3)


def scale(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * w, (x @ w).exp())


def taken(directory: Path, executable: Executable, *arguments: Any, **options: Any) -> glass.snapshots.Snapshot:
    """Run once and return the snapshot of it."""
    with glass.snapshots.take(directory, **{"contents": "inputs outputs", **options}) as snapshots:
        executable.run(list(arguments))
    assert snapshots.left_out.total() == 0
    return glass.snapshots.Snapshot.open(snapshots.written[-1])


def replayed(snapshot: glass.snapshots.Snapshot) -> tuple[Any, ...]:
    with torch.random.fork_rng(), torch.no_grad():
        torch.set_rng_state(snapshot.rng_states["cpu"])
        return snapshot.graph.graph_module(*snapshot.arguments())


def assert_replays(snapshot: glass.snapshots.Snapshot) -> None:
    """The graph on the inputs gives the outputs, bit for bit."""
    results = replayed(snapshot)
    assert len(results) == len(snapshot.output_names) > 0
    for name, value in zip(snapshot.output_names, results, strict=True):
        assert torch.equal(value, snapshot.output(name)), name


def test_names_are_those_of_the_document(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, x=X, w=W)
    with glass.snapshots.take(tmp_path) as snapshots:
        for _ in range(3):
            executable.run([X, W])
    number = f"{executable.number:06d}"
    assert [path.name for path in snapshots.written] == [
        f"tiny.main-process000000-executable{number}-device000000-execution{execution:06d}" for execution in range(3)
    ]
    # The graph and the inputs alone, as documented.
    assert sorted(item.name for item in snapshots.written[0].iterdir()) == [
        "graph.pt2",
        "inputs.safetensors",
        "meta.json",
        "rng.safetensors",
    ]
    assert glass.snapshots.Snapshot.open(snapshots.written[2]).outputs is None


@pytest.mark.parametrize("name", ["../../etc/x", "a" * 4096, "モデル/main", "", "a b\n\0c", "..."])
def test_no_name_of_an_executable_becomes_a_path(tmp_path: Path, make_executable: MakeExecutable, name: str) -> None:
    executable = make_executable(scale, x=X, w=W)
    executable.name = name
    snapshot = taken(tmp_path / "dump", executable, X, W)
    assert snapshot.path.parent == tmp_path / "dump"
    assert snapshot.name == name
    assert len(directory_name(name, 0, 0, 0, 0)) < 200


def test_a_snapshot_runs_again_bit_for_bit(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, {"w": "parameter"}, x=X, w=W)
    snapshot = taken(tmp_path, executable, X, W)
    assert_replays(snapshot)
    assert [(entry.name, entry.kind, entry.file) for entry in snapshot.inputs] == [
        ("x", "input", "inputs.safetensors"),
        ("w", "parameter", "weights-0.safetensors"),
    ]
    assert torch.equal(load_file(snapshot.path / "inputs.safetensors")["x"], X)
    with pytest.raises(UnknownNameError, match=r"unknown input of the snapshot 'v'"):
        snapshot.input("v")


def test_random_numbers_are_those_of_the_run(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x: (dropout(x, 0.5, training=True),), x=torch.ones(64))
    snapshot = taken(tmp_path, executable, torch.ones(64))
    assert 0 < int((snapshot.output("output[0]") == 0).sum()) < 64
    assert_replays(snapshot)


def test_an_input_that_the_run_overwrites_is_kept_as_it_was(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total.add_(x)
        return (total * 2,)

    executable = make_executable(step, x=X, total=torch.zeros(2, 3))
    total = torch.ones(2, 3)
    snapshot = taken(tmp_path, executable, X, total)
    assert torch.equal(total, X + 1)
    assert torch.equal(snapshot.input("total"), torch.ones(2, 3))
    assert [entry.is_mutated for entry in snapshot.inputs] == [False, True]
    assert_replays(snapshot)


def test_tensors_that_a_graph_holds_are_constants(tmp_path: Path, make_executable: MakeExecutable) -> None:
    table = torch.tensor([2.0, 3.0, 5.0])
    snapshot = taken(tmp_path, make_executable(lambda x: (x * table,), x=X), X)
    assert [(entry.kind, entry.describe()) for entry in snapshot.inputs] == [
        ("input", "float32[2,3]"),
        ("constant", "float32[3]"),
    ]
    assert_replays(snapshot)


def test_plain_values_and_missing_ones_are_told_apart(tmp_path: Path) -> None:
    values = [3, 2.5, float("inf"), True, None, "text", torch.Generator()]
    names = ("int", "float", "inf", "bool", "none", "str", "generator")
    executable = Executable("plain", lambda arguments: [], names, ())
    snapshot = taken(tmp_path, executable, *values)
    assert [snapshot.input(name) for name in names[:-1]] == values[:-1]
    assert type(snapshot.input("bool")) is bool
    with pytest.raises(UsageError, match=r"'generator' is not in the snapshot[\s\S]*a Generator"):
        snapshot.input("generator")
    with pytest.raises(UsageError, match=r"has no graph\n.*does not know"):
        _ = snapshot.graph


def test_weights_are_written_once_and_again_when_they_change(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, {"w": "parameter"}, x=X, w=W)
    w = W.clone()
    with glass.snapshots.take(tmp_path) as snapshots:
        executable.run([X, w])
        executable.run([X, w])
        w.add_(1)
        executable.run([X, w])
        # Planted: a change that torch does not count.
        w.data.mul_(2)
        executable.run([X, w])
    files = [path / "weights-0.safetensors" for path in snapshots.written]
    inodes = [file.stat().st_ino for file in files]
    assert inodes[0] == inodes[1] and len(set(inodes)) == 3
    found = [glass.snapshots.Snapshot.open(path).input("w") for path in snapshots.written]
    for value, expected in zip(found, (W, W, W + 1, (W + 1) * 2), strict=True):
        assert torch.equal(value, expected)
    graphs = {(path / "graph.pt2").stat().st_ino for path in snapshots.written}
    assert len(graphs) == 1


def test_two_executables_of_one_graph_keep_their_own_lines(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executables = [make_executable(scale, x=X, w=W) for _ in range(2)]
    for index, executable in enumerate(executables):
        graph = executable.captured()
        assert graph is not None
        for node in graph.nodes:
            node.meta["nn_module_stack"] = {"0": (f"layers.{index}", "Layer")}
    with glass.snapshots.take(tmp_path) as snapshots:
        for executable in executables:
            executable.run([X, W])
    found = [glass.snapshots.Snapshot.open(path) for path in snapshots.written]
    assert found[0].graph_hash == found[1].graph_hash
    for index, snapshot in enumerate(found):
        node = snapshot.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
        assert list(node.meta["nn_module_stack"].values()) == [(f"layers.{index}", "Layer")]


def test_snapshots_that_others_deleted_are_written_again(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, {"w": "parameter"}, x=X, w=W)
    with glass.snapshots.take(tmp_path, contents="inputs outputs") as snapshots:
        executable.run([X, W])
        shutil.rmtree(snapshots.written[0])
        executable.run([X, W])
    assert_replays(glass.snapshots.Snapshot.open(snapshots.written[1]))


def test_tied_weights_are_written_once(tmp_path: Path, make_executable: MakeExecutable) -> None:
    big = torch.randn(1000)
    executable = make_executable(lambda a, b: (a + b,), {"a": "parameter", "b": "parameter"}, a=big, b=big)
    snapshot = taken(tmp_path, executable, big, big)
    assert 4000 <= (snapshot.path / "weights-0.safetensors").stat().st_size < 5000
    assert_replays(snapshot)


def test_an_existing_snapshot_is_never_replaced(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, x=X, w=W)
    first = taken(tmp_path, executable, X, W)
    executable.executions.clear()  # as another process with the same names would count
    second = taken(tmp_path, executable, X + 1, W)
    assert second.path.name == f"{first.path.name}-2"
    assert torch.equal(glass.snapshots.Snapshot.open(first.path).input("x"), X)
    assert torch.equal(second.input("x"), X + 1)


def test_a_snapshot_is_there_before_the_run_that_may_kill_the_process(
    tmp_path: Path, make_executable: MakeExecutable
) -> None:
    seen: list[glass.snapshots.Snapshot] = []

    def look(arguments: list[Any]) -> list[Any]:
        seen.extend(glass.snapshots.Snapshot.open(path) for path in tmp_path.iterdir())
        return [X, X]

    snapshot = taken(tmp_path, make_executable(scale, function=look, x=X, w=W), X, W)
    assert [torch.equal(found.input("x"), X) for found in seen] == [True]
    assert seen[0].outputs is None and snapshot.outputs is not None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(3.0).reshape(3, 1).expand(3, 5),
        torch.arange(8).to(torch.complex128).reshape(2, 4).conj(),
        torch.tensor(3, dtype=torch.uint8),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
)
def test_tensors_come_back_with_their_strides(tmp_path: Path, tensor: torch.Tensor) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": tensor, "é/..": tensor})
    file = TensorFile(tmp_path / "x.safetensors")
    dtype = str(tensor.dtype).removeprefix("torch.")
    for key in ("a", "é/.."):
        value = restored(file.read(key), dtype, tensor.shape, tensor.stride())
        assert value.dtype == tensor.dtype and value.shape == tensor.shape
        assert tensor.numel() == 0 or value.stride() == tensor.stride()
        assert value.resolve_conj().contiguous().view(torch.uint8).tolist() == (
            tensor.resolve_conj().contiguous().view(torch.uint8).tolist()
        )


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    stride=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_strides_give_the_same_values(shape: list[int], stride: list[int]) -> None:
    tensor = torch.randn(500).as_strided(shape, stride[: len(shape)])
    for _ in range(2):
        copy = copied(tensor, tensor.shape, tensor.stride())
        assert torch.equal(copy, tensor)
        tensor = copy


def test_a_packed_snapshot_is_one_file_with_everything(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(scale, {"w": "parameter"}, x=X, w=W)
    snapshot = taken(tmp_path / "dump", executable, X, W)
    packed = snapshot.pack(tmp_path / "sent.safetensors")
    shutil.rmtree(tmp_path / "dump")
    found = glass.snapshots.Snapshot.open(packed)
    assert_replays(found)
    assert found.to_dict() == snapshot.to_dict()
    assert torch.equal(load_file(packed)["weights-0.safetensors/w"], W)
    with pytest.raises(UsageError, match="--overwrite"):
        found.pack(packed)
    again = found.pack(tmp_path / "again.safetensors")
    assert again.read_bytes() == packed.read_bytes()


def test_redaction_leaves_no_value(tmp_path: Path, make_executable: MakeExecutable) -> None:
    secret = torch.tensor([[1234.5678, 2.0, 3.0], [4.0, float("nan"), 6.0]])
    snapshot = taken(tmp_path, make_executable(scale, x=X, w=W), secret, W, redact=True)
    assert sorted(item.name for item in snapshot.path.iterdir()) == ["graph.pt2", "meta.json"]
    assert all(secret[0, :1].numpy().tobytes() not in item.read_bytes() for item in snapshot.path.iterdir())
    x = snapshot.inputs[0]
    assert (x.describe(), x.statistics and x.statistics["num_nan"], len(x.sha256 or "")) == ("float32[2,3]", 1, 64)
    text = (snapshot.path / "meta.json").read_text()
    assert "command_line" not in text and "host" not in text and "variables" not in text
    assert all("stack_trace" not in node.meta for node in snapshot.graph.graph.nodes)
    with pytest.raises(UsageError, match="redacted"):
        snapshot.input("x")
    assert snapshot.pack(tmp_path / "x.safetensors").is_file()


def test_redaction_of_what_went_wrong_keeps_code_and_texts_back(
    tmp_path: Path, make_executable: MakeExecutable
) -> None:
    def fail(arguments: list[Any]) -> Any:
        raise ValueError("the secret is 1234.5678")

    executable = make_executable(lambda x: (torch.log(x),), x=X)
    with (
        glass.snapshots.take(tmp_path / "nan", on="nonfinite", redact=True) as snapshots,
        pytest.raises(glass.snapshots.NonFiniteError),
    ):
        executable.run([-X])
    origin = glass.snapshots.Snapshot.open(snapshots.written[0]).origin
    assert origin is not None and (origin.op, origin.source) == ("aten.log.default", None)
    executable.function = fail
    with glass.snapshots.take(tmp_path / "error", on="error", redact=True) as snapshots, pytest.raises(ValueError):
        executable.run([X])
    assert glass.snapshots.Snapshot.open(snapshots.written[0]).meta["error"] == "ValueError"
    plain = Executable("plain", lambda arguments: [], ("size", "rate", "text"), ())
    snapshot = taken(tmp_path / "plain", plain, 7, 1234.5678, "secret", redact=True)
    assert snapshot.input("size") == 7
    for path in (snapshot.path, snapshots.written[0]):
        assert b"1234.5" not in (path / "meta.json").read_bytes()  # a checksum may hold 1234
        assert b"secret" not in (path / "meta.json").read_bytes()


def test_a_graph_that_cannot_be_read_costs_the_graph_alone(tmp_path: Path) -> None:
    def missing() -> Any:
        raise UsageError("the checkpoint is gone")

    executable = Executable("engine", lambda inputs: {"y": inputs["x"]}, graph=missing)
    with glass.snapshots.take(tmp_path, on=("every", "nonfinite")) as snapshots:
        executable.run({"x": X})
        with pytest.raises(glass.snapshots.NonFiniteError, match="cannot be run node by node"):
            executable.run({"x": X / 0})
    snapshot = glass.snapshots.Snapshot.open(snapshots.written[0])
    assert torch.equal(snapshot.input("x"), X)
    with pytest.raises(UsageError, match="the checkpoint is gone"):
        _ = snapshot.graph


def test_a_graph_that_torch_cannot_write_costs_the_graph_alone(
    tmp_path: Path, make_executable: MakeExecutable, caplog: pytest.LogCaptureFixture
) -> None:
    executable = make_executable(scale, x=X, w=W)
    graph = executable.captured()
    assert graph is not None
    graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0].target = torch.mul  # planted
    with glass.snapshots.take(tmp_path) as snapshots:
        executable.run([X, W])
        executable.run([X, W])
    assert caplog.text.count("snapshots of tiny/main hold no graph: torch cannot write it") == 1
    snapshot = glass.snapshots.Snapshot.open(snapshots.written[1])
    assert torch.equal(snapshot.input("x"), X)
    with pytest.raises(UsageError, match="torch cannot write it"):
        _ = snapshot.graph


@pytest.fixture
def planted(tmp_path: Path, make_executable: MakeExecutable) -> glass.snapshots.Snapshot:
    return taken(tmp_path, make_executable(scale, {"w": "parameter"}, x=X, w=W), X, W)


def edit(snapshot: glass.snapshots.Snapshot, change: Callable[[dict[str, Any]], Any]) -> None:
    path = snapshot.path / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta) if meta.get("schema_version") == 99 else sealed(meta))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(schema_version=99), "newer version"),
        (lambda meta: meta.pop("inputs"), "inputs"),
        (lambda meta: meta["inputs"][0].update(file="../secret.safetensors"), "values in"),
        (lambda meta: meta["inputs"][0].update(file="/etc/passwd"), "values in"),
        (lambda meta: meta["inputs"][0].update(shape=[-1, "x"]), "shape"),
        (lambda meta: meta.update(inputs=7), "array"),
        (lambda meta: meta.update(origin={"op": 1}), "origin"),
    ],
)
def test_planted_damage_of_the_description_is_found(
    planted: glass.snapshots.Snapshot, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit(planted, change)
    with pytest.raises(CorruptError, match=message):
        glass.snapshots.Snapshot.open(planted.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]"])
def test_a_description_that_is_none_is_refused(planted: glass.snapshots.Snapshot, content: bytes) -> None:
    (planted.path / "meta.json").write_bytes(content)
    with pytest.raises(CorruptError, match="the description of the snapshot"):
        glass.snapshots.Snapshot.open(planted.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta["inputs"][0].update(stride=[0, 1]),
        lambda meta: meta["inputs"].reverse(),
        lambda meta: meta["inputs"][0].update(requires_grad=True),
        lambda meta: meta["rng"]["cpu"].update(key="x"),
        lambda meta: meta.update(graph_crc32=None),
        lambda meta: meta.pop("checksum"),
    ],
)
def test_s13_whatever_is_changed_in_the_description_is_found(
    planted: glass.snapshots.Snapshot, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    path = planted.path / "meta.json"
    before = path.read_text()
    meta = json.loads(before)
    change(meta)
    path.write_text(json.dumps(meta))
    with pytest.raises(CorruptError, match="not what was written"):
        glass.snapshots.Snapshot.open(planted.path)
    # The counterpart: another layout of the same document is the same description, also packed.
    path.write_text(json.dumps(json.loads(before), indent=7))
    packed = glass.snapshots.Snapshot.open(planted.path).pack(tmp_path / "packed.safetensors")
    assert torch.equal(glass.snapshots.Snapshot.open(packed).input("x"), X)


def test_snapshots_of_the_first_version_are_read(planted: glass.snapshots.Snapshot) -> None:
    path = planted.path / "meta.json"
    meta = json.loads(path.read_text())
    del meta["checksum"]
    path.write_text(json.dumps({**meta, "schema_version": 1, "unknown": {"to": "us"}}))
    assert torch.equal(glass.snapshots.Snapshot.open(planted.path).input("x"), X)


def test_a_changed_byte_is_found(planted: glass.snapshots.Snapshot) -> None:
    path = planted.path / "inputs.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = glass.snapshots.Snapshot.open(planted.path)
    with pytest.raises(CorruptError, match=r"bytes of 'x' are not what was written"):
        found.arguments()


def test_another_shape_than_the_file_has_is_found(planted: glass.snapshots.Snapshot) -> None:
    edit(planted, lambda meta: meta["inputs"][0].update(shape=[3, 2], stride=[2, 1]))
    with pytest.raises(CorruptError, match=r"not what meta.json says"):
        glass.snapshots.Snapshot.open(planted.path).input("x")


def test_a_strides_bomb_takes_no_memory(planted: glass.snapshots.Snapshot) -> None:
    edit(planted, lambda meta: meta["inputs"][0].update(stride=[1 << 50, 1]))
    assert torch.equal(glass.snapshots.Snapshot.open(planted.path).input("x"), X)


@pytest.mark.parametrize("name", ["inputs.safetensors", "graph.pt2"])
def test_truncated_missing_and_linked_files_are_refused(
    planted: glass.snapshots.Snapshot, tmp_path: Path, name: str
) -> None:
    path = planted.path / name

    def read() -> None:
        found = glass.snapshots.Snapshot.open(planted.path)
        assert found.graph is not None
        found.arguments()

    read()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError):
        read()
    path.unlink()
    with pytest.raises(CorruptError):
        read()
    (tmp_path / "elsewhere").write_bytes(content)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match="link"):
        read()


def test_a_graph_of_something_else_is_refused(
    planted: glass.snapshots.Snapshot, tmp_path: Path, make_executable: MakeExecutable
) -> None:
    other = taken(tmp_path / "other", make_executable(lambda x: (x + 1,), x=X), X)
    shutil.copyfile(other.path / "graph.pt2", planted.path / "graph.pt2")
    with pytest.raises(CorruptError, match="the bytes of the graph are not what was written"):
        _ = glass.snapshots.Snapshot.open(planted.path).graph


def test_reading_runs_no_code(planted: glass.snapshots.Snapshot, tmp_path: Path) -> None:
    # Planted: torch's own reader would unpickle what this archive calls example inputs.
    import io
    import pickle
    import zipfile

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    with zipfile.ZipFile(planted.path / "graph.pt2") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    examples = next(name for name in files if name.endswith("sample_inputs/model.pt"))
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer, pickle_module=pickle)
    files[examples] = buffer.getvalue()
    with zipfile.ZipFile(planted.path / "graph.pt2", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(CorruptError):
        _ = glass.snapshots.Snapshot.open(planted.path).graph
    assert not (tmp_path / "exploded").exists()


def test_other_files_are_refused_with_a_hint(planted: glass.snapshots.Snapshot, tmp_path: Path) -> None:
    assert glass.snapshots.Snapshot.open(tmp_path).path == planted.path  # the only one there: F24
    shutil.copytree(planted.path, tmp_path / "a-copy")
    with pytest.raises(UsageError, match=rf"one of its 2 snapshots, such as .*{planted.path.name}"):
        glass.snapshots.Snapshot.open(tmp_path)
    with pytest.raises(UsageError, match="not a snapshot"):
        glass.snapshots.Snapshot.open(tmp_path / "nothing")
    with pytest.raises(CorruptError, match="not a packed snapshot"):
        glass.snapshots.Snapshot.open(planted.path / "inputs.safetensors")
    with pytest.raises(UsageError, match="no snapshots"):
        glass.snapshots.list(planted.path)


def test_a_directory_is_listed_with_what_is_damaged_or_unfinished(
    planted: glass.snapshots.Snapshot, tmp_path: Path
) -> None:
    shutil.copytree(planted.path, tmp_path / "copy")
    (tmp_path / "copy" / "meta.json").write_text("{")
    (tmp_path / ".x.1-2.partial").mkdir()
    (tmp_path / "unrelated").mkdir()
    listed = {item.directory: (item.reason, item.contents) for item in glass.snapshots.list(tmp_path)}
    assert listed == {
        planted.path.name: ("every", ("graph", "inputs", "outputs")),
        "copy": ("damaged", ()),
        ".x.1-2.partial": ("unfinished", ()),
    }


def test_f24_inputs_that_a_graph_was_specialized_for(tmp_path: Path) -> None:
    class Switched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

        def forward(
            self, x: torch.Tensor, use_cache: bool = True, scale: float = 2.0, mode: str = "a", mask: Any = None
        ) -> torch.Tensor:
            result: torch.Tensor = x if use_cache else self.fc(x) * scale
            return result

    given = {"use_cache": False, "scale": 3.0, "mode": "b"}
    x = torch.ones(1, 2)
    engine = glass.build(Switched(), tmp_path / "e", backend="eager", inputs={"x": x, **given, "mask": None})
    with glass.snapshots.take(tmp_path / "s") as taking:
        engine(x=x, **given)
    (written,) = taking.written
    assert [entry.name for entry in glass.snapshots.Snapshot.open(written).inputs] == ["fc.weight", "fc.bias", "x"]
    assert glass.replay(tmp_path / "s").ok
