"""The answer book: runs a fixed sample of every corpus and compares each answer with tests/answers.json.

python -m benchmarks golden                     all corpora; prints each answer that changed, exit status 1 if one did
python -m benchmarks golden recordings ranks    those
python -m benchmarks golden --write             write the answers of today into the book

An answer is verdict, standing, level, step, site and kind of the first mistake (tests/answers.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.answers import BOOK

ROOT = Path(__file__).resolve().parent.parent
JUDGED = "tests/diagnose/end_to_end"
CORPORA = {
    "own": ("test_hidden_mistakes", "test_plain_ports", "test_ports", "test_written_out", "test_written_differently"),
    "as given": ("test_as_given", "test_outside", "test_candidates_that_raise", "test_gone_wrong"),
    "kinds": ("test_hints_of_ports", "test_hints_of_folded_weights"),
    "stored": ("test_stored_programs", "test_torchscript", "test_onnx_results", "test_replay_onnx"),
    "engines": ("test_passes", "test_runtime_kernels", "tests/diagnose/ladder", "tests/diagnose/test_side_by_side.py"),
    "serving": ("tests/plugins/serving/check",),
    "quantized": ("tests/plugins/quantized",),
    "ranks": ("test_runs_of_ranks", "tests/compare/ranks", "tests/compare/end_to_end"),
    "lazy": ("tests/diagnose/test_snapshot_replay.py",),
    "recordings": ("tests/compare/test_*.py", "tests/compare/matching", "tests/compare/series"),
    "training": ("tests/diagnose/test_training_*.py",),
    "foreign": ("tests/foreign/test_foreign.py",),
}
"""Corpus -> tests; a bare name is one of the end-to-end tests of `glass check`."""
OF_OTHERS = ROOT / ".venv-foreign" / "bin" / "python"
"""Runs "foreign", where `make test-foreign` has installed it."""


def run(corpus: str, scratch: Path) -> dict[str, list[str]]:
    """Return the answers of a corpus: test -> one text for each comparison.

    Raises:
        RuntimeError: pytest could not run it.
    """
    targets = [
        str(path.relative_to(ROOT))
        for target in CORPORA[corpus]
        for path in sorted(ROOT.glob(target if "/" in target else f"{JUDGED}/{target}.py"))
    ]
    python = OF_OTHERS if corpus == "foreign" else Path(sys.executable)
    words = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "tests.answers", "--answers", scratch / "answers"]
    words += ["-p", "no:cacheprovider", *([] if corpus == "foreign" else ["-n", "2", "--dist", "loadfile"]), *targets]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    print(f"{corpus}: {done.stdout.splitlines()[-1]}", flush=True)
    return {
        test: answers for path in scratch.glob("answers*") for test, answers in json.loads(path.read_text()).items()
    }


def changed(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Return a line for each test whose answers are others."""
    return [
        f"  {test}\n    before {before.get(test)}\n    now    {now.get(test)}"
        for test in sorted(before.keys() | now.keys())
        if before.get(test) != now.get(test)
    ]


def main(arguments: Sequence[str] = ()) -> int:
    """Run the corpora, and compare or write the book."""
    parser = argparse.ArgumentParser("benchmarks golden")
    parser.add_argument("corpora", nargs="*", metavar="CORPUS", help=f"of {', '.join(CORPORA)}; default all")
    parser.add_argument("--write", action="store_true", help="write the answers into the book")
    options = parser.parse_args(arguments)
    if unknown := set(options.corpora) - set(CORPORA):
        parser.error(f"there is no corpus {', '.join(unknown)}; there are {', '.join(CORPORA)}")
    book = json.loads(BOOK.read_text()) if BOOK.is_file() else {}
    num_changed, started = 0, time.perf_counter()
    for corpus in options.corpora or CORPORA:
        if corpus == "foreign" and not OF_OTHERS.exists():
            print("foreign: not run; `make test-foreign` installs its packages")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            now = run(corpus, Path(scratch))
        lines = changed(book.get(corpus, {}), now)
        num_changed += len(lines)
        print(
            "\n".join(
                [f"{corpus}: {len(now)} tests, {sum(map(len, now.values()))} answers, {len(lines)} changed", *lines]
            )
        )
        book[corpus] = now
        if options.write:
            BOOK.write_text(json.dumps(book, indent=1, sort_keys=True) + "\n")
    print(f"{num_changed} tests with other answers, {time.perf_counter() - started:.0f} s")
    return int(num_changed > 0 and not options.write)
