"""Who judges makes no difference: this process, other processes, a cluster, or jobs that leave files."""

from __future__ import annotations

import copy
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.compare import plan as plans
from glassengine.compare import sides as both_sides
from glassengine.compare.chunk import main as judge_chunks
from glassengine.compare.compare import compare
from glassengine.compare.distribute import Here
from glassengine.compare.judge_chunk import judge_chunk
from glassengine.compare.units import Answer, Chunk
from glassengine.errors import CorruptError, UsageError
from glassengine.recording.layout.noise_floor import Floor, write_noise_floor
from glassengine.recording.write.writer import RecordingWriter
from glassengine.workers import Died
from glassengine.workers.pipe import receive, send
from tests import children

STEPS = 3


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
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows: 64 rows of 32 floats are 8 KiB on each side."""
    monkeypatch.setattr(plans, "CHUNK_BYTES", 5000)


def judged(sides: Path, **options: Any) -> dict[str, Any]:
    return compare(sides / "a", sides / "b", **options).to_dict()


def test_rows_say_what_the_whole_says(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judged(sides)
    monkeypatch.setattr(plans, "CHUNK_BYTES", 5000)
    rows = judged(sides)
    assert rows["first_divergence"]["site"] == whole["first_divergence"]["site"] == "2"
    for one, other in zip(whole["pairs"], rows["pairs"], strict=True):
        assert one["site"] == other["site"] and one["verdict"] == other["verdict"]
        for name, value in one["figures"].items():
            assert other["figures"][name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_processes_find_what_one_finds(sides: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.starting.subprocess", children.started_as_copies(("torch",)))
    assert judged(sides, jobs=2) == judged(sides)


@pytest.mark.slow
def test_a_worker_that_is_killed_changes_nothing(sides: Path, small_chunks: None) -> None:
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < 2:
            # Each thread has the children that it has started.
            lists = [path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/children")]
            for child in " ".join(lists).split():
                if b"judge_chunk" in Path(f"/proc/{child}/cmdline").read_bytes() and int(child) not in killed:
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
def test_a_cluster_finds_what_one_process_finds(sides: Path, small_chunks: None) -> None:
    pytest.importorskip("ray")
    assert judged(sides, cluster="auto", jobs=1) == judged(sides)


def test_jobs_that_leave_files_find_what_one_process_finds(
    sides: Path, small_chunks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, result = tmp_path / "plan.jsonl", tmp_path / "result.json"
    names = [str(sides / "a"), str(sides / "b")]
    assert main(["compare", *names, "--plan", str(tmp_path / "a plan")]) == 0
    first, _, said = capsys.readouterr().out.partition("options: ")
    assert " chunks. Each" in first
    assert shlex.split(said) == ["glass", "compare", *names, "--merge", str(tmp_path / "a plan")]
    assert main(["compare", *names, "--plan", str(plan), f"--json={result}"]) == 0
    count = json.loads(result.read_text(encoding="utf-8"))["num_chunks"]
    assert count > 4
    assert judge_chunks([str(plan), "1", "--of", "3"]) == 0
    with pytest.raises(UsageError, match="have no answer"):
        judged(sides, answers=plan)
    for job in (0, 2):
        assert judge_chunks([str(plan), str(job), "--of", "3"]) == 0
    assert judge_chunks([str(plan), str(count)]) == 2
    assert judged(sides, answers=plan) == judged(sides)
    assert main(["compare", *names, "--merge", str(plan), f"--json={result}"]) == 1
    with pytest.raises(UsageError, match="another comparison"):
        judged(sides, answers=plan, rtol=1e-3)
    assert main(["compare", *names, "--plan", str(plan)]) == 2
    answer = plan.with_name("plan.jsonl.answers") / "000003.answer"
    answer.write_bytes(plan.with_name("plan.jsonl.answers").joinpath("000002.answer").read_bytes())
    with pytest.raises(CorruptError, match="the answer to a chunk is damaged"):
        judged(sides, answers=plan)
    answer.write_bytes(b"\x81")
    with pytest.raises(CorruptError, match="the answer to a chunk is damaged"):
        judged(sides, answers=plan)
    capsys.readouterr()


WITHOUT_TORCH = """
import json, os, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("torch is imported")
sys.meta_path.insert(0, NoTorch())
import glassengine.compare.compare
from glassengine.compare import plan as plans
from glassengine.workers.pipe import receive, send
class Starter:
    def __init__(self, function, count):
        self.count = count
    def run(self, requests, attempts=3):
        for request in requests:
            send(sys.stdout.buffer, request)
            yield receive(sys.stdin.buffer)
    def close(self):
        pass
module = sys.modules["glassengine.compare.compare"]
module.Processes, plans.CHUNK_BYTES = Starter, 5000
found = module.compare(sys.argv[1], sys.argv[2], jobs=2)
from glassengine.report.terminal_compare import comparison
from tests import children
comparison(found)
send(sys.stdout.buffer, b"")
send(sys.stdout.buffer, json.dumps(found.to_dict()).encode())
"""


def test_who_plans_and_merges_does_without_torch(tmp_path: Path, small_chunks: None) -> None:
    """Of ranks, with padding, a noise floor, tensors cut in rows, and some that are the same; this process judges."""
    for name, error in (("a", 0.0), ("b", 1e-3)):
        for rank in range(2):
            path = tmp_path / name / f"rank{rank}"
            with RecordingWriter(path, metadata={"token_ids": [[0, 1, 2, 3]]}) as writer:
                for step in range(2):
                    writer.write(".:in.input_ids", step, torch.arange(4)[None], rank=rank)
                    writer.write(".:in.attention_mask", step, torch.tensor([[0, 1, 1, 1]]), rank=rank)
                    for site, size in (("small:out", 8), ("large:out", 1600)):
                        x = torch.randn(1, 4, size, generator=torch.Generator().manual_seed(rank + step))
                        writer.write(site, step, x + (error if step and site[0] == "l" else 0), rank=rank)
                    writer.commit(step)
            if name == "a":
                noise = tuple(np.full(size, 1e-12) for size in (1, 4, 1600))
                write_noise_floor(path, {("large:out", 1, rank): Floor(1e-12, 1.0, noise)}, "by hand")
    here = driven_without_torch(tmp_path)
    assert {pair["judged_by"] for pair in here["pairs"]} == {"noise floor", "tolerance (uncalibrated)"}
    assert here["exemptions"] and here["first_divergence"]["site"] == "large:out"


def test_who_puts_ranks_together_does_without_torch(tmp_path: Path, small_chunks: None) -> None:
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
    here = driven_without_torch(tmp_path)
    assert here["first_divergence"]["site"] == "norm" and here["first_divergence"]["rank"] == 1


def driven_without_torch(sides: Path) -> dict[str, Any]:
    """Compare both sides in a process that cannot import torch, for which this one judges, and in this one alone."""
    child = [sys.executable, "-c", WITHOUT_TORCH, str(sides / "a"), str(sides / "b")]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        while request := receive(driver.stdout):
            send(driver.stdin, judge_chunk(request))
        document = json.loads(receive(driver.stdout) or b"{}")
    here = judged(sides)
    assert document == json.loads(json.dumps(here))
    return here


def test_first_stops_after_the_first_chunk_that_is_wrong(sides: Path, small_chunks: None) -> None:
    everything, found = judged(sides), judged(sides, first=True)
    count = found["counts"]["compared"]
    assert 0 < count < everything["counts"]["compared"] and not found["ok"]
    assert [pair["site"] for pair in found["pairs"]] == [pair["site"] for pair in everything["pairs"][:count]]
    assert found["first_divergence"]["site"] == everything["first_divergence"]["site"]
    assert found["skipped"][-1]["reason"].startswith("--first: ")
    alike = compare(sides / "a", sides / "a", first=True)
    assert alike.ok and not alike.skipped


def test_what_kills_its_workers_is_named_and_not_ok(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 5
    asked = []

    def answers(self: Here, chunks: Iterable[Chunk], *, again: bool = False) -> Generator[Answer | Died, None, None]:
        for chunk in chunks:
            asked.append(len(chunk.units))
            is_deadly = any(unit.number == wanted for unit in chunk.units)
            yield Died("killed by SIGKILL") if is_deadly else self.answer(chunk)

    monkeypatch.setattr(Here, "answers", answers)
    monkeypatch.setattr(both_sides, "have_same_bytes", lambda one, other: False)
    found = compare(sides / "a", sides / "a")
    assert not found.ok and found.too_little and found.verdict == "identical" and found.coverage < 1
    (lost,) = found.skipped
    assert found.not_ok_because == f"not judged: {lost.site}, step {lost.step}: {lost.reason}"
    assert lost.reason == "each worker that judged it was killed by SIGKILL"
    assert len(asked) < 30
    assert [pair.site for pair in found.pairs].count(lost.site) == STEPS - 1


def test_equal_checksums_need_no_bytes(sides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bytes = Counted(monkeypatch)
    monkeypatch.setattr(both_sides, "have_same_bytes", lambda one, other: False)
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
        from glassengine.recording.read.reader import Recording

        original: Callable[..., torch.Tensor] = Recording.tensor

        def tensor(recording: Recording, *arguments: Any) -> torch.Tensor:
            self.number += 1
            return original(recording, *arguments)

        monkeypatch.setattr(Recording, "tensor", tensor)


@pytest.mark.parametrize("where", ["first rows", "last rows"])
def test_damaged_bytes_are_found_in_rows_as_well(tmp_path: Path, where: str, small_chunks: None) -> None:
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


def test_what_is_open_is_not_sent(sides: Path) -> None:
    with pytest.raises(UsageError, match="cannot be given what is open"):
        compare(glass.open(sides / "a"), sides / "b", jobs=2)


def test_a_plan_of_one_chunk_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    assert main(["compare", *[str(tmp_path / "x.pt")] * 2, "--plan", str(tmp_path / "plan")]) == 0
    assert ": 1 chunk. Each" in capsys.readouterr().out
