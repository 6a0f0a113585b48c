"""Every command takes URLs where it takes paths, and writes to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.stores import objects
from glassengine.stores.places import place

NET = """
import torch
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
def inputs():
    return {"input": torch.ones(2, 4)}
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setenv("GLASS_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("net.py").write_text(NET)


def document(url: str) -> dict[str, object]:
    return json.loads(objects.read(url, 0, objects.require(url).size))


def test_an_engine_that_is_built_run_and_checked_in_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    build = ["build", "net.py:model", "-o", "memory://e/net", "--inputs", "net.py:inputs", "--backend", "eager"]
    assert main([*build, "--artifacts", "memory://e/art"]) == 0
    assert (place("memory://e/net") / "engine.json").is_file() and (place("memory://e/art") / "index.html").is_file()
    assert main(build) == 2 and "exists already" in capsys.readouterr().err
    assert main(["sites", "memory://e/net", "-q"]) == 0
    inputs = ["--inputs", "memory://e/inputs.pt", "-q"]
    torch.save({"input": torch.ones(2, 4)}, "inputs.pt")
    objects.put(Path("inputs.pt"), "memory://e/inputs.pt")
    assert main(["run", "memory://e/net", *inputs, "--record", "memory://r/run", "--json=memory://r/run.json"]) == 0
    assert "outputs" in str(document("memory://r/run.json")) and glass.Recording.open("memory://r/run").complete
    assert main(["compare", "memory://e/art", "memory://e/art", "-q"]) == 0
    check = ["check", "net.py:model", "--inputs", "net.py:inputs", "-q"]
    assert main([*check, "--candidate", "memory://e/net"]) == 0
    # A wrong weight: what was written says so, and can be looked at there.
    Path("bad.py").write_text(NET.replace("manual_seed(0)", "manual_seed(1)"))
    bad = ["--candidate", "bad.py:model", "--reproduction", "memory://r/rep", "--json=memory://r/check.json"]
    assert main([*check, *bad]) == 1 and document("memory://r/check.json")["ok"] is False
    assert not list(Path().glob("*:*"))


def test_recordings_and_dumps(capsys: pytest.CaptureFixture[str]) -> None:
    record = ["record", "net.py:model", "--inputs", "net.py:inputs", "-q"]
    assert main([*record, "-o", "memory://r/a", "--noise-floor"]) == 0
    assert main([*record, "-o", "memory://r/a"]) == 2 and "exists already" in capsys.readouterr().err
    assert main([*record, "-o", "memory://r/b", "--spool", "1G", "--when-behind", "cut"]) == 0
    assert main(["show", "memory://r/a", "-q"]) == main(["sites", "memory://r/a", "-q"]) == 0
    assert "relu" not in capsys.readouterr().err
    assert main(["compare", "memory://r/a", "memory://r/b", "-q", "--json=memory://x/compare.json"]) == 0
    assert document("memory://x/compare.json")["ok"] is True
    assert "calibrated by the floor of memory://r/a" in capsys.readouterr().out
    for target, kind in (("memory://x/d", "pt"), ("memory://x/one.npz", "npz"), ("memory://x/tree", "debug-tree")):
        assert main(["show", "memory://r/a", "--export", target, "--export-format", kind, "-q"]) == 0
        assert main(["compare", "memory://r/a", target, "-q"]) in ((0, 4) if kind == "debug-tree" else (0,))
    assert main(["show", "memory://r/a", "--export", "memory://x/one.npz", "-q"]) == 2
    check = ["check", "net.py:model", "--inputs", "net.py:inputs", "-q", "--candidate", "memory://r/b"]
    assert main(check) == 0
    Path("script.py").write_text(f"{NET}\nmodel()(**inputs())\n")
    assert main(["record", "-o", "memory://r/script", "script.py"]) == 0
    assert "glass show memory://r/script/Sequential" in capsys.readouterr().err
    assert main(["compare", "memory://r/script", "memory://r/b", "-q"]) == 0


def test_profiles_and_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for number in (1, 2):
        with glass.profiler.profile("memory://p") as profile:
            net(torch.ones(2, 4))
        assert str(profile.directory) == f"memory://p/profile-{number:06d}"
    assert main(["profile", "memory://p"]) == 0 and "before, profile-000001" in capsys.readouterr().out
    assert main(["build", "net.py:model", "-o", "net", "--inputs", "net.py:inputs", "--backend", "eager"]) == 0
    assert main(["run", "net", "--inputs", "net.py:inputs", "--snapshot", "snaps", "-q"]) == 0
    (taken,) = (path for path in Path("snaps").iterdir() if (path / "meta.json").exists())
    assert main(["snapshot", "pack", str(taken), "-o", "memory://s/packed.safetensors"]) == 0
    for command in (["snapshot", "show"], ["replay"]):
        assert main([*command, "memory://s/packed.safetensors", "-q"]) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["show", "hdfs://host/x"],
        ["compare", "https://host/a", "b"],
        ["record", "-o", "hdfs://host/x", "net.py:model", "--inputs", "net.py:inputs"],
        ["build", "net.py:model", "-o", "ftp://host/x"],
        ["show", "memory://none"],
        ["compare", "memory://none", "memory://none"],
        ["check", "net.py:model", "--json=memory://../x"],
    ],
)
def test_what_is_no_place(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "://" in capsys.readouterr().err and not list(Path().glob("*:*"))
