from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import glassengine
from glassengine import commands, environment
from glassengine.cli.main import main
from glassengine.executable.cache_store import CacheManifest, Store, digest, surroundings


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
    assert set(found["caches"]) == {"huggingface", "inductor", "glassengine"}


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
    assert "return before the device has finished" in shown and f"\n{name} " not in shown
    for part in (f"{name}=1", "glass run --synchronous", "dtypes and sizes an engine was built for", "on its device"):
        assert part in shown
    monkeypatch.setenv(name, "1")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "wait for the device" in shown and f"\n{name} " in shown
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two graphs, one of them used once."""
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "5000")
    store = Store(tmp_path / "cache")
    source = tmp_path / "source"
    source.mkdir()
    (source / "code.so").write_bytes(b"x" * 2000)
    for index, cause in enumerate(
        ("nothing is stored yet", "inputs.0: float32[2, 3] -> float32[4, 3] (nearest: mm 0a)")
    ):
        parts = {**surroundings(), "inputs": {"0": f"float32[{2 + 2 * index}, 3]"}}
        about = {"name": "aten.mm.default", "graph_hash": "abc", "cause": cause, "compile_s": 1.25}
        store.put(CacheManifest(key=digest(parts), parts=parts, **about), source)
    (tmp_path / "taken").mkdir()
    assert store.fetch(digest(parts), tmp_path / "taken")
    return tmp_path / "cache"


def test_cache_on_the_screen(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{cache}: 2 entries, 3.9 KiB, at most 4.9 KiB"
    assert lines[3].split()[:3] == ["key", "name", "hits"] and lines[3].endswith("why it was compiled")
    by_hits = {line.split()[2]: line for line in lines[4:6]}
    assert by_hits["1"].endswith("2.0 KiB     1.2 s  inputs.0: float32[2, 3] -> float32[4, 3] (nearest: mm 0a)")
    assert by_hits["0"].endswith("nothing is stored yet")


def test_cache_as_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["ok"], found["max_bytes"], found["num_bytes"]) == (1, True, 5000, 4000)
    assert found["directory"] == str(cache)
    assert sorted(entry["num_hits"] for entry in found["entries"]) == [0, 1]
    assert {entry["parts"]["inputs"]["0"] for entry in found["entries"]} == {"float32[2, 3]", "float32[4, 3]"}


def test_cache_from_elsewhere_and_damaged(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset({"abacus"}))
    first, _ = sorted(cache.iterdir())
    (first / "manifest.json").write_text("{}")
    assert main(["doctor", "--cache"]) == 1
    shown = capsys.readouterr().out
    assert "built elsewhere, and recompiled here on use: 1" in shown and "processor.flags: " in shown
    assert "+abacus" in shown
    assert f"damaged, compiled again when wanted: {first.name[:8]}" in shown


def test_cache_that_is_not_there_or_not_ours(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.chmod(0o777)
    assert main(["doctor", "--cache"]) == 1
    assert "others can write to it" in capsys.readouterr().out
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "0")
    assert main(["doctor", "--cache"]) == 0
    assert "0 entries, 0 B, turned off: GLASS_CACHE_MAX_BYTES=0" in capsys.readouterr().out
    assert not (tmp_path / "nowhere").exists()
    monkeypatch.setenv("GLASS_CACHE_MAX_BYTES", "much")
    assert main(["doctor", "--cache"]) == 2


def test_calibration_shows_what_is_more_than_rounding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"backend": "some", "version": "1", "instruction_set": "avx2"}
    errors = {"float32": {"sigmoid": [1.2e-7, 0.0, 1e-8, 0.0, 0.0], "exp": [0.0, 0.0, 1e-8, 0.0, 0.0]}}
    monkeypatch.setitem(vars(commands), "calibrate", lambda: [{**entry, "errors": errors}])
    assert main(["doctor", "--calibrate"]) == 0
    shown = capsys.readouterr().out
    assert "2 kernels measured, 1 as accurate as rounding" in shown
    assert "sigmoid" in shown and "exp " not in shown
    assert main(["doctor", "--calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["errors"] == errors
