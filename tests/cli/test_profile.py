"""`glass run --profile` and `glass profile`: where the time went, by site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine.cli.main import main


@pytest.fixture(scope="module")
def profiles(engine_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profiles")
    for _ in range(2):
        arguments = ["run", str(engine_directory), "--input-text", "a", "--max-new-tokens", "3"]
        assert main([*arguments, "--profile", str(directory)]) == 0
    return directory


def test_the_time_of_a_generation_by_module(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(profiles), "--rows", "200"]) == 0
    text = capsys.readouterr().out
    assert "profile-000002: 3 steps" in text and "before, profile-000001: 3 steps" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    for path in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn", "lm_head"):
        assert float(lines[path][1]) > 0, "time was spent in it"
    assert "model.layers.0.mlp.down_proj/linear.0" in lines, "an op of the flame table"
    (execute,) = [line for line in text.splitlines() if line.strip().startswith("execute ")]
    assert execute.split()[1] == "3"


def test_the_same_as_json(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(profiles / "profile-000001"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 2 and found["num_steps"] == 3 and found["against"] is None
    assert found["kinds"]["execute"]["count"] == 3 and found["environment"]["versions"]["torch"]
    assert main(["profile", str(profiles / "profile-000001"), "--against", str(profiles), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["num_steps"] == 3


def test_rows_left_out_are_counted(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(profiles), "--rows", "3"]) == 0
    text = capsys.readouterr().out
    assert "faster modules are not shown" in text and "shorter spans are not shown" in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: "{", "damaged"),
        (lambda data: json.dumps([data]), "damaged"),
        (lambda data: json.dumps({**data, "format": "other"}), "damaged"),
        (lambda data: json.dumps({**data, "schema_version": 99}), "newer version"),
        (lambda data: json.dumps({**data, "flame": {"x": {"count": 1}}}), "damaged"),
        (lambda data: json.dumps({**data, "paths": ["x"]}), "damaged"),
        (lambda data: "[" * 100_000, "damaged"),
    ],
)
def test_hostile_profiles(
    profiles: Path, tmp_path: Path, damage: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((profiles / "profile-000001" / "profile.json").read_text())
    (tmp_path / "profile.json").write_text(damage(data))
    assert main(["profile", str(tmp_path)]) == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no profile is named"),
        (["."], "no profile found"),
        ([".", "--steps", "3"], "--steps goes with --capture"),
        ([".", "--capture", "localhost:1"], "chooses the directory"),
        (["--capture", "localhost:1"], "no profile server of this user answers"),
    ],
)
def test_mistaken_command_lines(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_capture_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(tmp_path / "config"))
    server = glass.profiler.start_server(0, directory=tmp_path)
    import threading

    from glassengine import spans

    over = threading.Event()

    def steps() -> None:
        while not over.wait(0.002):
            spans.step_ended()

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        assert main(["profile", "--capture", f"localhost:{server.port}", "--steps", "2"]) == 0
    finally:
        over.set()
        thread.join()
        server.stop()
    assert "profile-000001: " in capsys.readouterr().out
