"""Send Ctrl-C to commands that read odd inputs, at random moments, and measure how long they take to end.

    python tests/fuzz/interrupts.py SECONDS [SEED]

Each command is a process of its own: `python -m glassengine` with the arguments that a shell would give it, bytes that
are no text among them. What is counted is its own processor time after the signal, beside the clock's: other programs
run on this machine. It must end within a second, print one JSON document to stdout under `--json` and nothing else,
and never a traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import kinds
from edits import Maker
from layout import Template, remove

ALLOWED_SECONDS = 1.0
"""Of processor time, from the signal to the end."""
LONGEST = 240.0
WORDS = (
    b"\xff\xfe", "\u202e".encode(), b"--json", b"-", b"--", b"", b"99999999999999999999", b"-1", b"nan", b"1e999",
    b"--seed=1e9", b"--step", b"--rank", b"re:(", b"a" * 100_000, "\U0001f600".encode(), b"\x1b[2J", b"--help", b"-vv",
    b"--no-such", b"--max-new-tokens", b"--rtol", b"../../x", b"/dev/zero", b"@/etc/passwd", b"*" * 500, b"[" * 3000,
)  # fmt: skip


def used(process: int) -> float:
    """Return the processor time of a process, in seconds."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def run(line: list[bytes], folder: Path, after: float | None) -> dict[str, Any]:
    """Run a command; after so many seconds of its processor time, interrupt it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GLASS_CACHE_DIR": str(folder / "cache"), "CI": "true"}
    environment |= {"TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    command = [os.fsencode(sys.executable), b"-m", b"glassengine", *line]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        began = time.monotonic()
        child = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=folder, env=environment)
        before, at = 0.0, 0.0
        while after is not None and not _has_ended(child.pid) and used(child.pid) < after:
            time.sleep(0.005)
        if after is not None and not _has_ended(child.pid):
            before, at = used(child.pid), time.monotonic()
            child.send_signal(signal.SIGINT)
        was_there = at > 0
        end = time.monotonic() + LONGEST
        while not _has_ended(child.pid) and time.monotonic() < end:
            time.sleep(0.005)
        late = not _has_ended(child.pid)
        if late:
            child.kill()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    total = usage.ru_utime + usage.ru_stime
    text, complaints = (folder / "out").read_bytes(), (folder / "err").read_bytes()
    answer = {
        "status": child.returncode,
        "cpu": round(total - before, 2) if was_there else 0.0,
        "wall": round(time.monotonic() - at, 2) if was_there else 0.0,
        "took": round(time.monotonic() - began, 2),
        "interrupted": was_there,
        "memory": usage.ru_maxrss << 10,
        "problem": "a hang" if late else "",
        "error": complaints[-3000:].decode("utf-8", "replace"),
    }
    answer["problem"] = answer["problem"] or _problem(answer, line, text, complaints)
    return answer


def _has_ended(process: int) -> bool:
    """Say whether a child has ended; it stays to be asked what it used."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _problem(answer: dict[str, Any], line: list[bytes], text: bytes, complaints: bytes) -> str:
    if answer["status"] not in (0, 1, 2, 3, 4, 130):
        return f"exit status {answer['status']}"
    if answer["cpu"] > ALLOWED_SECONDS:
        return f"slow: {answer['cpu']} s of processor time after Ctrl-C, {answer['wall']} s of the clock's"
    if b"Traceback (most recent call last)" in complaints:
        return "a traceback"
    wants = [index for index, word in enumerate(line) if word == b"--json"]
    if text and wants and b"--help" not in line and line[wants[0] + 1 : wants[0] + 2] in ([], [b"-"]):
        try:
            json.loads(text)
        except ValueError as error:
            return f"stdout is no JSON: {error}: {text[:200]!r}"
    return ""


def commands() -> list[tuple[str, str]]:
    """Return (kind, command line) of everything that a command reads."""
    quick = {name: kind for name, kind in kinds.KINDS.items() if not kind.slow}
    return [(name, line) for name, kind in quick.items() for line in kind.lines if line[0] != "["]


def campaign(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run commands for a while and return what was counted."""
    chance = random.Random(seed)
    maker = Maker(chance)
    shared = folder / "shared"
    if not shared.is_dir():
        shared.mkdir(parents=True)
        kinds.make_shared(shared)
        (shared / "chat.json").write_text('[{"role": "user", "content": "hello"}]')
    exits: Counter[str] = Counter()
    problems: list[dict[str, Any]] = []
    longest: list[tuple[float, float, str]] = []
    interrupted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name, words = chance.choice(commands())
        kind = kinds.KINDS[name]
        made = folder / "kinds" / name
        if not made.is_dir():
            made.mkdir(parents=True)
            kind.make(made, shared)
        around = Path(tempfile.mkdtemp(dir=folder))
        edits = maker.edits(made, kind.files(made), places=kind.places) if chance.random() < 0.7 else []
        here = Template(made).write(around, edits)
        line = [os.fsencode(word.format(here=here, shared=shared)) for word in words.split()]
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            line.insert(chance.randrange(len(line) + 1), chance.choice(WORDS))
        line = [word.replace(b"\0", b"") for word in line]
        after = chance.choice([None, chance.uniform(0, 0.3), chance.uniform(0, 4)])
        answer = run(line, around, after)
        interrupted += answer["interrupted"]
        exits[str(answer["status"])] += 1
        shown = b" ".join(line).replace(bytes(folder), b"")[:300].decode("utf-8", "backslashreplace")
        if answer["interrupted"]:
            longest = sorted([*longest, (answer["cpu"], answer["wall"], shown)], reverse=True)[:5]
        if answer["problem"]:
            problems.append({"line": shown, "edits": edits, "after": after, **answer})
            sys.stdout.write(json.dumps(problems[-1])[:3000] + "\n")
            sys.stdout.flush()
        remove(around)
    return {"runs": sum(exits.values()), "interrupted": interrupted, "exits": dict(exits), "longest": longest,
            "problems": len(problems)}  # fmt: skip


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4))
    given = os.environ.get("FUZZ_FOLDER")
    folder = Path(given or tempfile.mkdtemp(prefix="interrupts-"))
    try:
        found = campaign(folder, seconds, seed)
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps({"seed": seed, **found}, indent=1) + "\n")
    return int(found["problems"] > 0)


if __name__ == "__main__":
    sys.exit(main())
