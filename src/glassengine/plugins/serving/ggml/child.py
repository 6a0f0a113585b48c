"""Runs llama.cpp in a process of its own and makes a recording of what it wrote: a crash there is an error here."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from glassengine import starting
from glassengine.errors import BackendError, CorruptError, UsageError
from glassengine.plugins.serving.alignment import recorded
from glassengine.plugins.serving.ggml.file import GgufFile
from glassengine.reading.documents import Size
from glassengine.reading.files import open_regular, shown
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import ServingRun

_MODULE = "glassengine.plugins.serving.ggml.capture"
_PATIENCE = 3600
_MOST_BYTES = 16 << 30
_MOST_LINES = 4_000_000
_TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class _Node(msgspec.Struct):
    """A line of `nodes.jsonl`, or its last one."""

    step: Size = 0
    name: str = ""
    op: str = ""
    type: str = ""
    sizes: list[Size] = []
    params: list[int] = []
    sources: list[Size] = []
    computed: bool = False
    number: Size = 0
    place: tuple[Size, Size] | None = None
    answer: dict[str, Any] | None = None


def find_library(given: str | Path | None) -> Path:
    """Return the shared library of llama.cpp: the one that is given, or that of an installed package.

    Raises:
        UsageError: There is none.
    """
    if given is not None:
        if not Path(given).is_file():
            raise UsageError("no such library", got=str(given), expected="libllama.so of a build of llama.cpp")
        return Path(given).resolve()
    for package, pattern in (("xllamacpp", "*.so"), ("llama_cpp", "lib/libllama.*"), ("xllamacpp", "*.dylib")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found = sorted(Path(folder).glob(pattern))
            if found:
                return found[0].resolve()
    raise UsageError(
        "no library of llama.cpp is installed",
        expected="xllamacpp, llama-cpp-python, or your own build",
        hint="pip install 'glassengine[gguf]', or: --library build/bin/libllama.so",
    )


def run_llama(file: GgufFile, library: Path, run: ServingRun, path: Path, threads: int) -> dict[str, Any]:
    """Run llama.cpp on a file and write a recording of every node; return what is known of it.

    Raises:
        BackendError: llama.cpp failed or crashed.
    """
    with tempfile.TemporaryDirectory(prefix="glassengine-ggml-") as folder:
        request = {
            "library": str(library),
            "file": str(file.path.resolve()),
            "folder": folder,
            "prompt": [int(token) for token in run.prompt],
            "following": None if run.following is None else [int(token) for token in run.following],
            "steps": run.steps,
            "deployed": run.as_deployed,
            "threads": threads,
            "encodes": file.encodes,
            "most_bytes": _MOST_BYTES,
        }
        _start(request, Path(folder), file)
        return _write(Path(folder), path, run, file)


def _start(request: Mapping[str, Any], folder: Path, file: GgufFile) -> None:
    # Its working directory is empty: libraries look for others there.
    inside = folder / "empty"
    inside.mkdir()
    try:
        done = starting.run(
            starting.python(_MODULE),
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_PATIENCE,
            cwd=inside,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError("llama.cpp did not end", got=f"{shown(file.path)}: {_PATIENCE} s") from error
    if done.returncode == 0:
        return
    raise failure(file.path, done.returncode, done.stderr)


def failure(path: Path, status: int, stderr: bytes) -> BackendError:
    """Return the error of a child process that ended with a status, and what it wrote."""
    said = stderr[-4000:].decode("utf-8", "replace").strip().splitlines()
    last = shown(said[-1]) if said else ""
    if status < 0:
        got = f"{shown(path)}: {signal.Signals(-status).name}{f' after: {last}' if last else ''}"
        return BackendError("llama.cpp crashed", got=got, hint="try another build: --library libllama.so")
    return BackendError("llama.cpp failed", got=f"{shown(path)}: {last}")


def _lines(folder: Path) -> Iterator[_Node]:
    decoder = msgspec.json.Decoder(_Node)
    with open_regular(folder / "nodes.jsonl", inside=folder) as file:
        for number, line in enumerate(file):
            if number > _MOST_LINES:
                raise CorruptError("llama.cpp's graph is too large", got=f"more than {_MOST_LINES:,} nodes")
            yield decoder.decode(line)


def _write(folder: Path, path: Path, run: ServingRun, file: GgufFile) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for line in _lines(folder):
        answer = line.answer or answer
    following = list(run.following or ())[: run.steps]
    tokens = [*run.prompt, *following, *answer["made"][len(following) : run.steps]]
    settings = {name: value for name, value in file.settings.items() if isinstance(value, (int, float))}
    more = {"rope_type": answer["rope_type"], "vocab_size": answer["vocabulary"], "settings": settings}
    metadata = recorded("ggml", f"gguf:{file.path.absolute()}", run, file.architecture, **more)
    graph: dict[str, dict[str, Any]] = {}
    steps: dict[int, dict[int, str]] = {}
    counts: Counter[tuple[int, str]] = Counter()
    with (
        open_regular(folder / "values.bin", inside=folder) as values,
        RecordingWriter(path, metadata=metadata) as writer,
    ):
        writer.metadata["graph"] = graph
        step = -1
        for line in _lines(folder):
            if line.answer is not None:
                continue
            if line.step != step:
                if step >= 0:
                    writer.commit(step, token_ids=[_given(run, tokens, step)])
                step = line.step
                writer.write(".:in.input_ids", step, torch.tensor([_given(run, tokens, step)]))
            names = steps.setdefault(step, {})
            sources = [names.get(source, "") for source in line.sources]
            site = _site(line, sources, file, counts)
            names[line.number] = site
            if step == 0:
                graph[site] = {
                    "type": line.type,
                    "sources": sources,
                    "params": line.params if any(line.params) else [],
                }
            if line.place is not None:
                values.seek(line.place[0])
                data = bytearray(values.read(line.place[1]))
                tensor = torch.frombuffer(data, dtype=_TORCH[line.type]) if data else torch.empty(0)
                writer.write(site, step, tensor.reshape(line.sizes[::-1]))
        writer.commit(step, token_ids=[_given(run, tokens, step)])
    return {**metadata, "graph": graph, "made": answer["made"]}


def _given(run: ServingRun, tokens: list[int], step: int) -> list[int]:
    """Return the tokens that a step was given."""
    return list(run.prompt) if step == 0 else [tokens[len(run.prompt) + step - 1]]


_UNNAMED = re.compile(r"node_\d+")


def _site(line: _Node, sources: list[str], file: GgufFile, counts: Counter[tuple[int, str]]) -> str:
    """Return the name of a node in the recording: `Qcur-0/rope.0`, `cache_k_l0.view/set_rows.0`, `blk.0.attn_q.weight`.

    llama.cpp's names are not unique: an op and its place among those of one name and op make them so. A node that it
    only numbers is called by the weight that it reads.
    """
    name = line.name.replace(" (", ".").replace(")", "").strip(".") or "node"
    if _UNNAMED.fullmatch(name):
        name = next((source for source in sources if source in file.tensors), name)
    path = name if line.op == "NONE" else f"{name}/{line.op.lower()}"
    number = counts[line.step, path]
    counts[line.step, path] += 1
    return path if line.op == "NONE" and not number else f"{path}.{number}"
