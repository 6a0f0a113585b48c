from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

import glassengine
from glassengine import environment
from glassengine.cli.main import main


@dataclass(frozen=True)
class Info:
    name: str
    available: bool
    reason: str | None = None
    install: str | None = None


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two back-ends, one of them missing."""
    infos = [Info("present", True), Info("absent", False, "No module named 'absent'", "pip install absent")]
    # Set without asking for the real one, which would import torch.
    monkeypatch.setitem(vars(glassengine), "list_backends", lambda: infos)


@pytest.mark.usefixtures("backends")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert found["versions"]["torch"] == environment.versions()["torch"]
    assert found["num_cpus"] >= 1 and found["disk_free_bytes"] > 0
    assert [backend["name"] for backend in found["backends"]] == ["present", "absent"]
    assert set(found["caches"]) == {"huggingface", "inductor"}


@pytest.mark.usefixtures("backends")
def test_screen_names_what_is_missing_and_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for part in ("python", "torch", "memory", "disk", "c++", "present", "available"):
        assert part in shown
    assert "missing: No module named 'absent'" in shown and "pip install absent" in shown


@pytest.mark.usefixtures("backends")
def test_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "cpu_flags", frozenset)
    monkeypatch.setattr(environment, "memory_bytes", lambda: (None, None))
    monkeypatch.setattr(environment, "cxx_compiler", lambda: None)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "unknown free of unknown" in shown and "Inductor needs g++" in shown


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("name", ["GLASS_SYNCHRONOUS", "CUDA_LAUNCH_BLOCKING"])
def test_synchronous_mode_and_what_it_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for variable in ("GLASS_SYNCHRONOUS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(variable, raising=False)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "none waits for its device" in shown and f"\n{name} " not in shown
    for part in (f"{name}=1", "glass run --synchronous", "dtypes and sizes an engine was built for", "on its device"):
        assert part in shown
    monkeypatch.setenv(name, "1")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "each waits for its device" in shown and f"\n{name} " in shown
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["synchronous"] is True and found["variables"][name] == "1" and len(found["advice"]) == 2


@pytest.mark.usefixtures("backends")
def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    for arguments in (["doctor"], ["doctor", "--json"]):
        assert main(arguments) == 0
        assert "s3cr3t" not in capsys.readouterr().out


def test_real_back_ends(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("glassengine.backends.registry")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backends"]
    for backend in found["backends"]:
        assert backend["available"] or backend["reason"]
