"""Who judges makes no difference: this process, other processes, or a cluster."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.compare import loader, pairs
from glassengine.compare.compare import compare
from glassengine.compare.pairs import PairBlock
from glassengine.errors import CorruptError, UsageError
from glassengine.recording.write.writer import RecordingWriter
from glassengine.workers import Died, InProcess
from glassengine.workers.processes import Processes
from tests import children

STEPS = 3
module = sys.modules["glassengine.compare.compare"]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recordings; the weights of the candidate's third layer are wrong in one row."""
    directory = tmp_path_factory.mktemp("sides")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight[3] += 0.1
    steps = [torch.randn(64, 32) for _ in range(STEPS)]
    for name, one in (("a", model), ("b", other)):
        with glass.record(one, directory / name):
            for x in steps:
                one(x)
    return directory


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows: 64 rows of 32 floats are 8 KiB on each side."""
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 5000)


def judged(sides: Path, **options: Any) -> dict[str, Any]:
    return compare(sides / "a", sides / "b", **options).to_dict()


def test_rows_say_what_the_whole_says(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judged(sides)
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 5000)
    rows = judged(sides)
    assert rows["first_divergence"]["site"] == whole["first_divergence"]["site"] == "2"
    for one, other in zip(whole["pairs"], rows["pairs"], strict=True):
        assert one["site"] == other["site"] and one["verdict"] == other["verdict"]
        for name, value in one["figures"].items():
            assert other["figures"][name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_processes_find_what_one_finds(sides: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.starting.subprocess", children.started_as_copies(("torch",)))
    assert judged(sides, jobs=2) == judged(sides)


@pytest.mark.slow
def test_a_worker_that_is_killed_changes_nothing(sides: Path, small_blocks: None) -> None:
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < 2:
            # Each thread has the children that it has started.
            lists = [path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/children")]
            for child in " ".join(lists).split():
                if b"judge_block" in Path(f"/proc/{child}/cmdline").read_bytes() and int(child) not in killed:
                    os.kill(int(child), signal.SIGKILL)
                    killed.append(int(child))
                    break
            time.sleep(0.5)

    thread = threading.Thread(target=kill)
    thread.start()
    found = judged(sides, jobs=2)
    over.set()
    thread.join()
    assert killed and found == judged(sides)


@pytest.mark.slow
def test_a_cluster_finds_what_one_process_finds(sides: Path, small_blocks: None) -> None:
    pytest.importorskip("ray")
    assert judged(sides, cluster="auto", jobs=1) == judged(sides)


WITHOUT_TORCH = """
import json, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("torch is imported")
sys.meta_path.insert(0, NoTorch())
from glassengine.compare.compare import compare
from glassengine.report.terminal_compare import comparison
found = compare(sys.argv[1], sys.argv[2])
comparison(found)
print(json.dumps(found.to_dict()))
"""


def test_a_comparison_of_recordings_does_without_torch(tmp_path: Path) -> None:
    """With padding, halves, integers, tensors of many rows, statistics and hints; one is wrong."""
    for name, error in (("a", 0.0), ("b", 1e-3)):
        with RecordingWriter(tmp_path / name, metadata={"token_ids": [[0, 1, 2, 3]]}) as writer:
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                writer.write(".:in.input_ids", step, torch.arange(4)[None])
                writer.write(".:in.attention_mask", step, torch.tensor([[0, 1, 1, 1]]))
                for site, dtype, size in (
                    ("half:out", torch.bfloat16, 80),
                    ("small:out", torch.float32, 8),
                    ("large:out", torch.float32, 1 << 20),
                ):
                    x = torch.randn(1, 4, size, generator=generator) * (1 + error * 1e-4)
                    x[0, 0, 0] += error * 1e5
                    x[0, 1, 2] += error * 1e3 if step and site[0] == "l" else 0
                    writer.write(site, step, x.to(dtype))
                writer.commit(step)
    child = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "a"), str(tmp_path / "b")]
    found = subprocess.run(child, stdout=subprocess.PIPE, check=True)
    here = judged(tmp_path)
    assert json.loads(found.stdout.splitlines()[-1]) == json.loads(json.dumps(here))
    assert here["first_divergence"]["site"] == "large:out" and here["counts"]["wrong"] == 1
    assert here["exemptions"]


def test_processes_put_ranks_together_as_one_does(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process against two ranks, which have shares of a sum, rows of a product, and one thing wrong."""
    x, parts = torch.arange(24.0).reshape(4, 6), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    shares = (parts, x - parts)
    for rank in (None, 0, 1):
        with RecordingWriter(tmp_path / ("a" if rank is None else f"b/rank{rank}"), metadata={}) as writer:
            for step in range(2):
                own = {".:in[0]": x, "up": x.T, "down": x, "sum": x + 1, "norm": x / 3}
                if rank is not None:
                    own |= {"up": x.T.chunk(2)[rank], "down": shares[rank], "norm": x / 3 + (step and rank)}
                for site, tensor in own.items():
                    writer.write(site, step, tensor.contiguous(), rank=rank or 0)
                writer.commit(step)
    monkeypatch.setattr("glassengine.starting.subprocess", children.started_as_copies(("torch",)))
    here = judged(tmp_path)
    assert here["first_divergence"]["site"] == "norm" and here["first_divergence"]["rank"] == 1
    assert judged(tmp_path, jobs=2) == here


def test_small_comparisons_start_no_process(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    original = Processes.__init__

    def counted(self: Processes, function: Callable[[Any], Any], count: int) -> None:
        started.append(count)
        original(self, function, count)

    monkeypatch.setattr(Processes, "__init__", counted)
    here = judged(sides)
    assert not started
    monkeypatch.setattr("glassengine.environment.num_cpus", lambda: 2)
    monkeypatch.setattr(module, "_BYTES_A_PROCESS", 1000)
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 5000)
    monkeypatch.setattr("glassengine.starting.subprocess", children.started_as_copies(("torch",)))
    assert judged(sides) == judged(sides, jobs=1) and started == [2]
    assert judged(sides)["counts"] == here["counts"]


def test_first_stops_after_the_first_block_that_is_wrong(sides: Path, small_blocks: None) -> None:
    everything, found = judged(sides), judged(sides, first=True)
    count = found["counts"]["compared"]
    assert 0 < count < everything["counts"]["compared"] and not found["ok"]
    assert [pair["site"] for pair in found["pairs"]] == [pair["site"] for pair in everything["pairs"][:count]]
    assert found["first_divergence"]["site"] == everything["first_divergence"]["site"]
    assert found["skipped"][-1]["reason"].startswith("--first: ")
    alike = compare(sides / "a", sides / "a", first=True)
    assert alike.ok and not alike.skipped


def test_a_pair_that_kills_workers_is_named_and_not_ok(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 5
    asked = []

    def run(self: InProcess, requests: Iterable[PairBlock], *, attempts: int = 3) -> Generator[Any, None, None]:
        for block in requests:
            asked.append(len(block.items))
            is_deadly = any(item.number == wanted for item in block.items)
            yield Died("killed by SIGKILL") if is_deadly else self._function(block)

    monkeypatch.setattr(InProcess, "run", run)
    monkeypatch.setattr(loader, "have_same_bytes", lambda one, other: False)
    found = compare(sides / "a", sides / "a")
    assert not found.ok and found.too_little and found.verdict == "identical" and found.coverage < 1
    (lost,) = found.skipped
    assert found.not_ok_because == f"not judged: {lost.site}, step {lost.step}: {lost.reason}"
    assert lost.reason == "each worker that judged it was killed by SIGKILL"
    assert len(asked) < 30
    assert [pair.site for pair in found.pairs].count(lost.site) == STEPS - 1


def test_equal_checksums_need_no_bytes(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bytes = Counted(monkeypatch)
    monkeypatch.setattr(loader, "have_same_bytes", lambda one, other: False)
    expected = compare(sides / "a", sides / "a").to_dict()
    monkeypatch.undo()
    without = Counted(monkeypatch)
    found = compare(sides / "a", sides / "a").to_dict()
    for document in (expected, found):
        for pair in document["pairs"][:3]:  # those that have statistics
            assert pair["figures"]["num_different"] == 0
    assert found == expected
    assert without.number < with_bytes.number


class Counted:
    """Counts the tensors that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        from glassengine.recording.reader import Recording

        original: Callable[..., Any] = Recording.read_values

        def read_values(recording: Recording, *arguments: Any) -> Any:
            self.number += 1
            return original(recording, *arguments)

        monkeypatch.setattr(Recording, "read_values", read_values)


@pytest.mark.parametrize("where", ["first rows", "last rows"])
def test_damaged_bytes_are_found_in_rows_as_well(tmp_path: Path, where: str, small_blocks: None) -> None:
    x = torch.arange(640_000.0).reshape(400, 1600)
    for name, value in (("a", x), ("b", x + 1)):
        with RecordingWriter(tmp_path / name, metadata={}) as writer:
            writer.write("x", 0, value)
            writer.commit(0)
    (shard,) = (tmp_path / "b").glob("shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) - (4 if where == "last rows" else x.nbytes)] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match="recorded values are damaged"):
        compare(tmp_path / "a", tmp_path / "b")


def test_open_sources_are_not_sent_to_workers(sides: Path) -> None:
    with pytest.raises(UsageError, match="cannot be given what is open"):
        compare(glass.open(sides / "a"), sides / "b", jobs=2)
