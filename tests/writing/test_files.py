"""What is written is written to files of this machine; addresses of anything else are refused where they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.environment import SnapshotRequest
from glassengine.errors import UsageError
from glassengine.executable.cache_store import Store
from glassengine.executable.snapshot.snapshots import policy_of
from glassengine.writing.files import local


@pytest.mark.parametrize("given", ["s3://bucket/run", "gs://b/r", Path("s3://bucket/run")])
def test_f22_places_in_stores_are_no_paths(given: str | Path) -> None:
    with pytest.raises(UsageError, match="only files of this machine") as raised:
        local(given)
    assert "://" in str(raised.value) and "mount it" in str(raised.value)


def test_f22_a_file_address_is_a_path() -> None:
    assert local("file:///tmp/run") == Path("/tmp/run")


@pytest.mark.parametrize("given", ["run", "a:b", "/tmp/s3://x", "./s3:/x", "C:/run", "C:\\run", "run:", Path("x")])
def test_paths_are_paths(given: str | Path) -> None:
    assert local(given) == Path(given)


URL = "hdfs://host/run"


@pytest.mark.parametrize(
    "command",
    [
        ["record", "-o", URL, "--", "script.py"],
        ["record", "-o", URL, "net.py:model", "--inputs", "net.py:inputs"],
        ["build", "net.py:model", URL],
        ["build", "net.py:model", "--dry-run", "-o", URL],
        ["build", "net.py:model", "--artifacts", URL],
        ["check", "net.py:model", f"--json={URL}"],
        ["check", "net.py:model", "--reproduction", URL],
        ["compare", "a", "b", f"--json={URL}"],
        ["show", "x.pt", "--export", URL],
    ],
)
def test_f22_every_command_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.ReLU\ndef inputs():\n    return {'input': torch.ones(2)}\n"
    )
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert main(command) == 2
    assert "not in a store that can be used" in capsys.readouterr().err
    assert not list(tmp_path.glob("*:*"))


def test_f22_calls_that_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.ReLU()
    for url, why in ((URL, "not in a store that can be used"), ("s3://bucket/run", "only files of this machine")):
        for call in (
            lambda url=url: glass.snapshots.take(url),
            lambda url=url: glass.profiler.start_server(0, directory=url),
            lambda url=url: glass.compat.model_addition_debugger_context(net, url).__enter__(),
        ):
            with pytest.raises(UsageError, match=why):
                call()
    for call in (
        lambda: glass.record(net, URL).__enter__(),
        lambda: glass.record(net, Path(URL)).__enter__(),
        lambda: glass.profiler.profile(URL).__enter__(),
        lambda: glass.compat.StepFiles(URL),
    ):
        with pytest.raises(UsageError, match="not in a store that can be used"):
            call()
    assert not list(tmp_path.iterdir())


def test_f22_directories_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", URL)
    with pytest.raises(UsageError, match="not in a store that can be used"):
        glass.build(nn.ReLU(), inputs={"input": torch.ones(2)}, backend="eager")
    request = SnapshotRequest(f"--xla_dump_hlo_snapshots --xla_dump_to={URL}", "", "", "")
    assert policy_of(request, str(tmp_path)) is None and "no snapshots are taken" in caplog.text
    with pytest.raises(UsageError, match="only files of this machine"):
        Store(Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())
