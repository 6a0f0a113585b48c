"""Fail the n-th system call of everything that is written, for n = 1, 2, ... until there is no such call.

    python tests/faults/walk.py [--most N] [--kind KIND] [--table FILE] [SCENE...]        `make faults`

A library for LD_PRELOAD, `shim.c`, fails the calls; it is compiled here. Only those on files below the folder that is
written count. Each try is a child of its own. Prints, for every scene and kind of fault, the calls after which it
was injected, how the program ended, and what was left on disk; then what may not be. Exit status 1 where there is that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from walker import FAULTS, Try, Walker, told

HERE = Path(__file__).parent


def compiled(folder: Path) -> Path | None:
    """Compile the shim with the system's compiler; None where there is none."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    target = folder / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, HERE / "shim.c", "-ldl"], check=True)
    return target


@dataclass
class Row:
    """What came of all tries of one scene with one kind of fault.

    Attributes:
        calls: How many such calls there are.
        tried: Call and file -> after how many of them the fault was injected.
        ends: Exit status -> tries.
        left: Exit status -> what was left, in words -> tries.
        problems: How many tries ended or left what may not be.
    """

    calls: int
    tried: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    left: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    problems: int = 0

    @property
    def tries(self) -> int:
        """How many tries there were."""
        return self.ends.total()

    def add(self, found: Try) -> None:
        """Add a try in which a call failed."""
        assert found.failed is not None
        call, path = found.failed
        self.tried[f"{call} {path}".strip() if call != "clock" else call] += 1
        self.ends[found.ended] += 1
        self.left[found.ended][_told(found)] += 1
        self.problems += bool(found.problem)

    def lines(self, scene: str, kind: str) -> list[str]:
        """Return what the table says."""
        ends = ", ".join(f"exit {status}: {count}" for status, count in sorted(self.ends.items()))
        lines = [f"{scene:18} {kind:16} {self.tries:4} of {self.calls:4} calls   {ends}   problems: {self.problems}"]
        lines += _wrapped(f"    after  {_counted(self.tried)}")
        for status, left in sorted(self.left.items()):
            lines += _wrapped(f"    exit {status} left  {_counted(left)}")
        return lines


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 120, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)


def _told(found: Try) -> str:
    names = Counter(map(told, found.left))
    kept = f" (kept: {', '.join(sorted(set(map(told, found.kept))))})" if found.kept else ""
    if len(names) > 4:
        return f"{len(found.left)} files{kept}"
    return (", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items()) or "nothing") + kept


def _counted(counter: Counter[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in counter.most_common())


def walk(walker: Walker, name: str, kind: str, most: int, seen: dict[str, list[str]]) -> Row:
    """Try a scene with a fault at every call, or at every n-th where there are more than `most`."""
    row = Row(len(walker.once(name, kind, 0).called))
    every = max(1, -(-row.calls // most))
    # Threads call now more, now less often.
    for at in range(1, row.calls + 1, every):
        found = walker.once(name, kind, at)
        if found.failed is None:
            continue
        row.add(found)
        if found.problem:
            lines = found.problem.strip().splitlines()
            mark = re.sub(r"written-\w+|\d{3,}", "#", f"{name}: {lines[0][:200]} | {lines[-1][:200]}")
            seen.setdefault(mark, []).append(f"{kind} at {at}: {' '.join(found.failed)}\n{found.problem}")
    return row


def _walked(walker: Walker, given: argparse.Namespace) -> int:
    seen: dict[str, list[str]] = {}
    lines: list[str] = []
    rows: list[Row] = []
    began = time.monotonic()

    def say(text: str) -> None:
        lines.append(text)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    for name in given.scene or walker.scenes:
        plain = walker.once(name, "ENOSPC", 0)
        if plain.problem:
            say(f"{name} without a fault: {plain.problem}")
            return 1
        for kind in given.kind or FAULTS:
            row = walk(walker, name, kind, given.most, seen)
            if row.calls:
                rows.append(row)
                for line in row.lines(name, kind):
                    say(line)
    problems = sum(row.problems for row in rows)
    tries, calls = sum(row.tries for row in rows), sum(row.calls for row in rows)
    ends = sum((row.ends for row in rows), Counter())
    say("")
    say(f"{tries} tries at {calls} calls in {time.monotonic() - began:.0f} s: {problems} problems of {len(seen)} kinds")
    say("ends: " + ", ".join(f"exit {status}: {count}" for status, count in sorted(ends.items())))
    if given.table:
        given.table.write_text("\n".join(_HEAD + lines) + "\n")
    for mark, places in seen.items():
        say(f"\n{len(places)} x {mark}\nfirst: {places[0]}")
    return int(problems > 0)


_HEAD = [
    "Each system call of what is written, failed in turn: `make faults`.",
    "A line for each scene and kind of fault: in how many tries it was injected, of how many calls the scene makes of",
    "those that this kind is for, and how the program ended (0 well; 2, 3, 4 an error that says what failed). Then the",
    "calls and their files (# for numbers), and what was on disk afterwards. What is kept on purpose is named.",
    "After an end that is not 0 the same was done once more without a fault, and had to end well.",
    "",
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=1 << 30, help="tries of each scene and kind")
    parser.add_argument("--kind", action="append", choices=list(FAULTS))
    parser.add_argument("--table", type=Path)
    parser.add_argument("scene", nargs="*")
    given = parser.parse_args()
    if "GLASS_FAULTS" in os.environ:
        return _walked(Walker(Path(os.environ["GLASS_FAULTS"])), given)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        shim = compiled(Path(name))
        if shim is None:
            sys.stdout.write("skipped: there is no C compiler, or no LD_PRELOAD\n")
            return 0
        more = {"LD_PRELOAD": str(shim), "GLASS_FAULTS": name, "OMP_NUM_THREADS": "1", "CI": "1"}
        return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | more, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
