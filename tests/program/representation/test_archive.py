"""A stored program is read without running code, whatever has been put into it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.errors import CorruptError
from glassengine.program.export.export import export_module
from glassengine.program.representation import archive
from glassengine.program.representation.stored import load_graph, load_program, save_program


class Runs:
    """Unpickling it writes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _write, (str(self.marker), "ran")


def _write(path: str, text: str) -> int:
    return Path(path).write_text(text)


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.scale).view(-1)[: x.shape[0] * 2]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save_program(export_module(Sized(), [{"x": torch.ones(batch, 4)} for batch in (2, 3)]), tmp_path)
    return tmp_path


def rewrite(directory: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change one entry of the archive, or add it."""
    path = directory / "program.pt2"
    with zipfile.ZipFile(path) as old:
        entries = {info.filename: old.read(info) for info in old.infolist()}
    top = next(iter(entries)).split("/")[0]
    entries[f"{top}/{name}"] = change(entries.get(f"{top}/{name}", b""))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for entry, content in entries.items():
            new.writestr(entry, content)


def in_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        data = json.loads(content)
        change(data)
        return json.dumps(data).encode()

    return changed


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(({"x": Runs(marker)},), buffer)
    return buffer.getvalue()


def weights_as_pickle(data: Any) -> None:
    data["config"]["fc.weight"]["use_pickle"] = True


def constant_as_object(data: Any) -> None:
    data["config"]["scale"]["path_name"] = "custom_obj_0"


def operator_by_name(data: Any) -> None:
    data["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.system"


def size_as_code(data: Any) -> None:
    text = json.dumps(data)
    first = json.loads(text[text.index('"expr_str": ') + 12 :].partition(', "hint')[0].partition("}")[0])
    changed = json.loads(text.replace(json.dumps(first), json.dumps("exec(chr(112))")))
    data.clear()
    data.update(changed)


def renamed(data: Any) -> None:
    """An input that nothing uses: its name stands in the signature of a function alone."""
    text = json.dumps(data).replace('"name": "x"', '"name": "x=exec(chr(112))"')
    data.update(json.loads(text))


def guards(data: Any) -> None:
    data["guards_code"] = ["__import__('os').getpid() > 0"]


def test_an_archive_is_read_as_written(stored: Path) -> None:
    assert load_graph(stored).graph is not None
    rewrite(stored, "archive_format", lambda content: content)  # the helper changes nothing by itself
    assert load_graph(stored).graph is not None


CONFIG = "data/{0}/model_{0}_config.json"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (CONFIG.format("weights"), in_json(weights_as_pickle), r"a pickle for 'fc.weight'"),
        (CONFIG.format("constants"), in_json(constant_as_object), r"a pickle for 'scale'"),
        ("models/model.json", in_json(operator_by_name), r"an operator 'torch.os.system'"),
        ("models/model.json", in_json(size_as_code), r"a size 'exec\(chr\(112\)\)'"),
        ("models/model.json", in_json(renamed), r"a value called 'x=exec\(chr\(112\)\)'"),
        ("models/model.json", in_json(guards), r"guards, which are code"),
        ("data/constants/opaque_obj_0", lambda content: b"x", r"an entry 'data/constants/opaque_obj_0'"),
        ("data/weights/model.pt", lambda content: b"x", r"an entry 'data/weights/model.pt'"),
        ("../../elsewhere", lambda content: b"x", r"an entry"),
    ],
)
def test_more_than_a_graph_is_refused(
    stored: Path, name: str, change: Callable[[bytes], bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(stored, name, change)
    monkeypatch.setattr(torch.export, "load", lambda path: pytest.fail("torch has seen it"))
    with pytest.raises(CorruptError, match=rf"program.pt2 is not a stored program\n.*{message}"):
        load_program(stored, {})


def test_entries_of_one_name_are_refused(stored: Path) -> None:
    """Which of the two is read depends on the reader."""
    path = stored / "program.pt2"
    with zipfile.ZipFile(path) as archive:
        top = archive.namelist()[0].split("/")[0]
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{top}/models/model.json", "{}")
    with pytest.raises(CorruptError, match=r"two entries 'models/model.json'"):
        load_graph(stored)


def test_torch_reads_the_bytes_that_were_checked(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may be another one by then, or another to another zip reader: torch never gets the path."""
    real = torch.export.load

    def load(file: Any) -> Any:
        (stored / "program.pt2").unlink()
        return real(file)

    monkeypatch.setattr(torch.export, "load", load)
    assert load_graph(stored).graph is not None


def test_example_inputs_are_not_unpickled(stored: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    rewrite(stored, "data/sample_inputs/model.pt", lambda content: pickled(marker))
    with pytest.raises(CorruptError, match="would run code"):
        load_graph(stored)
    assert not marker.exists()


def test_s4_a_compressed_description_is_not_unpacked(stored: Path) -> None:
    path = stored / "program.pt2"
    with zipfile.ZipFile(path) as old:
        entries = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, content in entries.items():
            new.writestr(entry, content)
    with pytest.raises(CorruptError, match="compressed entries"):
        load_graph(stored)


def test_a_large_archive_is_not_unpacked(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(CorruptError, match=r"more than 1,000 bytes"):
        load_graph(stored)


@pytest.mark.parametrize(
    "text",
    [
        "Mul(Integer(64), Symbol('s58', positive=True, integer=True))",
        "Max(1, s0 - 5)",
        "FloorDiv(s0*u3 + 1, 2)",
        "2*s77",
        "FloatTrueDiv(Float('1.0', precision=53), IntTrueDiv(Symbol('s77', integer=True), Float('2.5e-3')))",
    ],
)
def test_sizes_are_expressions(text: str) -> None:
    assert archive.is_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "exec(chr(112))",
        "Float('1.0; exec(chr(112))', precision=53)",
        "s0.func",
        "Symbol('x').__class__",
        "Symbol('s0') if s0 else 1",
        "open('/etc/passwd')",
        "[s0 for s0 in s0]",
        "(lambda: 1)()",
    ],
)
def test_code_is_no_expression(text: str) -> None:
    assert not archive.is_expression(text)


def test_the_reason_of_torch_is_told_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), path)
    with zipfile.ZipFile(path) as stored:
        members = {item.filename: stored.read(item) for item in stored.infolist()}
    assert archive.load_archive(archive.inert_archive(path, has_weights=True)).graph is not None
    with zipfile.ZipFile(path, "w") as stored:
        for name, content in members.items():
            stored.writestr(name, b"x" if name.endswith(".data/version") else content)
    with pytest.raises(RuntimeError, match="parse the version"):
        archive.load_archive(archive.inert_archive(path, has_weights=True))
    assert "Traceback" not in caplog.text + capfd.readouterr().err
