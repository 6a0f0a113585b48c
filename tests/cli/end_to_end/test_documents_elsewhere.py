"""What the documents of other tools do by default, or spell in their own way, is there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import UsageError
from glassengine.executable.profile_server import request_profile
from glassengine.executable.snapshot import snapshots
from glassengine.testing import models


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    directory = tmp_path_factory.mktemp("u8") / "engine"
    glass.build(root / "examples/tiny-llama", directory, backend="eager")
    return directory


def test_u8_run_has_a_prompt_of_its_own(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(engine), "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and "no prompt is given: 'The value of an expression'" in shown.err
    assert main(["run", str(engine), "--max-new-tokens", "3", "--input-text", "The value of an expression"]) == 0
    given = capsys.readouterr()
    assert given.out == shown.out and "no prompt" not in given.err


@pytest.mark.parametrize("flag", ["--storage-type", "--storage_type", "--dtype"])
def test_u8_storage_type_is_a_dtype(flag: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(root / "examples/tiny-llama"), flag, "bf16", "--backend", "eager", "--dry-run"]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_u8_a_recorded_script_has_a_graph_beside_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())\nnet(torch.ones(2, 3))\n"
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["record", "-o", str(tmp_path / "recorded"), "--overwrite", "--", "script.py"]) == 0
    (graph,) = [path for path in (tmp_path / "artifacts").rglob("graph.txt") if "earlier" not in str(path)]
    assert "0 : float32[2, 4]\n" in graph.read_text() and (graph.parent / "step0.pt").is_file()


@pytest.mark.parametrize("address", ["http://localhost:9", "http://127.0.0.1:9/", "localhost:9"])
def test_u8_a_server_is_named_by_its_url(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        request_profile(address)
    assert "not the address" not in str(caught.value)


@pytest.mark.parametrize("address", ["https://localhost:9", "http://example.com:9", "http://localhost:9/x", "ftp:9"])
def test_u8_other_addresses_are_none(address: str) -> None:
    with pytest.raises(UsageError, match="not the address of a profile server"):
        request_profile(address)


def test_u8_the_warning_names_lazy_tensors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_snapshots --xla_dump_to=./dump")
    monkeypatch.setattr(snapshots, "_saw_execution", False)
    with caplog.at_level(logging.WARNING, logger="glassengine"):
        snapshots.warn_without_executions()
    assert "on lazy tensors" in caplog.text and "XLA_FLAGS" in caplog.text


def test_u8_a_replay_without_outputs_names_what_judges_it(tmp_path: Path) -> None:
    model = torch.compile(torch.nn.Linear(2, 3), backend="glass", options={"backend": "eager"})
    with glass.snapshots.take(tmp_path, contents="inputs") as taking, torch.no_grad():
        model(torch.ones(1, 2))
    (snapshot,) = taking.written
    assert "--compare" in glass.replay(snapshot).notes[-1]
    judged = glass.replay(snapshot, compare=True)
    assert judged.ok and not any("--compare" in note for note in judged.notes)


def test_u8_taps_of_a_language_model_without_inputs() -> None:
    model = models.llama(num_hidden_layers=1)
    tapped = model.model.layers[0].mlp  # type: ignore[union-attr, index]
    plain = type(tapped).forward
    tapped.forward = lambda hidden: glass.tap("inter", plain(tapped, hidden))  # type: ignore[method-assign, union-attr]
    assert [name for name, _ in glass.compat.named_network_outputs(model)] == ["model.layers.0.mlp.inter"]
