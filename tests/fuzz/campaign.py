"""Fuzz every kind of input for a while: `make fuzz`, or

    FUZZ_SECONDS=3600 FUZZ_KINDS="engine snapshot" FUZZ_SEED=1 FUZZ_KEEP=fuzz python tests/fuzz/campaign.py

Prints a table: inputs, seconds and exits by status of each kind, then findings, one of each kind and place. What was
found is kept in `FUZZ_KEEP`: one JSON document each, which `python tests/fuzz/campaign.py FILE...` tries again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from edits import Edit, Maker, apply

HERE = Path(__file__).parent
BATCH = 20


@dataclass
class Input:
    """One changed folder and what reads it: everything that is needed to see it again."""

    kind: str
    line: int
    edits: list[Edit]
    problem: str = ""
    why: str = ""

    def to_json(self) -> str:
        return json.dumps(vars(self), ensure_ascii=True)


class Bench:
    """The folders as they should be, a worker that reads, and the answers of what was not changed.

    Args:
        folder: Where everything is; what was made there before is used again.
        names: The kinds to make.
        more: Kinds that are in no table.
    """

    def __init__(self, folder: Path, names: Sequence[str], more: dict[str, Any] | None = None) -> None:
        import kinds

        self.kinds = {name: kinds.KINDS[name] for name in names} | (more or {})
        self.folder = folder
        self.shared = folder / "shared"
        self._lines: dict[str, list[list[str]]] = {}
        self._make(kinds)
        self.files = {name: kind.files(folder / "kinds" / name) for name, kind in self.kinds.items()}
        self._worker: Any = None
        self._start()
        self.expected: dict[tuple[str, int], dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        unchanged = [Input(name, line, []) for name, kind in self.kinds.items() for line in range(len(kind.lines))]
        for each, answer in zip(unchanged, self.tried(unchanged), strict=True):
            self.expected[each.kind, each.line] = answer
            if answer["problem"] or answer["status"] != 0:
                self.broken[each.kind] = f"{each.kind} as it should be: {answer}"
        for name in self.broken:
            self.kinds.pop(name, None)

    def _make(self, kinds: Any) -> None:
        if not self.shared.is_dir():
            new = self.folder / "shared.new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            kinds.make_shared(new)
            talk = [{"role": "user", "content": "hello"}]
            (new / "chat.json").write_text(json.dumps(talk))
            new.rename(self.shared)
        for name, kind in self.kinds.items():
            target = self.folder / "kinds" / name
            if not target.is_dir():
                shutil.rmtree(target.with_suffix(".new"), ignore_errors=True)
                target.with_suffix(".new").mkdir(parents=True)
                kind.make(target.with_suffix(".new"), self.shared)
                target.with_suffix(".new").rename(target)

    def _start(self) -> None:
        self._temporary = self.folder / "temporary"
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), "HF_HUB_OFFLINE": "1"}
        environment |= {"GLASS_CACHE_DIR": str(self._temporary / "cache"), "CI": "true"}
        self._worker = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(self.shared)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        warm = [
            self._task(Input(name, line, []), self._laid_out(Input(name, line, [])))
            for name, kind in self.kinds.items()
            for line in range(len(kind.lines))
        ]
        self._send({"warm": warm})
        self._receive()
        for task in warm:
            self._remove(Path(task["folder"]).parent)

    def close(self) -> None:
        self._worker.stdin.close()
        self._worker.wait()
        self._worker.stdout.close()

    def _send(self, message: Any) -> None:
        self._worker.stdin.write(json.dumps(message) + "\n")
        self._worker.stdin.flush()

    def _receive(self) -> Any:
        text = self._worker.stdout.readline()
        if not text:
            raise AssertionError("the worker is gone")
        return json.loads(text)

    def _laid_out(self, given: Input) -> Path:
        """Write the changed folder and return it."""
        around = Path(tempfile.mkdtemp(prefix="case-", dir=self.folder))
        (around / "inside").mkdir()
        inside = around / "inside"
        shutil.copytree(self.folder / "kinds" / given.kind, inside, dirs_exist_ok=True)
        (inside / ".made").touch()
        apply(inside, given.edits)
        return inside

    def _task(self, given: Input, folder: Path) -> dict[str, Any]:
        kind = self.kinds[given.kind]
        words = kind.lines[given.line].split()
        line = [word.format(here=folder, shared=self.shared) for word in words]
        return {"folder": str(folder), "line": line, "code": kind.code}

    def tried(self, inputs: Sequence[Input]) -> list[dict[str, Any]]:
        """Return the answer to each input, its problem judged."""
        folders = [self._laid_out(each) for each in inputs]
        self._send({"tasks": [self._task(*pair) for pair in zip(inputs, folders, strict=True)]})
        answers = [self._receive() for _ in inputs]
        for each, folder, answer in zip(inputs, folders, answers, strict=True):
            answer["output"] = answer["output"].replace(str(folder.parent), "")
            if not answer["problem"] and answer["status"] == 0 and each.edits:
                answer["problem"] = self._silent(each, folder, answer)
            self._remove(folder.parent)
        return answers

    def _silent(self, given: Input, folder: Path, answer: dict[str, Any]) -> str:
        """Return what is wrong with a success: another answer though a checksum covers it, or a link that led out."""
        kind = self.kinds[given.kind]
        places = {edit["file"]: edit["how"] for edit in given.edits if edit["op"] == "fs"}
        read = {file for file, how in places.items() if how in ("link_out", "directory_out")}
        if kind.owned and any((folder / file).is_symlink() or (folder / file).parent.is_symlink() for file in read):
            outside = folder.parent / "outside"
            used = [path for path in outside.rglob("*") if path.is_file() and path.stat().st_atime_ns > _changed(path)]
            if used:
                return f"a link out of the directory was followed: {[path.name for path in used]}"
        if any(edit["op"] == "checksums" for edit in given.edits):
            return ""
        covered = {path.relative_to(folder).as_posix() for glob in kind.proven for path in folder.glob(glob)}
        files = {edit["file"] for edit in given.edits if edit["op"] != "fs"}
        if files and files <= covered and _timeless(answer) != _timeless(self.expected[given.kind, given.line]):
            return f"a wrong value in silence: {sorted(files)}"
        return ""

    def _remove(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if not path.is_symlink() and not path.stat().st_mode & stat.S_IWUSR:
                path.chmod(0o700)
        shutil.rmtree(folder)


def _changed(path: Path) -> int:
    """Return when a file was last read at the earliest for it to have been read by somebody else."""
    return path.stat().st_mtime_ns + 1


_TIMES = re.compile(r"\d+(\.\d+)? (ms|s|us)\b|\"\w*(_s|_ms|time|seconds|seed)\": [\d.e+-]+|case-\w+")


def _timeless(answer: dict[str, Any]) -> str:
    return _TIMES.sub("", answer["output"])


def signature(problem: str) -> str:
    """Return what two findings of the same cause have in common: the kind of the problem and the innermost places."""
    lines = problem.strip().splitlines()
    places = re.findall(r'File "[^"]*?(glassengine/[\w/]+\.py|tests/fuzz/\w+\.py)", line \d+, in (\w+)', problem)
    if not places:
        return re.sub(r"\d+|'[^']*'|/\S+", "", lines[0])[:160]
    error = lines[-1].split(":")[0] if len(lines) > 1 else ""
    return f"{lines[0]} | {error} | " + " < ".join(f"{file}:{name}" for file, name in places[::-1][:2])


@dataclass
class Tally:
    """What happened to the inputs of one kind."""

    inputs: int = 0
    seconds: float = 0.0
    exits: Counter[str] = field(default_factory=Counter)


class Campaign:
    """Makes inputs up, has them read, and keeps one finding of each kind and place."""

    def __init__(self, bench: Bench, seed: int, keep: Path | None) -> None:
        self.bench = bench
        self._chance = random.Random(seed)
        self._maker = Maker(self._chance)
        self._keep = keep
        self.tallies = {name: Tally() for name in bench.kinds}
        self.findings: dict[str, tuple[Input, int]] = {}

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        names = list(self.bench.kinds)
        turn = 0
        while time.monotonic() < end:
            self.one_batch(names[turn % len(names)], BATCH)
            turn += 1

    def one_batch(self, name: str, size: int) -> None:
        kind = self.bench.kinds[name]
        folder = self.bench.folder / "kinds" / name
        inputs = [
            Input(
                name,
                self._chance.randrange(len(kind.lines)),
                self._maker.edits(folder, self.bench.files[name], places=kind.places),
            )
            for _ in range(size)
        ]
        began = time.monotonic()
        answers = self.bench.tried(inputs)
        tally = self.tallies[name]
        tally.seconds += time.monotonic() - began
        tally.inputs += size
        for each, answer in zip(inputs, answers, strict=True):
            tally.exits[str(answer["status"])] += 1
            if answer["problem"]:
                self._found(each, answer["problem"])

    def _found(self, given: Input, problem: str) -> None:
        mark = f"{given.kind}: {signature(problem)}"
        known = self.findings.get(mark)
        self.findings[mark] = (given, 1) if known is None else (known[0], known[1] + 1)
        if known is not None:
            return
        given = self._smaller(given, problem)
        self.findings[mark] = (given, 1)
        if self._keep is not None:
            say(f"\n{mark}\n{given.to_json()[:1500]}\n{problem[-1500:]}")
            self._keep.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(mark.encode()).hexdigest()[:10]
            (self._keep / f"{given.kind}-{name}.json").write_text(given.to_json() + "\n")

    def _smaller(self, given: Input, problem: str) -> Input:
        """Return the input without the edits that the finding does not need."""
        edits = list(given.edits)
        found = problem
        for edit in list(edits):
            rest = [other for other in edits if other is not edit]
            if not rest:
                continue
            (answer,) = self.bench.tried([Input(given.kind, given.line, rest)])
            if signature(answer["problem"]) == signature(problem) if answer["problem"] else False:
                edits, found = rest, answer["problem"]
        return Input(given.kind, given.line, edits, found)

    def table(self) -> str:
        rows = [f"{'kind':24}{'inputs':>8}{'seconds':>9}  exits by status"]
        for name, tally in self.tallies.items():
            exits = "  ".join(f"{status}: {count}" for status, count in sorted(tally.exits.items()))
            rows.append(f"{name:24}{tally.inputs:8}{tally.seconds:9.0f}  {exits}")
        together: Counter[str] = sum((tally.exits for tally in self.tallies.values()), Counter())
        exits = "  ".join(f"{status}: {count}" for status, count in sorted(together.items()))
        inputs = sum(tally.inputs for tally in self.tallies.values())
        rows.append(f"{'all':24}{inputs:8}{sum(t.seconds for t in self.tallies.values()):9.0f}  {exits}")
        return "\n".join(rows)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    import kinds

    folder = Path(os.environ.get("FUZZ_FOLDER") or tempfile.mkdtemp(prefix="fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:]:
        return _again(folder, [Path(name) for name in sys.argv[1:]])
    names = os.environ.get("FUZZ_KINDS", "").split() or list(kinds.KINDS)
    seconds = float(os.environ.get("FUZZ_SECONDS", "3600"))
    seed = int(os.environ.get("FUZZ_SEED") or int.from_bytes(os.urandom(4)))
    campaign = Campaign(Bench(folder, names), seed, Path(os.environ.get("FUZZ_KEEP", "fuzz-findings")))
    with contextlib.suppress(KeyboardInterrupt):
        campaign.run(seconds)
    say(campaign.table())
    for text in campaign.bench.broken.values():
        say(text)
    say(f"seed {seed}, {len(campaign.findings)} findings")
    for mark, (_, count) in campaign.findings.items():
        say(f"{count} x {mark}")
    return int(bool(campaign.findings or campaign.bench.broken))


def _again(folder: Path, files: list[Path]) -> int:
    inputs = [Input(**json.loads(path.read_text())) for path in files]
    bench = Bench(folder, list(dict.fromkeys(each.kind for each in inputs)))
    problems = 0
    for path, answer in zip(files, bench.tried(inputs), strict=True):
        problems += bool(answer["problem"])
        say(f"{path}: {answer['status']} {answer['seconds']} s\n{answer['problem']}{answer.get('error', '')}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
