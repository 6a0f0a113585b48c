"""What a reader may not do is found out: every kind of problem is planted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import children

sys.path.insert(0, str(Path(__file__).parent))

import campaign
import kinds

# Reader -> how its problem begins.
PLANTED = {
    "bug": "a bug: exit status 70",
    "crash": "a crash: signal 11",
    "memory": "memory: ",
    "too_much_memory": "a bug: exit status 70",
    "slow": "slow: more than 2 s; Ctrl-C ended it",
    "hang": "a hang: Ctrl-C did not end it",
    "program": "code: subprocess.Popen",
    "python": "code: ",
    "outside": "a file outside: ",
    "controls": "a text: '\\x1b'",
    "left": "a bug: it left",
    "well": "",
}


def test_planted_problems_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_MAX_SECONDS", "2")
    monkeypatch.setattr(kinds, "make_shared", lambda folder: None)
    kind = kinds.Kind(lambda here, shared: (here / "a.json").write_text("{}"), ("[well]",))
    bench = campaign.Bench(tmp_path, (), {"planted": kind}, start=children.Popen)
    planted = {"planted": kinds.Kind(kind.make, tuple(f"[{name}]" for name in PLANTED))}
    monkeypatch.setattr(bench, "kinds", planted)
    answers = bench.tried([campaign.Input("planted", line, []) for line in range(len(PLANTED))])
    bench.close()
    found = {name: answer["problem"].splitlines()[:1] for name, answer in zip(PLANTED, answers, strict=True)}
    assert all((lines[0] if lines else "").startswith(PLANTED[name]) for name, lines in found.items()), found
    assert not found["well"] and found["crash"]
