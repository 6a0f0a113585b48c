"""The persistent cache with a compiler that keeps one file: every fault of the directory is planted."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine import environment
from glassengine.errors import UsageError
from glassengine.executable import cache as cache_module
from glassengine.executable import cache_store
from glassengine.executable.cache import CacheWork, Compiled, compiled, examine_cache
from glassengine.executable.cache_store import SCHEMA_VERSION, Parts
from glassengine.executable.counters import metrics, reset_metrics
from glassengine.executable.graph import CapturedGraph, input_spec
from tests import children

PRODUCT = "product.bin"


def graph_of(value: float = 2.0, rows: int = 2) -> CapturedGraph:
    """Multiply by `value`."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), value)),))
    spec = input_spec(torch.ones(rows, 3), "x", "input")
    return CapturedGraph(torch.fx.GraphModule({}, graph), (spec,), ("mul",), "inference")


class Compiler:
    """Compiles to a function that multiplies by what its file says; finds the file again in its directory.

    Attributes:
        compilations: How often it really compiled.
    """

    def __init__(self, value: float = 2.0, *, options: dict[str, str] | None = None, size: int = 0) -> None:
        self.value = value
        self.options = options or {}
        self.size = size
        self.compilations = 0
        self.keeps = True
        self._directory: Path | None = None

    def parts(self) -> Parts:
        return {"backend": {"name": "fake"}, "options": self.options}

    @contextlib.contextmanager
    def within(self, directory: Path) -> Iterator[CacheWork]:
        self._directory = directory
        work = CacheWork()
        before = self.compilations
        yield work
        work.reused = self.compilations == before
        work.reason = "" if self.keeps else "it is a secret"

    def __call__(self) -> Any:
        path = self._directory / "a" / PRODUCT if self._directory is not None else None
        if path is None or not path.exists():
            self.compilations += 1
        if path is not None and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(f"{self.value}".encode().ljust(self.size))
        factor = float(path.read_bytes()) if path is not None else self.value
        return lambda inputs: [inputs[0] * factor]

    def run(self, value: float | None = None, rows: int = 2) -> Compiled:
        made = compiled("times", graph_of(self.value if value is None else value, rows), self, self)
        assert made.function([1.0]) == [self.value]
        return made


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("GLASS_CACHE_DIR", str(root))
    monkeypatch.delenv("GLASS_CACHE_MAX_BYTES", raising=False)
    monkeypatch.setattr(cache_module, "_said", set())
    reset_metrics()
    return root


def counters() -> dict[str, int]:
    """Return hit, miss, corrupt and evicted."""
    prefix = "PersistentCache"
    found = metrics().counters
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def entry(directory: Path) -> Path:
    (found,) = (path for path in directory.iterdir() if not path.name.startswith("."))
    return found


def product(directory: Path) -> Path:
    return entry(directory) / "files" / "a" / PRODUCT


def test_graphs_compiled_by_another_process_are_loaded(directory: Path) -> None:
    first, second = Compiler(), Compiler()
    assert first.run().outcome == "miss" and second.run().outcome == "hit"
    assert (first.compilations, second.compilations) == (1, 0)
    assert counters() == {"Miss": 1, "Hit": 1}
    assert directory.stat().st_mode & 0o777 == 0o700
    (found,) = examine_cache().entries
    assert (found.num_hits, found.name, found.num_bytes) == (1, "times", len("2.0"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"options": {"level": "3"}}, "options.level: none -> 3"),
        ({"rows": 4}, "inputs.0: float32[2, 3] stride (3, 1) cpu -> float32[4, 3] stride (3, 1) cpu"),
        ({"value": 3.0}, "graph.arguments: (%0, 2.0) (%1,) -> (%0, 3.0) (%1,)"),
    ],
)
def test_a_miss_names_the_part_of_the_key_that_changed(change: dict[str, Any], cause: str) -> None:
    Compiler().run()
    other = Compiler(change.get("value", 2.0), options=change.get("options"))
    made = other.run(rows=change.get("rows", 2))
    assert other.compilations == 1 and counters() == {"Miss": 2}
    assert made.cause.startswith(cause) and "nearest: times" in made.cause


def test_changed_torch_version_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler().run()
    other = Compiler()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.99.0")
        assert "versions.torch: " in other.run().cause and other.compilations == 1
    newer, older = sorted(examine_cache().entries, key=lambda found: found.cause, reverse=True)
    assert "-> 2.99.0 " in newer.cause and ": 2.99.0 " in newer.stale and older.stale == ""


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("cpu_flags", frozenset({"abacus"}), "processor.flags"),
        ("versions", {"glassengine": "9.9", "python": "3.99.1"}, "versions.glassengine"),
    ],
)
def test_changed_surroundings_are_a_miss(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, part: str) -> None:
    Compiler().run()
    monkeypatch.setattr(environment, name, lambda: value)
    other = Compiler()
    assert part in other.run().cause and other.compilations == 1
    assert part in next(found.stale for found in examine_cache().entries if found.cause == "nothing is stored yet")


def test_changed_accelerator_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler().run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus 9000")
    other = Compiler()
    assert "accelerator.name: " in other.run().cause and other.compilations == 1


def test_changed_number_of_threads_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler().run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert "settings.threads: " in Compiler().run().cause


def truncated(directory: Path) -> None:
    path = product(directory)
    path.write_bytes(path.read_bytes()[:-1])


def flipped(directory: Path) -> None:
    product(directory).write_bytes(b"9.0")


def missing_file(directory: Path) -> None:
    product(directory).unlink()


def link(directory: Path) -> None:
    path = product(directory)
    target = directory / ".elsewhere"
    path.rename(target)
    path.symlink_to(target)


def pipe(directory: Path) -> None:
    product(directory).unlink()
    os.mkfifo(product(directory))


def no_manifest(directory: Path) -> None:
    (entry(directory) / "manifest.json").unlink()


def truncated_manifest(directory: Path) -> None:
    path = entry(directory) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def edited_manifest(directory: Path) -> None:
    path = entry(directory) / "manifest.json"
    path.write_text(path.read_text().replace("aten.mul", "aten.add"))


def foreign_manifest(directory: Path) -> None:
    ours = entry(directory)
    Compiler(3.0).run()
    (other,) = (path for path in directory.iterdir() if path != ours)
    (ours / "manifest.json").write_bytes((other / "manifest.json").read_bytes())


def newer_manifest(directory: Path) -> None:
    changed(entry(directory), schema_version=SCHEMA_VERSION + 1)


def added_file(directory: Path) -> None:
    (entry(directory) / "files" / "b").write_bytes(b"added")


def linked_directory(directory: Path) -> None:
    folder = product(directory).parent
    folder.rename(directory / ".elsewhere")
    folder.symlink_to(directory / ".elsewhere")


def linked_files(directory: Path) -> None:
    folder = entry(directory) / "files"
    folder.rename(directory / ".elsewhere")
    folder.symlink_to(directory / ".elsewhere")


def changed(entry: Path, **changes: Any) -> None:
    path = entry / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ODD: list[dict[str, Any]] = [
    {"parts": 5},
    {"parts": {"graph": 5}},
    {"parts": {"graph": {"calls": 5}}},
    {"name": None},
    {"cause": []},
    {"compile_s": "long"},
    {"key": "../../escaped"},
    {"key": 7},
    {"num_bytes": -1},
    {"content": []},
]


@pytest.mark.parametrize("changes", ODD)
def test_s12_a_neighbor_with_odd_contents_never_ends_the_program(changes: dict[str, Any], directory: Path) -> None:
    Compiler(2.0).run()
    neighbor = entry(directory)
    changed(neighbor, **changes)
    Compiler(3.0).run()
    assert counters()["Miss"] == 2
    assert set(examine_cache().damaged) == {neighbor.name}
    assert not (directory.parent.parent / "escaped").exists()


def test_s6_a_pipe_in_the_place_of_a_count_of_uses_does_not_block(directory: Path) -> None:
    Compiler(2.0).run()
    uses = entry(directory) / "uses"
    uses.unlink(missing_ok=True)
    os.mkfifo(uses)
    Compiler(2.0).run()
    assert counters() == {"Miss": 1, "Hit": 1}


FAULTS = [
    newer_manifest,
    added_file,
    linked_directory,
    linked_files,
    truncated,
    flipped,
    missing_file,
    link,
    pipe,
    no_manifest,
    truncated_manifest,
    edited_manifest,
    foreign_manifest,
]


@pytest.mark.parametrize("damage", FAULTS)
def test_damaged_entry_is_counted_said_and_compiled_again(
    damage: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Compiler().run()
    damage(directory)
    reset_metrics()
    again, third = Compiler(), Compiler()
    assert again.run().outcome == "corrupt" and again.compilations == 1
    assert third.run().outcome == "hit" and third.compilations == 0
    assert counters() == {"Corrupt": 1, "Hit": 1}
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_entry_that_the_compiler_cannot_load_is_damaged(directory: Path) -> None:
    Compiler().run()

    class Refusing(Compiler):
        def __call__(self) -> Any:
            if self._directory is not None and (self._directory / "a").exists():
                raise RuntimeError("another format")
            return super().__call__()

    made = Refusing().run()
    assert made.outcome == "corrupt" and "another format" in made.cause
    assert Compiler().run().outcome == "hit"
    assert counters() == {"Miss": 1, "Corrupt": 1, "Hit": 1}


def test_compiler_that_does_not_take_its_own_files_is_a_miss_and_right() -> None:
    Compiler().run()

    class Forgetful(Compiler):
        def __call__(self) -> Any:
            self.compilations += 1
            return lambda inputs: [inputs[0] * self.value]

    made = Forgetful().run()
    assert made.outcome == "miss" and "in no part of the key" in made.cause
    assert counters() == {"Miss": 2}


def test_graph_that_is_not_kept_is_a_miss_each_time() -> None:
    for _ in range(2):
        compiler = Compiler()
        compiler.keeps = False
        assert compiler.run().key == ""
    assert counters() == {"Miss": 2} and examine_cache().entries == ()


def test_failing_compilation_is_a_miss_and_stores_nothing() -> None:
    def fail() -> Any:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compiled("times", graph_of(), fail, Compiler())
    assert counters() == {"Miss": 1} and examine_cache().entries == ()


def test_interrupted_compilation_stores_nothing_and_leaves_the_cache_usable() -> None:
    class Interrupted(Compiler):
        def __call__(self) -> Any:
            super().__call__()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted().run()
    assert examine_cache().entries == ()
    assert Compiler().run().outcome == "miss" and Compiler().run().outcome == "hit"


@contextlib.contextmanager
def without_superpowers() -> Iterator[None]:
    """Let the permissions of files hold for root as well: its right to ignore them is put down for a while."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0


def test_read_only_directory_is_read_and_costs_compilations(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    Compiler().run()
    reset_metrics()
    paths = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in paths:
        path.chmod(0o500)
    try:
        with without_superpowers():
            assert Compiler().run().outcome == "hit"
            for _ in range(2):
                other = Compiler(3.0)
                assert other.run().outcome == "miss" and other.compilations == 1
            flipped(directory)  # in place: the file itself is writable
            assert Compiler().run().outcome == "corrupt"
    finally:
        for path in paths:
            path.chmod(0o700)
    assert counters() == {"Hit": 1, "Miss": 2, "Corrupt": 1}
    assert [record.message for record in caplog.records if "are not kept" in record.message]


def test_directory_that_cannot_be_made_costs_compilations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert Compiler().run().outcome == "off"
    assert counters() == {} and len(caplog.records) == 1


def test_full_disk_costs_compilations_and_leaves_nothing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(Compiler):
        """The disk is full once it has compiled."""

        def __call__(self) -> Any:
            function = super().__call__()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
            return function

    compiler = Filling(size=1 << 16)
    try:
        assert compiler.run().outcome == "miss"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(directory.iterdir()) == []
    assert "File too large" in caplog.text
    assert Compiler(size=1 << 16).run().outcome == "miss"
    assert Compiler(size=1 << 16).run().outcome == "hit"


def test_no_room_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    made = compiled("times", graph_of(), lambda: lambda inputs: [inputs[0] * 2], Compiler())
    assert made.outcome == "off" and made.function([1.0]) == [2.0]


def test_temporary_files_that_were_cleared() -> None:
    Compiler().run()
    shutil.rmtree(cache_module._scratch(os.getpid()))
    assert Compiler().run().outcome == "hit"


def test_directory_of_somebody_else_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Compiler().run()
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    compiler = Compiler()
    assert compiler.run().outcome == "off" and compiler.compilations == 1
    assert "owns it" in caplog.text and "cannot be trusted" in caplog.text
    assert "owns it" in examine_cache().problem


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_directory_that_others_can_write_to_is_refused(directory: Path, mode: int) -> None:
    Compiler().run()
    directory.chmod(mode)
    compiler = Compiler()
    assert compiler.run().outcome == "off" and compiler.compilations == 1
    assert "others can write to it" in examine_cache().problem and not examine_cache().ok


def test_directory_that_vanishes_is_made_again(directory: Path) -> None:
    Compiler().run()
    product(directory).unlink()
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
    assert Compiler().run().outcome == "miss" and Compiler().run().outcome == "hit"


def test_entries_used_least_recently_are_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "2500")
    now = time.time()
    for index, value in enumerate((2.0, 3.0)):
        key = Compiler(value, size=1000).run().key
        os.utime(directory / key / "manifest.json", (now - 100 + index, now - 100 + index))
    Compiler(2.0, size=1000).run()  # a use: it is now the younger of the two
    Compiler(4.0, size=1000).run()
    assert counters() == {"Miss": 3, "Hit": 1, "Evicted": 1}
    assert "is full (GLASS_CACHE_MAX_BYTES=2500)" in caplog.text
    assert examine_cache().num_bytes == 2000
    assert Compiler(2.0, size=1000).run().outcome == "hit"
    assert Compiler(3.0, size=1000).run().outcome == "miss"


def test_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "0")
    assert Compiler().run().outcome == "off"
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "2 GiB")
    with pytest.raises(UsageError, match="not a number of bytes"):
        Compiler().run()


def test_entries_of_a_killed_process_are_removed(directory: Path) -> None:
    Compiler().run()
    old, young = directory / ".123-0-abc", directory / ".124-0-abc"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    Compiler(3.0).run()
    assert not old.exists() and young.exists()


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_cache
from glassengine.executable.counters import metrics
ready, go = Path(sys.argv[2]), Path(sys.argv[3])
ready.touch()
while not go.exists():
    time.sleep(0.001)
for round in range(8):
    for value in range(1, 6):
        test_cache.Compiler(float(value), size=20000).run()
found = metrics().counters
print(found.get("PersistentCacheHit", 0) + found["PersistentCacheMiss"], found.get("PersistentCacheCorrupt", 0))
"""


def test_an_entry_that_is_replaced_while_it_is_read_is_not_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(1.0).run()
    read, failures = cache_store._read_manifest, iter([True])

    def vanishing(path: Path) -> Any:
        if next(failures, False):
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(cache_store, "_read_manifest", vanishing)
    before = dict(metrics().counters)
    Compiler(1.0).run()
    found = metrics().counters
    assert found["PersistentCacheHit"] == before.get("PersistentCacheHit", 0) + 1
    assert found.get("PersistentCacheCorrupt", 0) == before.get("PersistentCacheCorrupt", 0)


def test_two_processes_write_at_once(directory: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent)]
    # Entries vanish and come back all the time: there is room for two of five.
    variables = os.environ | {"GLASS_CACHE_MAX_BYTES": "45000"}
    ready = [tmp_path / f"ready{index}" for index in range(2)]
    writers = [
        children.Popen([*command, str(path), str(go)], env=variables, stdout=subprocess.PIPE, text=True)
        for path in ready
    ]
    while not all(path.exists() for path in ready):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    go.touch()
    for writer in writers:
        shown, _ = writer.communicate(timeout=600)
        assert (writer.returncode, shown.split()) == (0, ["40", "0"])
    report = examine_cache()
    assert report.ok and 0 < report.num_bytes <= 60000
    assert not list(directory.glob(".*"))
