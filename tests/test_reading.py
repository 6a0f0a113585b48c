"""One way to read: every call that opens or parses a file outside of `reading/` is listed here, with its reason."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import glassengine

SOURCE = Path(glassengine.__file__).parent

PARSERS = {"json.load", "json.loads", "torch.load", "np.load", "numpy.load", "onnx.load", "pickle.load", "pickle.loads"}
PARSERS |= {"safe_open", "load_file", "os.open", "gzip.open", "tarfile.open", "zipfile.ZipFile", "io.open"}
PARSERS |= {"np.fromfile", "np.memmap", "np.genfromtxt", "yaml.load", "yaml.safe_load", "tomllib.load", "Image.open"}
METHODS = {"read_text", "read_bytes", "ParseFromString"}
"""Called on paths, and on messages of protobuf."""

ROOM = "reading/"
TEMPLATES = (
    "diagnose/reproduction/template.py",
    "program/representation/python_source.py",
)
"""What users get is to run without this package: their own files, by the libraries they have."""

REASONS: dict[str, dict[str, str]] = {
    "backends/calibration.py": {"json.loads": "the table that ships", "read_text": "the table that ships"},
    "backends/inductor/backend.py": {"zipfile.ZipFile": "on a file that the room opened"},
    "backends/onnx/network.py": {
        "onnx.load": "what ONNX Runtime wrote a moment ago, into a directory of ours",
        "ParseFromString": "bytes that the room read; protobuf bounds depth by itself",
    },
    "capture/triggers.py": {"os.open": "to write"},
    "cli/errors.py": {"os.open": "/dev/null"},
    "workers/pipe.py": {"pickle.load": "what our own parent process sent, or our own child answered"},
    "diagnose/invariance/alone.py": {"torch.load": "what our own process wrote, with weights_only"},
    "diagnose/ladder/judging.py": {"pickle.loads": "what our own parent process sent, or our own child answered"},
    "diagnose/reproduction/bisect_compiler.py": {"json.loads": "what our own child process printed"},
    "diagnose/paired_run.py": {"json.loads": "what our own child process sent"},
    "diagnose/paired_side.py": {"json.loads": "what our own parent process asked"},
    "diagnose/script_floor.py": {"json.loads": "what our own parent process asked"},
    "diagnose/snapshot_trial.py": {"json.load": "what our own parent process sent"},
    "prompt/tokens.py": {"json.loads": "the table that ships", "read_text": "the table that ships"},
    "prompt/templates.py": {"json.loads": "the table that ships", "read_text": "the table that ships"},
    "schemas/__init__.py": {"json.loads": "the schemas that ship", "read_text": "the schemas that ship"},
    "engine/run/forward.py": {"Image.open": "on a file that the room opened"},
    "engine/run/load.py": {
        "json.loads": "what a process of ours sent by a pair of sockets: bounded; paths in it may be no text"
    },
    "engine/tokenizing.py": {"os.open": "/dev/null"},
    "environment.py": {"read_text": "/proc/cpuinfo and /proc/meminfo of the kernel"},
    "executable/profiling.py": {
        "gzip.open": "to write",
        "json.loads": "what torch's profiler wrote a moment ago, into a directory of ours",
        "read_bytes": "the same",
    },
    "program/representation/archive.py": {
        "zipfile.ZipFile": "on a file that the room opened, and to write",
        "json.loads": "text in a document that the room parsed",
    },
    "program/onnx/file.py": {"ParseFromString": "bytes that the room read; protobuf bounds depth by itself"},
    "plugins/onnx/other_domains.py": {"ParseFromString": "definitions of operators that the package onnx holds"},
    "executable/profile_trace.py": {"json.loads": "what was made in the same line"},
    "executable/snapshot/layout.py": {"json.loads": "what was made a line above"},
    "recording/export.py": {"zipfile.ZipFile": "to write"},
    "recording/formats/json_files.py": {"json.loads": "what the room mapped, bounded in bytes and items"},
    "recording/formats/files.py": {"zipfile.ZipFile": "on a file that the room has looked at"},
    "recording/ring/journal.py": {"os.open": "to write"},
    "recording/layout/records.py": {
        "json.loads": "frames of an index, a million a second: bounded, each field checked"
    },
    "recording/ring/file.py": {"os.open": "to make a ring", "read_bytes": "/proc of the kernel"},
    "recording/formats/folders.py": {"json.loads": "text in a header that the room read, bounded"},
    "report/exported.py": {"ParseFromString": "bytes that the room read; protobuf bounds depth by itself"},
    "report/page/data.py": {
        "json.loads": "what was written a moment ago, into a directory of ours",
        "read_text": "the same",
    },
    "report/page/write.py": {"read_text": "style and scripts that ship"},
    "plugins/serving/another_python.py": {
        "json.loads": "what our own child process wrote",
        "read_text": "the same",
        "torch.load": "the same, weights only",
    },
    "plugins/serving/inside/glassengine_recorder.py": {
        "json.load": "what our own parent process sent",
        "torch.load": "the same, weights only: in an interpreter without this package",
    },
    "plugins/serving/inside/glassengine_executorch.py": {
        "json.load": "what our own parent process sent",
        "read_bytes": "in an interpreter without this package: a model that its runtime is given",
    },
    "plugins/serving/ggml/capture.py": {"json.load": "what our own parent process sent"},
    "plugins/serving/ggml/prompt.py": {"json.loads": "what a server in this process answered"},
    "plugins/serving/ggml/backend.py": {"json.loads": "what our own child process answered"},
    "plugins/serving/ggml/steps.py": {"json.loads": "what our own parent process sent"},
    "plugins/serving/ggml/write.py": {"json.loads": "what the library tokenizers made in the same line"},
    "plugins/serving/interpreter.py": {"json.loads": "what our own child process answered"},
    "cli/skill.py": {"read_text": "a file of this package"},
    "plugins/serving/vllm/inside/glassengine_vllm_run.py": {"json.load": "what our own parent process sent"},
    "writing.py": {"os.open": "directories, to lock them and to write them out"},
}
"""File -> call -> why it is not one of the room's."""


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every call that opens or parses something for reading."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in PARSERS or name.split(".")[-1] in ("safe_open", "load_file"):
            yield node.lineno, name
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "open"
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.lineno, node.func.attr
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "open" and reads(node):
            yield node.lineno, ".open"


def reads(call: ast.Call) -> bool:
    """Whether a method `open` is given the mode of a file that is read, or encoding and no mode."""
    mode = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "mode"), None)
    if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
        return not set(mode.value) & set("wxa")
    return mode is None and (not call.args and (not call.keywords or call.keywords[0].arg == "encoding"))


@functools.cache
def outside() -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(ROOM) or name in TEMPLATES:
            continue
        for line, call in called(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, {}).setdefault(call, []).append(line)
    return found


def test_s4_s6_s7_s11_nothing_is_opened_or_parsed_outside_of_the_room() -> None:
    unexpected = {
        f"{name}:{lines}": call
        for name, calls in outside().items()
        for call, lines in calls.items()
        if call not in REASONS.get(name, {})
    }
    assert unexpected == {}, "open it by reading.files, parse it by reading.documents, or say here why not"


def test_no_reason_outlives_its_call() -> None:
    found = outside()
    told = {(name, call) for name, calls in REASONS.items() for call in calls}
    assert {(name, call) for name, call in told if call not in found.get(name, {})} == set()


@pytest.mark.parametrize(
    "line",
    [
        "json.loads(x)", "open(p)", "Path(p).open()", "p.open('rb')", "p.open(encoding='utf-8')", "p.read_text()",
        "torch.load(p)", "safetensors.safe_open(p)", "model.ParseFromString(b)", "os.open(p, 0)", "zipfile.ZipFile(p)",
    ],
)  # fmt: skip
def test_a_planted_call_is_found(line: str) -> None:
    assert list(called(ast.parse(line)))


@pytest.mark.parametrize("line", ["Recording.open(p)", "p.open('wb')", "p.open(mode='x')", "read_text(p, most=5)"])
def test_what_reads_nothing_or_through_the_room_is_let_through(line: str) -> None:
    assert not list(called(ast.parse(line)))
