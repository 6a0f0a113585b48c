"""Which executions get a snapshot: the callback, ranks, limits; and what happens when one cannot be written."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.errors import UnknownNameError, UsageError
from glassengine.executable.run.executable import Executable
from glassengine.executable.snapshot import policy, taker

MakeExecutable = Callable[..., Executable]
X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def executable(make_executable: MakeExecutable) -> Executable:
    return make_executable(lambda x: (x * 2,), x=X)


@pytest.fixture(autouse=True)
def _callback_as_before() -> Iterator[None]:
    yield
    policy.register_snapshot_callback(policy.inputs_always)


def has(directory: Path) -> dict[int, str]:
    """Return execution -> which of inputs and outputs its snapshot holds."""
    found = {}
    for item in glass.snapshots.list(directory):
        found[int(item.directory[-6:])] = " ".join(word for word in item.contents if word != "graph")
    return found


def test_the_callback_decides_for_each_execution(tmp_path: Path, executable: Executable) -> None:
    asked: list[tuple[str, int, int]] = []
    answers = ["", "inputs", "outputs", "inputs outputs", None, "outputs  inputs", "inputs"]

    def callback(name: str, addressable_device_index: int, execution_count: int) -> Any:
        asked.append((name, addressable_device_index, execution_count))
        return answers[execution_count]

    assert glass.snapshots.register_callback(callback)("x", 0, 0) == "inputs"
    with glass.snapshots.take(tmp_path):
        for _ in answers:
            executable.run([X])
    assert asked == [("tiny/main", 0, number) for number in range(7)]
    assert has(tmp_path) == {1: "inputs", 2: "outputs", 3: "inputs outputs", 5: "inputs outputs", 6: "inputs"}
    only_outputs = next(path for path in tmp_path.iterdir() if path.name.endswith("execution000002"))
    assert sorted(item.name for item in only_outputs.iterdir()) == ["graph.pt2", "meta.json", "outputs.safetensors"]
    assert torch.equal(glass.snapshots.Snapshot.open(only_outputs).output("output[0]"), X * 2)


def test_callbacks_that_are_not_callable_are_refused() -> None:
    with pytest.raises(UsageError, match="NoneType"):
        glass.snapshots.register_callback(None)  # type: ignore[arg-type]


def test_the_previous_callback_is_returned() -> None:
    def first(name: str, addressable_device_index: int, execution_count: int) -> str:
        return ""

    before = glass.snapshots.register_callback(first)
    assert glass.snapshots.register_callback(before) is first


def test_the_document_selects_by_step(tmp_path: Path, executable: Executable) -> None:
    step = 0

    def callback(name: str, addressable_device_index: int, execution_count: int) -> str:
        return "inputs" if step == 5 else ""

    glass.snapshots.register_callback(callback)
    with glass.snapshots.take(tmp_path):
        for _ in range(8):
            step += 1
            executable.run([X])
    assert has(tmp_path) == {4: "inputs"}


def test_a_callback_that_raises_is_logged_once_and_not_asked_again(
    tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def callback(name: str, addressable_device_index: int, execution_count: int) -> str:
        asked.append(execution_count)
        if execution_count == 2:
            raise NameError("name 'stpe' is not defined")
        return "inputs"

    glass.snapshots.register_callback(callback)
    with glass.snapshots.take(tmp_path) as snapshots:
        for _ in range(6):
            assert torch.equal(executable.run([X])[0], X * 2)
    assert asked == [0, 1, 2] and len(snapshots.written) == 2
    assert caplog.text.count("not asked again") == 1 and "stpe" in caplog.text
    assert glass.snapshots.register_callback(callback) is callback


def test_an_answer_that_means_nothing_is_said_once(
    tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    glass.snapshots.register_callback(lambda name, device, count: "input" if count % 2 else 3)  # type: ignore[return-value,arg-type]
    with glass.snapshots.take(tmp_path) as snapshots:
        for _ in range(6):
            executable.run([X])
    assert snapshots.written == ()
    assert len(caplog.records) == 2 and "answered input" in caplog.text and "answered 3" in caplog.text


def test_ten_thousand_executions_with_a_cap_lose_nothing_silently(
    tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    with glass.snapshots.take(tmp_path, max_snapshots=20) as snapshots:
        for _ in range(10_000):
            executable.run([X])
    assert len(snapshots.written) == len(list(tmp_path.iterdir())) == 20
    assert snapshots.left_out == {"max_snapshots=20": 9980}
    assert "20 snapshots in" in caplog.text and "9980: max_snapshots=20" in caplog.text
    # Said when it begins and when it ends, not 9980 times.
    assert len(caplog.records) == 2


def test_a_cap_of_bytes_holds_on_disk(tmp_path: Path, make_executable: MakeExecutable) -> None:
    big = torch.randn(50_000)
    executable = make_executable(lambda x, w: (x + w,), {"w": "parameter"}, x=big, w=big)
    with glass.snapshots.take(tmp_path, max_bytes=1_500_000) as snapshots:
        for _ in range(20):
            executable.run([big + 1, big])
    inodes = {file.stat().st_ino: file.stat().st_size for path in snapshots.written for file in path.iterdir()}
    assert 1_200_000 < sum(inodes.values()) <= 1_500_000
    assert len(snapshots.written) + snapshots.left_out["max_bytes=1500000"] == 20


def test_room_on_the_disk_is_looked_at_before_writing(
    tmp_path: Path, executable: Executable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(taker.shutil, "disk_usage", lambda path: usage._replace(free=2000))
    with glass.snapshots.take(tmp_path / "new" / "dump", min_free_bytes=1990) as snapshots:
        executable.run([X])
    assert not (tmp_path / "new").exists()
    assert snapshots.left_out == {"less than min_free_bytes=1990 would be free on the disk": 1}
    assert "min_free_bytes=1990" in caplog.text
    with glass.snapshots.take(tmp_path / "new" / "dump", min_free_bytes=1000) as snapshots:
        executable.run([X])
    assert len(snapshots.written) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on": "non-finite"}, UnknownNameError, r"occasion of a snapshot 'non-finite'[\s\S]*nearest: nonfinite"),
        ({"on": ()}, UsageError, "no occasion"),
        ({"contents": "everything"}, UnknownNameError, "unknown content of a snapshot"),
        ({"keep_inputs": "cpu"}, UnknownNameError, r"keep_inputs=\"host\""),
        ({"max_bytes": -1}, UsageError, "max_bytes is below zero"),
    ],
)
def test_words_that_mean_nothing_are_refused(
    tmp_path: Path, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        glass.snapshots.take(tmp_path, **options)


def test_only_the_ranks_asked_for(tmp_path: Path, executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        with glass.snapshots.take(tmp_path, ranks=(0, 2)):
            executable.run([X])
    assert sorted(path.name.split("-")[1] for path in tmp_path.iterdir()) == ["process000000", "process000002"]


def in_processes(*functions: Callable[[], None]) -> list[int]:
    """Run each function in a process of its own, at once, and return their exit statuses."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode or 0 for process in processes]


def test_two_processes_with_the_same_names_overwrite_nothing(tmp_path: Path, executable: Executable) -> None:
    def work(value: float) -> Callable[[], None]:
        def run() -> None:
            with glass.snapshots.take(tmp_path):
                for _ in range(40):
                    executable.run([torch.full((2, 3), value)])

        return run

    assert in_processes(work(1.0), work(2.0)) == [0, 0]
    found = [glass.snapshots.Snapshot.open(path) for path in tmp_path.iterdir()]
    values = sorted((snapshot.execution, float(snapshot.input("x")[0, 0])) for snapshot in found)
    assert values == [(execution, value) for execution in range(40) for value in (1.0, 2.0)]


def test_four_ranks_write_beside_one_another(tmp_path: Path, executable: Executable) -> None:
    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ["RANK"] = str(rank)
            os.environ["XLA_FLAGS"] = f"--xla_dump_hlo_snapshots --xla_dump_to={tmp_path}"
            for _ in range(5):
                executable.run([X + rank])

        return run

    assert in_processes(*map(work, range(4))) == [0] * 4
    found = [glass.snapshots.Snapshot.open(path) for path in tmp_path.iterdir()]
    assert sorted((snapshot.process, snapshot.execution) for snapshot in found) == [
        (rank, execution) for rank in range(4) for execution in range(5)
    ]
    assert all(torch.equal(snapshot.input("x"), X + snapshot.process) for snapshot in found)


def test_ranks_of_torch_distributed_count_where_no_variable_is_set(tmp_path: Path, executable: Executable) -> None:
    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ.pop("RANK", None)
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2
            )
            with glass.snapshots.take(tmp_path / "dump"):
                executable.run([X + rank])
            torch.distributed.barrier()

        return run

    assert in_processes(work(0), work(1)) == [0, 0]
    found = [glass.snapshots.Snapshot.open(path) for path in sorted((tmp_path / "dump").iterdir())]
    assert [snapshot.process for snapshot in found] == [0, 1]
    assert all(torch.equal(snapshot.input("x"), X + snapshot.process) for snapshot in found)


def test_the_recipe_of_the_document_for_rank_0(tmp_path: Path, executable: Executable) -> None:
    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ["RANK"] = str(rank)
            if os.environ.get("RANK", "0") == "0":
                os.environ["XLA_FLAGS"] = f"--xla_dump_hlo_snapshots --xla_dump_to={tmp_path}"
            executable.run([X])

        return run

    assert in_processes(work(1)) == [0] and list(tmp_path.iterdir()) == []
    assert in_processes(work(0)) == [0] and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_survived_and_said(tmp_path: Path, make_executable: MakeExecutable) -> None:
    # A file of more than this many bytes cannot be written, as on a disk with so much room.
    big = torch.randn(100_000)
    executable = make_executable(lambda x: (x * 2,), x=big)
    log = tmp_path / "log"

    def work() -> None:
        logging.getLogger("glassengine").addHandler(logging.FileHandler(log))
        with glass.snapshots.take(tmp_path / "dump") as snapshots:
            executable.run([big[:1000]])
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            for _ in range(3):
                assert torch.equal(executable.run([big])[0], big * 2)
            executable.run([big[:1000]])
        assert len(snapshots.written) == 2 and snapshots.left_out == {"File too large": 3}

    assert in_processes(work) == [0]
    assert len(list((tmp_path / "dump").iterdir())) == 2, "nothing half-written is left"
    assert log.read_text().count("left out") == 2


def test_outputs_that_do_not_fit_leave_the_inputs(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x: (x.expand(100_000),), x=torch.ones(1))

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with glass.snapshots.take(tmp_path, contents="inputs outputs") as snapshots:
            executable.run([torch.ones(1)])
        assert snapshots.left_out.total() == 1

    assert in_processes(work) == [0]
    (path,) = tmp_path.iterdir()
    snapshot = glass.snapshots.Snapshot.open(path)
    assert snapshot.outputs is None and torch.equal(snapshot.input("x"), torch.ones(1))
    assert not (path / "outputs.safetensors").exists()


def test_a_directory_that_cannot_be_written_is_survived_and_said(
    tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "locked"
    target.mkdir(mode=0o500)
    if os.access(target, os.W_OK):  # nothing is forbidden to root
        target = tmp_path / "file"
        target.write_text("in the way")
    with glass.snapshots.take(target) as snapshots:
        assert torch.equal(executable.run([X])[0], X * 2)
        executable.run([X])
    assert snapshots.written == () and snapshots.left_out.total() == 2
    assert str(target) in caplog.text


def test_two_threads_share_a_policy(tmp_path: Path, executable: Executable) -> None:
    with glass.snapshots.take(tmp_path, on=("every", "nonfinite")) as snapshots, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: executable.run([X]), range(40)))
    assert len(snapshots.written) == len(set(snapshots.written)) == 40
    assert snapshots.left_out.total() == 0
    for path in snapshots.written:
        assert torch.equal(glass.snapshots.Snapshot.open(path).input("x"), X)


def test_nothing_is_taken_after_the_end(tmp_path: Path, executable: Executable) -> None:
    with glass.snapshots.take(tmp_path) as snapshots:
        executable.run([X])
    executable.run([X])
    assert len(snapshots.written) == len(list(tmp_path.iterdir())) == 1


def test_writing_is_a_span_of_a_profile(tmp_path: Path, executable: Executable) -> None:
    with glass.profiler.profile(tmp_path / "profile"), glass.snapshots.take(tmp_path / "dump"):
        executable.run([X])
    kinds = glass.profiler.read(tmp_path / "profile")[0].data["kinds"]
    assert kinds["snapshot"]["count"] == 1 and kinds["snapshot"]["total_us"] > 0
