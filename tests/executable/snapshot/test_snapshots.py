"""The variables of PyTorch NeuronX: each of the documents' ways to ask for snapshots, read at each execution."""

from __future__ import annotations

import math
import os
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.environment import SnapshotRequest, snapshot_request
from glassengine.executable.graph import Execution, observers
from glassengine.executable.run.executable import Executable
from glassengine.executable.snapshot import snapshots as snapshot_environment
from glassengine.executable.snapshot.snapshots import policy_of, warn_without_executions
from tests import children

MakeExecutable = Callable[..., Executable]
X = torch.ones(2)
NAMES = ("XLA_FLAGS", "NEURON_DUMP_HLO_SNAPSHOT", "NEURON_FRAMEWORK_DEBUG", "NEURON_NC0_ONLY_SNAPSHOT", "RANK")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*NAMES, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def executable(make_executable: MakeExecutable) -> Executable:
    return make_executable(lambda x: (torch.sqrt(x),), x=X)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def test_the_variables_of_2_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable) -> None:
    executable.run([X])
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_snapshots --xla_dump_to=./dump")
    executable.run([X])
    executable.run([X])
    found = names(tmp_path / "dump")
    assert [name[-6:] for name in found] == ["000001", "000002"]
    snapshot = glass.snapshots.Snapshot.open(tmp_path / "dump" / found[0])
    assert torch.equal(snapshot.input("x"), X) and snapshot.outputs is None


def test_a_relative_directory_follows_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_snapshots --xla_dump_to=./dump")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        executable.run([X])
    assert len(names(tmp_path / "one" / "dump")) == len(names(tmp_path / "two" / "dump")) == 1
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert torch.equal(executable.run([X])[0], X)  # the program goes on without a snapshot
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_hlo_snapshots --xla_dump_to={tmp_path}/elsewhere")
    executable.run([X])
    assert len(names(tmp_path / "elsewhere")) == 1


def test_the_variables_of_1_13_toggled_in_a_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable
) -> None:
    monkeypatch.setenv("XLA_FLAGS", " --xla_dump_to=dump")
    monkeypatch.setenv("NEURON_FRAMEWORK_DEBUG", "1")
    for step in range(30):
        if step in (20, 25):
            monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", "1")
        else:
            monkeypatch.delenv("NEURON_DUMP_HLO_SNAPSHOT", raising=False)
        executable.run([X])
    assert [name[-6:] for name in names(tmp_path / "dump")] == ["000020", "000025"]


@pytest.mark.parametrize(
    ("value", "kept"),
    [("ON_NRT_ERROR", "reference"), ("ON_NRT_ERROR_HYBRID", "device"), ("ON_NRT_ERROR_CPU", "host")],
)
def test_on_nrt_error_takes_one_and_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable, value: str, kept: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f" --xla_dump_to={tmp_path}/dump")
    monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", value)
    request = snapshot_request()
    policy = request and policy_of(request, ".")
    assert policy is not None
    assert (policy.on, policy.keep_inputs) == ({"nonfinite", "error"}, kept)
    executable.run([X])
    assert names(tmp_path / "dump") == []
    with pytest.raises(glass.snapshots.NonFiniteError, match=r"aten.sqrt.default"):
        executable.run([-X])
    (name,) = names(tmp_path / "dump")
    assert math.isnan(float(glass.snapshots.Snapshot.open(tmp_path / "dump" / name).output("output[0]")[0]))


@pytest.mark.parametrize(
    ("request_", "on"),
    [
        (("--xla_dump_hlo_snapshots=true --xla_dump_to=d", "", "", ""), {"every"}),
        (("--xla_dump_hlo_snapshots=false --xla_dump_to=d", "", "", ""), None),
        (("--xla_dump_to=d --xla_cpu_use_x=1", "", "", ""), None),
        (("--xla_dump_to=d", "1", "", ""), {"every"}),
        (("--xla_dump_to=d", "0", "1", ""), None),
        (("--xla_dump_to=d", "1", "0", ""), None),
        (("--xla_dump_to=d", "ON_NRT_ERROR", "0", ""), None),
        (("--xla_dump_to=d", "inputs outputs", "", ""), {"every"}),
        (("--xla_dump_hlo_snapshots --xla_dump_to=d", "ON_NRT_ERROR", "", ""), {"every", "nonfinite", "error"}),
    ],
)
def test_what_the_values_mean(request_: tuple[str, str, str, str], on: set[str] | None) -> None:
    policy = policy_of(SnapshotRequest(*request_), "/start")
    assert (None if policy is None else policy.on) == on
    assert policy is None or policy.directory == Path("/start/d")


def test_a_directory_with_spaces_and_one_that_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_of(SnapshotRequest('--xla_dump_hlo_snapshots "--xla_dump_to=a b"', "", "", ""), "/start")
    assert policy is not None and policy.directory == Path("/start/a b")
    assert caplog.text == ""
    policy = policy_of(SnapshotRequest("--xla_dump_hlo_snapshots", "", "", ""), "/start")
    assert policy is not None and policy.directory == Path("/start/dump")
    assert "--xla_dump_to=DIR" in caplog.text


def test_a_value_that_means_nothing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=dump")
    monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", "ON_NRT_EROR")
    for _ in range(3):
        executable.run([X])
    assert len(caplog.records) == 1 and "ON_NRT_ERROR" in caplog.text
    assert names(tmp_path / "dump") == []


@pytest.mark.parametrize(("device", "local_rank", "taken"), [(0, "0", 1), (1, "0", 0), (0, "1", 0)])
def test_the_first_device_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    executable: Executable,
    device: int,
    local_rank: str,
    taken: int,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}/dump")
    monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", "1")
    monkeypatch.setenv("NEURON_NC0_ONLY_SNAPSHOT", "1")
    Execution(executable, 0, device, [X], observers())
    assert len(names(tmp_path / "dump")) == taken


def test_looking_at_the_variables_costs_next_to_nothing() -> None:
    # About a microsecond; a busy machine is allowed ten times that.
    assert not observers()
    assert min(timeit.repeat(observers, number=2000, repeat=5)) / 2000 < 15e-6


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({"XLA_FLAGS": "--xla_dump_hlo_snapshots --xla_dump_to=dump"}, True),
        ({"XLA_FLAGS": "--xla_dump_to=dump", "NEURON_DUMP_HLO_SNAPSHOT": "1"}, True),
        ({"XLA_FLAGS": "--xla_dump_to=dump"}, False),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, False),
        ({}, False),
    ],
)
def test_f25_snapshots_that_were_asked_for_and_nothing_ran(
    variables: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(snapshot_environment, "_saw_execution", False)
    warn_without_executions()
    assert ("no execution was seen" in caplog.text) == is_told


def test_f25_nothing_is_told_where_something_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_environment, "_saw_execution", False)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_hlo_snapshots --xla_dump_to={tmp_path}")
    executable.run([X])
    warn_without_executions()
    assert "no execution was seen" not in caplog.text


def test_f25_a_program_says_it_when_it_ends(tmp_path: Path) -> None:
    code = "import glassengine, torch; torch.nn.Linear(2, 2)(torch.ones(2))"
    variables = {**os.environ, "XLA_FLAGS": "--xla_dump_hlo_snapshots --xla_dump_to=dump"}
    done = children.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, timeout=60)
    assert done.returncode == 0 and "XLA_FLAGS asks for snapshots, and no execution was seen" in done.stderr
