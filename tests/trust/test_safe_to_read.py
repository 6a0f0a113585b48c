"""Reading files of a hostile hand runs nothing of them: one instrument over all kinds of files and commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from tests import children
from tests.fuzz import kinds
from tests.trust.hostile import MARK, Hand

Answers = list[dict[str, Any]]
WATCH = Path(__file__).parent / "watch.py"


def made(above: Path, fill: Callable[[Path], None]) -> Hand:
    good, folder, own = above / "own" / "good", above / "hostile", above / "own"
    for path in (folder, own / "cwd", own / "tmp", good):
        path.mkdir(parents=True)
    fill(good)
    return Hand(good, folder, own)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    """A hand that has one small engine."""

    def fill(good: Path) -> None:
        torch.save({"x": kinds.X}, good / "x.pt")
        glass.build(kinds.small(), good / "small", backend="eager", inputs={"x": kinds.X})

    return made(tmp_path_factory.mktemp("trust"), fill)


def watched(hand: Hand, lines: list[list[str]], warm: list[list[str]] | None = None) -> Answers:
    """Run command lines in a process that watches what they do, after those of `warm`."""
    own = {name: hand.own / name for name in ("GLASS_CACHE_DIR", "GLASS_CONFIG_DIR", "HF_HOME")}
    environment = {**os.environ, **{name: str(path) for name, path in own.items()}, "TMPDIR": str(hand.own / "tmp")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WATCH), str(hand.folder), str(hand.own)]
    text = "".join(json.dumps(line) + "\n" for line in [warm or [], *lines])
    done = children.run(command, imports=children.MODELS, input=text, env=environment, cwd=hand.own / "cwd")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines), done.stderr
    return answers


def faults(lines: list[list[str]], answers: Answers) -> list[str]:
    return [
        f"{' '.join(line)}: {answer['status']} {found}\n{answer['output']}"
        for line, answer in zip(lines, answers, strict=True)
        for found in (*answer["found"], *(["exit status 70"] if answer["status"] in (70, -1) else []))
    ]


def test_s1_reading_hostile_programs_runs_nothing(hand: Hand) -> None:
    hand.programs()
    warm = [
        ["sites", str(hand.folder / "good.pt2")],
        ["run", str(hand.good / "small"), "--inputs", f"{hand.good}/x.pt"],
    ]
    lines = [*warm, *hand.lines]
    answers = watched(hand, lines, warm)
    assert [answer["status"] for answer in answers[:2]] == [0, 0], answers[:2]
    assert {answer["status"] for answer in answers[2:]} <= {0, 4}
    assert not faults(lines, answers), "\n".join(faults(lines, answers))
    assert not list(hand.folder.rglob(f"{MARK}*"))


@pytest.mark.slow
def test_s1_judging_hostile_candidates_runs_nothing(hand: Hand) -> None:
    hand.lines.clear()
    hand.candidates()
    own = [
        "check",
        f"{hand.own}/net.py:net",
        "--candidate",
        f"{hand.own}/net.py:net",
        "--inputs",
        f"{hand.own}/input.pt",
    ]
    judged = ("script.pt", "module.pt", "compiled.pt2")
    lines = [own, *(line for line in hand.lines if line[0] == "check" and Path(line[3]).name in judged)]
    assert len(lines) == 4
    answers = watched(hand, lines, [own])
    assert answers[0]["status"] == 0, answers[0]
    assert {answer["status"] for answer in answers[1:]} <= {2, 4}
    assert not faults(lines, answers), "\n".join(faults(lines, answers))
    assert not list(hand.folder.rglob(f"{MARK}*"))


@pytest.mark.slow
def test_s1_reading_hostile_files_of_every_kind_runs_nothing(tmp_path: Path) -> None:
    hand = made(tmp_path, kinds.make_shared)
    lines = hand.everything()
    good, inputs = str(hand.good), f"{hand.own}/input.pt"
    well = [
        ["run", f"{good}/small", "--inputs", f"{good}/x.pt"],
        ["run", f"{good}/language", "--input-text", "a", "--max-new-tokens", "1"],
        ["show", f"{good}/record-a"],
        ["compare", f"{good}/record-a", f"{good}/record-b"],
        *(["run", f"{good}/{name}", "--inputs", inputs] for name in ("onnxruntime", "openvino")),
        ["sites", f"{hand.folder}/good.pt2"],
    ]
    answers = watched(hand, [*well, *lines], well)
    # The same watch finds nothing in what is right, and that works.
    assert [answer["status"] for answer in answers[: len(well)]] == [0] * len(well), answers[: len(well)]
    assert not faults([*well, *lines], answers), "\n".join(faults([*well, *lines], answers))
    assert not list(hand.folder.rglob(f"{MARK}*"))


MISDEEDS = {
    "program": "program: subprocess.Popen", "shell": "program: os.system", "library": "library: ctypes.dlopen",
    "library_of_operators": "is mapped as code", "source": "code: exec", "file_of_source": "code: exec",
    "module": "code: exec", "file": "written: open", "file_of_torch": "a file:", "link": "changed: os.symlink",
    "move": "changed: os.rename", "network": "network: socket.connect", "unpickled": "pickle: pickle.find_class",
    "secret": "opened: open",
}  # fmt: skip


def test_what_reading_may_not_do_is_seen(hand: Hand) -> None:
    *answers, well = watched(hand, [[name] for name in (*MISDEEDS, "well")])
    for name, answer in zip(MISDEEDS, answers, strict=True):
        assert any(MISDEEDS[name] in found for found in answer["found"]), (name, answer)
        (hand.folder / MARK).unlink(missing_ok=True)
    assert well["found"] == [] and well["status"] == 0
