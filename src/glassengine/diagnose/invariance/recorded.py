"""Records a script or a serving engine twice, and compares the recordings.

`python -m glassengine.diagnose.invariance.recorded PATH SEEDED IS_MODULE SCRIPT ARGUMENTS...` is one run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine import starting
from glassengine.capture.run_script import record_script
from glassengine.compare.compare import compare
from glassengine.diagnose.invariance.causes import ATOMICS, RANDOM, THREADS
from glassengine.diagnose.invariance.ways import ALL, described, largest_difference, same_bits, seed
from glassengine.diagnose.paired_steps import LiveStep
from glassengine.diagnose.script_floor import is_same
from glassengine.errors import GlassError, UsageError
from glassengine.recording.layout.layout import Entry
from glassengine.recording.reader import Recording
from glassengine.results import FLAGGED, VERDICTS
from glassengine.results.answer import LEAST_DB
from glassengine.results.without_tensors import (
    ChangeVerdict,
    FirstOperation,
    Invariance,
    SwitchTried,
    Variation,
    What,
    concluded,
)
from glassengine.serving.protocol import ServingOptions, ServingRun, open_served

_PROMPT, _LEAST_PROMPT = 12, 3
_RESULTS = ("logits", "returned/logits")
"""Of ONNX graphs, whose results are recorded before their operations."""
_TRIALS: Sequence[tuple[str, bool, Mapping[str, str], str]] = (
    ("torch.manual_seed, random.seed and numpy.random.seed at its beginning", True, {}, RANDOM),
    ("PYTHONHASHSEED=0", False, {"PYTHONHASHSEED": "0"}, "the order of a set or of hashes"),
    ("OMP_NUM_THREADS=1", False, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, ATOMICS),
)


def check_invariant_script(
    script: str, arguments: Sequence[str] = (), is_module: bool = False, *, invariant: Sequence[str] = ("run",)
) -> Invariance:
    """Run a script twice, record both runs, and compare them bit for bit.

    Args:
        script: As for `record_script`.
        arguments: As for `record_script`.
        is_module: As for `record_script`.
        invariant: "run" is the one change of a script.

    Raises:
        UsageError: Another change was asked for.
        GlassError: The script fails.
    """
    if list(invariant) != ["run"]:
        got = ", ".join(invariant)
        raise UsageError("a script brings its own inputs, and can be run again only", got=got, hint="--invariant run")
    words = " ".join([script, *arguments])
    with tempfile.TemporaryDirectory(prefix="glassengine-run-") as folder:

        def pair(name: str, seeded: bool, variables: Mapping[str, str]) -> tuple[Path, Path]:
            sides = Path(folder) / f"{name}-0", Path(folder) / f"{name}-1"
            for side in sides:
                _run(side, seeded, is_module, [script, *arguments], variables)
            return sides

        first, second = pair("as-it-is", False, {})
        different = list(_differences(first, second))
        if not different:
            return concluded(words, [Variation("run", "bitwise", 1)], described())
        tried, cause = [], None
        for i, (name, seeded, variables, text) in enumerate(_TRIALS):
            works = not list(_differences(*pair(str(i), seeded, variables)))
            tried.append(SwitchTried(name, works))
            if works:
                cause = text
                break
        change = _judged(first, second, different)
        switch = tried[-1].name if cause is not None else None
        return concluded(words, [replace(change, cause=cause, switch=switch, tried=tuple(tried))], described())


def check_invariant_served(
    target: str, invariant: Sequence[str], inputs: Mapping[str, Any] | None, options: ServingOptions
) -> Invariance:
    """Run a serving engine twice in each way, and compare all that it shows.

    Args:
        target: `gguf:FILE`, `vllm:DIR` or another kind.
        invariant: "run", "length" or "threads".
        inputs: `input_ids` of one row; None takes some small numbers.
        options: How the engine is run.

    Raises:
        UsageError: Another change was asked for.
    """
    known: tuple[What, ...] = ("run", "length", "threads")
    names = [what for what in known if what in invariant or ALL in invariant]
    for what in invariant:
        if what not in (*names, ALL):
            got = f"{target}, which is run with one request at a time, by a process of its own"
            raise UsageError(f"--invariant {what} cannot be tried here", got=got, expected=known)
    prompt = list(range(3, 3 + _PROMPT)) if inputs is None else torch.as_tensor(inputs["input_ids"]).flatten().tolist()
    if len(prompt) < _LEAST_PROMPT:
        raise UsageError("the input is too short", got=f"{len(prompt)} tokens", expected=f"{_LEAST_PROMPT} or more")
    changes = []
    with tempfile.TemporaryDirectory(prefix="glassengine-run-") as folder:

        def recorded(name: str, steps: int, threads: int = 1) -> Path:
            served = open_served(target, replace(options, threads=threads))
            assert served is not None
            served.record(ServingRun(prompt[:-steps], steps, prompt[-steps:]), Path(folder) / name)
            return Path(folder) / name

        steps = max(1, len(prompt) // 4)
        first = recorded("first", steps)
        for what in names:
            if what == "length":
                changes.append(_of_lengths(recorded("whole", 1), recorded("singles", len(prompt) - 1)))
                continue
            second = recorded(what, steps, 2 if what == "threads" else 1)
            different = list(_differences(first, second))
            change = _judged(first, second, different) if different else Variation("run", "bitwise", 1)
            cause = THREADS if different and what == "threads" else None
            changes.append(replace(change, what=what, cause=cause))
    return concluded(target, changes, described())


def _of_lengths(whole: Path, singles: Path) -> Variation:
    """Compare the last step, which reads the cache of a prefill on one side and that of single tokens on the other.

    Its logits are the result, else its last tensor. The first difference is that of the first tensor that differs, and
    not more than the result: what differs more has no effect on it.
    """
    left, right = (_last_step(side) for side in (whole, singles))
    both = sorted((site for site in left.tensors if site in right.tensors), key=lambda site: site in _RESULTS)
    if not both:
        return Variation("length", "undecided", 0, reason="no tensor of the last step is on both sides")
    if same_bits(left.tensors[both[-1]], right.tensors[both[-1]]):
        return Variation("length", "bitwise", 1)
    pairs = {one.site: one for one in compare(left, right).pairs}
    result = pairs[both[-1]]
    level = VERDICTS.index(result.verdict)
    first = next(pairs[site] for site in both if 0 < VERDICTS.index(pairs[site].verdict) <= level)
    verdict: ChangeVerdict = "beyond rounding" if result.verdict in FLAGGED else "within rounding"
    reason = result.reason
    if result.verdict in FLAGGED and result.figures is not None and result.figures.snr_db >= LEAST_DB:
        verdict, reason = "undecided", "beyond the tolerance of its dtype, which does not know how many layers round"
    sizes = [None if one.figures is None else one.figures.max_abs_diff for one in (first, result)]
    operation = FirstOperation(first.site, "", None, 0, None, sizes[0], "the last token")
    words = "the prompt whole, and token by token"
    return Variation("length", verdict, 1, 1, words, max_abs_diff=sizes[1], reason=reason, first=operation)


def _last_step(path: Path) -> LiveStep:
    recording = Recording.open(path)
    last = max(entry.step for entry in recording.entries)
    entries = (entry for entry in recording.entries if entry.step == last)
    return LiveStep(path.name, recording.metadata, 0, {entry.site: recording.tensor(entry) for entry in entries})


def _run(path: Path, seeded: bool, is_module: bool, words: Sequence[str], variables: Mapping[str, str]) -> None:
    given = [str(path), str(int(seeded)), str(int(is_module)), *words]
    surroundings = starting.surroundings() | dict(variables)
    status, last = starting.run_silently(starting.python(__name__, *given), cwd=Path.cwd(), env=surroundings)
    if status:
        raise GlassError("the script failed", got=f"exit status {status}: {last}")


def _differences(first: Path, second: Path) -> Iterator[tuple[Path, Entry, Entry | None]]:
    """Yield recording, tensor and its counterpart of what differs in a bit, in the order of the run."""
    places = sorted(one.parent.relative_to(first) for one in first.rglob("recording.json"))
    if not any(Recording.open(first / place).entries for place in places):
        raise GlassError("nothing was recorded, so nothing can be compared", got=str(first.name))
    for place in places:
        ours = Recording.open(first / place)
        try:
            theirs = Recording.open(second / place)
        except GlassError:
            yield from ((place, entry, None) for entry in ours.entries)
            continue
        by_place = {entry.place: entry for entry in theirs.entries}
        for entry in sorted(ours.entries, key=lambda one: one.step):
            other = by_place.get(entry.place)
            if other is None or not is_same(ours, entry, theirs, other):
                yield place, entry, other


def _judged(first: Path, second: Path, different: Sequence[tuple[Path, Entry, Entry | None]]) -> Variation:
    """Return the change with the verdict of the comparison of both recordings."""
    place, entry, other = different[0]
    found = compare(first / place, second / place)
    size = None
    if other is not None and entry.shape == other.shape:
        sides = Recording.open(first / place).tensor(entry), Recording.open(second / place).tensor(other)
        size = largest_difference(*sides)
    operation = FirstOperation(entry.site, "", None, entry.step, None, size, f"step {entry.step}")
    verdict: ChangeVerdict = "within rounding" if found.ok else "beyond rounding"
    words = f"{len(different)} recorded tensors differ"
    return Variation("run", verdict, 1, 1, words, max_abs_diff=size, reason=found.not_ok_because, first=operation)


def main(arguments: Sequence[str]) -> int:
    """Run a script once, and return its exit status."""
    path, seeded, is_module, script, *rest = arguments
    if seeded == "1":
        seed()
    return record_script(script, rest, path=path, is_module=is_module == "1").status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
