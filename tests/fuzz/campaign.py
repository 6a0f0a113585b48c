"""Fuzz every kind of input for a while: `make fuzz`, or

    FUZZ_SECONDS=3600 FUZZ_KINDS="engine snapshot" FUZZ_SEED=1 FUZZ_KEEP=fuzz python tests/fuzz/campaign.py

Input n of a kind follows from the seed, the kind and n. What was tried is in `FUZZ_KEEP/state.json`, by the code that
it was tried on, and a campaign with the same seed goes on where the last one ended. `FUZZ_TABLE` is a file for the
table: inputs, seconds and exits by status of each kind. What was found is kept, too, one input of each kind and place:
one JSON document each, which `python tests/fuzz/campaign.py FILE...` tries again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import direct_kinds
import kinds
from layout import Input, Template, remove, silent
from stream import given

HERE = Path(__file__).parent
BATCH = 20
TURN_SECONDS = float(os.environ.get("FUZZ_TURN_SECONDS", "6"))
"""For a kind whose share is one, at a time."""
_MEMORY = Path("/dev/shm")  # files that nobody keeps


class Bench:
    """The folders as they should be, a worker that reads, and the answers of what was not changed.

    Args:
        folder: Where everything is; what was made there before is used again.
        names: The kinds to make.
        more: Kinds that are in no table.
        ready: Whether everything is read once as it should be, which also imports what reading needs for all inputs to
            come: worth it for more than some hundred of them.
        start: What starts the worker.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        more: dict[str, Any] | None = None,
        *,
        ready: bool = True,
        start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self.kinds = {name: direct_kinds.ALL[name] for name in names} | (more or {})
        self.folder = folder
        self.shared = folder / "shared"
        self._popen = start
        self._make()
        self.files = {name: kind.files(folder / "kinds" / name) for name, kind in self.kinds.items()}
        self._templates = {name: Template(folder / "kinds" / name) for name in self.kinds}
        self._start()
        self.expected: dict[tuple[str, int], dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        if ready:
            self._warm()
            self._read_all()

    def _read_all(self) -> None:
        unchanged = [Input(name, line, []) for name, kind in self.kinds.items() for line in range(len(kind.lines))]
        for each, answer in zip(unchanged, self.tried(unchanged), strict=True):
            self.expected[each.kind, each.line] = answer
            if answer["problem"] or answer["status"] != 0:
                self.broken[each.kind] = f"{each.kind} as it should be: {answer}"
        for name in self.broken:
            self.kinds.pop(name, None)

    def _make(self) -> None:
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
        self._worker = self._popen(
            [sys.executable, str(HERE / "worker.py"), str(self.shared)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def _warm(self) -> None:
        warm = [
            self._task(Input(name, line, []), self._laid_out(Input(name, line, [])))
            for name, kind in self.kinds.items()
            for line in range(len(kind.lines))
        ]
        self._send({"warm": warm})
        self._receive()
        for task in warm:
            remove(Path(task["folder"]).parent)

    def close(self) -> None:
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.close()
        self._worker.wait()
        self._worker.stdout.close()

    def _send(self, message: Any) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(message) + "\n")
        self._worker.stdin.flush()

    def _receive(self) -> Any:
        assert self._worker.stdout is not None
        text = self._worker.stdout.readline()
        if not text:
            raise AssertionError("the worker is gone")
        return json.loads(text)

    def _laid_out(self, made: Input) -> Path:
        """Write the changed folder and return it."""
        around = Path(tempfile.mkdtemp(prefix="case-", dir=self.folder))
        return self._templates[made.kind].write(around, made.edits)

    def _task(self, made: Input, folder: Path) -> dict[str, Any]:
        kind = self.kinds[made.kind]
        words = kind.lines[made.line].split()
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
                unchanged = functools.partial(self._unchanged, each)
                answer["problem"] = silent(self.kinds[each.kind], each, folder, answer["output"], unchanged)
            remove(folder.parent)
        return answers

    def _unchanged(self, made: Input) -> str:
        if (made.kind, made.line) not in self.expected:
            (self.expected[made.kind, made.line],) = self.tried([Input(made.kind, made.line, [])])
        return str(self.expected[made.kind, made.line]["output"])

    def streamed(self, name: str, seed: int, first: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield what a range of numbers finds, and at last how it ended; see `stream`."""
        task = {"kind": name, "folder": str(self.folder), "seed": seed, "first": first, "count": count}
        self._send({"stream": task})
        while True:
            found = self._receive()
            yield found
            if "exits" in found:
                return


def signature(problem: str) -> str:
    """Return what two findings of the same cause have in common: the kind of the problem and the innermost places."""
    lines = problem.strip().splitlines()
    places = re.findall(r'File "[^"]*?(glassengine/[\w/]+\.py|tests/fuzz/\w+\.py)", line \d+, in (\w+)', problem)
    if not places:
        return re.sub(r"\d+|'[^']*'|/\S+", "", lines[0])[:160]
    error = lines[-1].split(":")[0] if len(lines) > 1 else ""
    return f"{lines[0]} | {error} | " + " < ".join(f"{file}:{name}" for file, name in places[::-1][:2])


class State:
    """What was tried, on which code: a file, so that a campaign goes on where another one ended."""

    def __init__(self, file: Path | None, seed: int | None) -> None:
        self._file = file
        kept = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        if seed is not None and kept.get("seed", seed) != seed:
            kept = {}
        self.seed: int = kept.get("seed", seed if seed is not None else int.from_bytes(os.urandom(4)))
        self.next: dict[str, int] = kept.get("next", {})
        self.runs: dict[str, dict[str, Any]] = kept.get("runs", {})
        self.code = code_digest()
        self.now: dict[str, Any] = self.runs.setdefault(self.code, {})

    def add(self, name: str, count: int, end: dict[str, Any], problems: int) -> None:
        """Count a range of inputs."""
        row = self.now.setdefault(name, {"inputs": 0, "seconds": 0.0, "cpu": 0.0, "problems": 0, "exits": {}})
        row["inputs"] += count
        row["seconds"] += end["seconds"]
        row["cpu"] += end["cpu"]
        row["problems"] += problems
        row["exits"] = dict(Counter(row["exits"]) + Counter(end["exits"]))
        self.next[name] = self.next.get(name, 0) + count
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps({"seed": self.seed, "next": self.next, "runs": self.runs}, indent=1))
            new.replace(self._file)

    def table(self) -> str:
        """Return the counts of the present code by kind, and those of all code together."""
        rows = [f"{'kind':24}{'inputs':>9}{'seconds':>9}{'problems':>9}  exits by status"]
        for name, row in self.now.items():
            rows.append(_row(name, row))
        rows.append(_row("all, on this code", together(self.now.values())))
        earlier = [row for code, run in self.runs.items() if code != self.code for row in run.values()]
        if earlier:
            rows.append(_row("on earlier code", together(earlier)))
        return "\n".join(rows)


def together(rows: Any) -> dict[str, Any]:
    """Return the sum of rows."""
    rows = list(rows)
    total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in ("inputs", "seconds", "cpu", "problems")}
    return total | {"exits": dict(sum((Counter(row["exits"]) for row in rows), Counter()))}


def _row(name: str, row: dict[str, Any]) -> str:
    exits = "  ".join(f"{status}: {count}" for status, count in sorted(row["exits"].items(), key=lambda e: int(e[0])))
    return f"{name:24}{row['inputs']:9}{row['seconds']:9.0f}{row['problems']:9}  {exits}"


def code_digest() -> str:
    """Return what changes with the code that is tried."""
    import glassengine

    found = hashlib.sha256()
    for path in sorted(Path(glassengine.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Campaign:
    """Makes inputs up, has them read, and keeps one finding of each kind and place."""

    def __init__(self, bench: Bench, seed: int | None, keep: Path | None) -> None:
        self.bench = bench
        self._keep = keep
        self.state = State(keep and keep / "state.json", seed)
        self.findings: dict[str, tuple[Input, int]] = {}
        rows = [pair for run in self.state.runs.values() for pair in run.items()]
        self._cost = {name: row["seconds"] / row["inputs"] for name, row in rows if row["inputs"]}

    def run(self, seconds: float, table: Path | None = None) -> None:
        end = time.monotonic() + seconds
        while True:
            for name, kind in self.bench.kinds.items():
                if time.monotonic() > end:
                    return
                cost = self._cost.get(name)
                wanted = BATCH if cost is None else int(kind.share * TURN_SECONDS / cost)
                self.one_batch(name, max(4, min(20_000, wanted)))
                if table is not None:
                    table.write_text(self.text())

    def one_batch(self, name: str, size: int) -> None:
        first = self.state.next.get(name, 0)
        problems = 0
        for found in self.bench.streamed(name, self.state.seed, first, size):
            if "exits" in found:
                self._cost[name] = found["seconds"] / size
                self.state.add(name, size, found, problems)
            else:
                problems += 1
                self._found(name, found["number"], found["problem"])

    def _found(self, name: str, number: int, problem: str) -> None:
        mark = f"{name}: {signature(problem)}"
        folder = self.bench.folder / "kinds" / name
        made = given(self.state.seed, self.bench.kinds[name], name, folder, self.bench.files[name], number)
        made.problem = problem
        known = self.findings.get(mark)
        self.findings[mark] = (made, 1) if known is None else (known[0], known[1] + 1)
        if known is None and self._keep is not None:
            say(f"\n{mark}\n{made.to_json()[:1500]}\n{problem[-1500:]}")
            self._keep.mkdir(parents=True, exist_ok=True)
            file = self._keep / f"{name}-{hashlib.sha256(mark.encode()).hexdigest()[:10]}.json"
            file.write_text(made.to_json() + "\n")

    def smaller(self, made: Input) -> Input:
        """Return the input without the edits that the finding does not need."""
        edits = list(made.edits)
        found = made.problem
        for edit in list(edits):
            rest = [other for other in edits if other is not edit]
            if not rest:
                continue
            (answer,) = self.bench.tried([Input(made.kind, made.line, rest)])
            if answer["problem"] and signature(answer["problem"]) == signature(made.problem):
                edits, found = rest, answer["problem"]
        return Input(made.kind, made.line, edits, found)

    def text(self) -> str:
        """Return the table and what was found."""
        lines = [self.state.table(), *self.bench.broken.values()]
        lines.append(f"code {self.state.code}, seed {self.state.seed}, {len(self.findings)} findings")
        lines += [f"{count} x {mark}" for mark, (_, count) in self.findings.items()]
        return "\n".join(lines) + "\n"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    folder = os.environ.get("FUZZ_FOLDER")
    place = Path(folder or tempfile.mkdtemp(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
    place.mkdir(parents=True, exist_ok=True)
    try:
        return _main(place)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _main(folder: Path) -> int:
    if sys.argv[1:]:
        return _again(folder, [Path(name) for name in sys.argv[1:]])
    names = os.environ.get("FUZZ_KINDS", "").split() or list(direct_kinds.ALL)
    seconds = float(os.environ.get("FUZZ_SECONDS", "3600"))
    seed, table = os.environ.get("FUZZ_SEED"), os.environ.get("FUZZ_TABLE")
    keep = Path(os.environ.get("FUZZ_KEEP", "fuzz-findings"))
    campaign = Campaign(Bench(folder, names), int(seed) if seed else None, keep)
    with contextlib.suppress(KeyboardInterrupt):
        campaign.run(seconds, Path(table) if table else None)
    say(campaign.text())
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
