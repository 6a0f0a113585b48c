"""What reads a folder without a command line of its own: each takes the folder and the shared one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.executable.profile_server import KEY_FILE
from glassengine.reading.files import user_key

SERVER_SECONDS = 8.0


def load_adapter(here: Path, shared: Path) -> int:
    from glassengine.program.loading.load import load_model

    load_model(str(shared / "model"), adapter=str(here / "it"))
    return 0


def load_model(here: Path, shared: Path) -> int:
    from glassengine.program.loading.load import load_model

    load_model(str(here / "it"))
    return 0


class _Compiler:
    """Keeps a file with a number, and finds it again."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def parts(self) -> Any:
        return {"backend": {"name": "fuzzed"}, "options": {}}

    @contextlib.contextmanager
    def within(self, directory: Path) -> Iterator[Any]:
        from glassengine.executable.cache import CacheWork

        self._directory = directory
        yield (work := CacheWork(reused=(directory / "product").is_file()))
        del work

    def compile(self) -> Any:
        factor = 2.0
        if self._directory is not None:
            path = self._directory / "product"
            if not path.is_file():
                path.write_text("2.0")
            factor = float(path.read_text())
        assert factor == 2.0, "a damaged product was taken"
        return lambda arguments: (arguments[0] * factor,)


@contextlib.contextmanager
def _cache_in(directory: Path) -> Iterator[None]:
    names = ("GLASS_CACHE_DIR", "GLASS_CACHE_MAX_BYTES")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["GLASS_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def _compiled(directory: Path) -> Any:
    with _cache_in(directory):
        return _compiled_there()


def _compiled_there() -> Any:
    from glassengine.executable.cache import compiled
    from glassengine.executable.graph import CapturedGraph, input_spec

    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2.0)),))
    spec = input_spec(torch.ones(2, 3), "x", "input")
    captured = CapturedGraph(torch.fx.GraphModule({}, graph), (spec,), ("mul",), "inference")
    compiler = _Compiler()
    return compiled("g", captured, lambda: compiler.compile(), compiler)


def fill_cache(directory: Path) -> None:
    found = _compiled(directory)
    assert found.outcome == "miss" and found.key, found


def use_cache(here: Path, shared: Path) -> int:
    """The cache costs a compilation at most, and never ends the program: any error is a bug."""
    try:
        found = _compiled(here / "it")
        found.function([torch.ones(2, 3)])
    except glass.GlassError as error:
        raise AssertionError("the cache ended the program") from error
    return 0


def examine_cache(here: Path, shared: Path) -> int:
    with _cache_in(here / "it"):
        report = glass.metrics.cache()
    json.dumps([str(report)], allow_nan=False)
    return 0


def ask_server(here: Path, shared: Path) -> int:
    """Send the bytes, as they are and as a message of one who has the key, and ask as one should: that is answered."""
    server = glass.profiler.start_server(0, directory=here / "profiles")
    send_to(server.port, (here / "request").read_bytes())
    for _ in range(50):  # a profile that was asked for takes a moment to be written
        try:
            answer = glass.profiler.request(f"localhost:{server.port}", steps=1, timeout_s=0.01)
            assert answer["num_steps"] == 0, answer
            return 0
        except UsageError as error:
            if "another profile" not in str(error):
                raise
            time.sleep(0.1)
    return 2


def send_to(port: int, data: bytes) -> None:
    """Send bytes to a profile server: as they are, and as a message of a client that has the key."""
    key = user_key(KEY_FILE)
    assert key is not None
    with socket.create_connection(("127.0.0.1", port), timeout=SERVER_SECONDS) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1 << 16):
            pass
    with contextlib.suppress(OSError, EOFError), Client(("127.0.0.1", port), authkey=key) as connection:
        connection.send_bytes(data)
        if connection.poll(0.2):  # otherwise the program has not ended as many steps yet
            json.loads(connection.recv_bytes())


def command_line(here: Path, shared: Path) -> int:
    """Every file is a command line; what is changed in one is tried, and it is run within the folder."""
    from glassengine.cli.main import main

    os.chdir(here)
    status = 0
    for path in sorted(here.glob("line*.json")):
        if path.stat().st_mtime_ns <= (here / ".made").stat().st_mtime_ns:
            continue
        try:
            words = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        if not isinstance(words, list):
            continue
        line = [str(word).replace("{shared}", str(shared)).replace("\0", "") for word in words]
        if "--" in line or ("record" not in line[:1] and "/dev/zero" in line):
            continue
        status = max(status, main([os.fsdecode(word.encode("utf-8", "surrogatepass")) for word in line]))
    return status
