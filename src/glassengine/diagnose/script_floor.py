"""The noise floor of a recorded script: it runs again in processes of its own, and what it then records is compared.

A script brings its own inputs and its own random numbers, and cannot be given what it drew before. So it first runs as
it is: where that does not give the recorded bytes again (no seed, say), the difference would be taken for rounding,
and the floor would hide mistakes; there is none then. Twice more it runs with every op rounded otherwise, as a model
does, and at last as it is again: a script may change with what its runs leave behind. Where rounding changes the whole
numbers that a model is given (its own tokens), the runs go on with other data, and there is no floor either.

`python -m glassengine.diagnose.script_floor JSON` is one such run.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine import environment, starting
from glassengine.capture.run_script import record_script
from glassengine.diagnose.noise_floor import NUM_RUNS, Collector, otherwise
from glassengine.errors import GlassError
from glassengine.numerics.tolerance import is_inexact
from glassengine.recording.layout.layout import Entry, have_same_bytes
from glassengine.recording.layout.noise_floor import Key, StoredFloor, write_noise_floor
from glassengine.recording.layout.tensors import bytes_of
from glassengine.recording.reader import Recording
from glassengine.sites import ROOT

HOW = f"{NUM_RUNS} runs of the script with every op rounded otherwise and attention written out"
_SEED = "the seeds at its beginning: torch.manual_seed(0); random and numpy have their own"


def measure_script_floor(
    script: str,
    arguments: Sequence[str],
    *,
    path: Path,
    recordings: Sequence[str],
    is_module: bool,
    directory: Path,
    options: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> None:
    """Measure the noise floors of what a script has recorded and keep them there.

    Costs four runs of the script, two of them several times slower than usual, which write what it writes.

    Args:
        script: As for `record_script`.
        arguments: As for `record_script`.
        path: The directory that the recordings are in.
        recordings: The finished recordings.
        is_module: As for `record_script`.
        directory: In which the script was started.
        options: What was recorded, as for `record_script`.
        variables: The environment in which the script was started, which it may have changed; None is that of now.

    Raises:
        GlassError: The script does not make the recorded tensors again, or rounding changes its data; no floor is kept.
    """
    places = [Path(recording).relative_to(path) for recording in recordings]
    with tempfile.TemporaryDirectory(prefix="glassengine-floor-") as folder:

        def run(number: int, seed: int | None) -> Path:
            target = Path(folder) / str(number)
            asked = {"seed": seed, "path": str(target), "script": script, "arguments": list(arguments)}
            _run({**asked, "is_module": is_module, "options": dict(options)}, directory, number, variables)
            return target

        def require_same(again: Path) -> None:
            for place in places:
                _require_same(path / place, again / place)

        again = run(0, None)
        # Ranks meet in every run; one that stopped here would have the others wait.
        is_alone = environment.num_ranks() == 1
        if is_alone:
            require_same(again)
        others = [run(1 + seed, seed) for seed in range(NUM_RUNS)]
        # What a run leaves behind (a counter in a file) may change those after the first repeat only.
        last = run(1 + NUM_RUNS, None)
        for repeat in (last,) if is_alone else (again, last):
            require_same(repeat)
        measured = {place: _floors(path / place, [other / place for other in others]) for place in places}
    for place, floors in measured.items():
        write_noise_floor(path / place, floors, HOW)


def _run(asked: Mapping[str, Any], directory: Path, number: int, variables: Mapping[str, str] | None) -> None:
    command = starting.python(__name__, json.dumps(asked))
    status, last = starting.run_silently(command, cwd=directory, env=_surroundings(number, variables))
    if status:
        how = "with every op rounded otherwise" if asked["seed"] is not None else "as it is"
        raise GlassError(
            "the noise floor was not measured: the script failed when it ran again",
            got=f"exit status {status} {how}: {last or 'no message'}",
            hint="a script that can run twice: it may have found what the first run left",
        )


def _surroundings(number: int, variables: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the environment of a run: as the script had it, but ranks meet those of others at a port of their own."""
    ranks = environment.num_ranks()
    if ranks in (1, None):
        return environment.everything() if variables is None else variables
    known = environment.of_rank(environment.rank(), ranks) | {"LOCAL_RANK": str(environment.local_rank())}
    port = known.get("MASTER_PORT", "")
    if port.isdecimal():
        known["MASTER_PORT"] = str((int(port) + number - 1023) % (65536 - 1024) + 1024)
    # The store of torchrun still has what the first run put there.
    return known | {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def _require_same(path: Path, again: Path) -> None:
    """Raise a `GlassError` where a script that ran again, as it is, did not make the same tensors."""
    ours, theirs = Recording.open(path), _opened(again, path)
    by_place = {entry.place: entry for entry in theirs.entries}
    for entry in ours.entries:
        other = by_place.pop(entry.place, None)
        if other is None or not is_same(ours, entry, theirs, other):
            how = "has another value" if other is not None else "is not made"
            raise _differs(f"{entry.site!r}, step {entry.step}, {how} when the script runs again as it is")
    if by_place:
        site, step, _ = next(iter(by_place))
        raise _differs(f"{site!r}, step {step}, is made when the script runs again as it is, and was not before")


def _opened(path: Path, what: Path) -> Recording:
    try:
        return Recording.open(path)
    except GlassError as error:
        raise _differs(f"{what.name}: this model is not called when the script runs again") from error


def _differs(got: str) -> GlassError:
    return GlassError(
        "the noise floor was not measured: two runs of the script differ by more than rounding",
        got=got,
        expected="the same bytes from the same script",
        hint=_SEED,
    )


def is_same(ours: Recording, entry: Entry, theirs: Recording, other: Entry) -> bool:
    """Whether two recordings hold the same bytes of a tensor."""
    if have_same_bytes(entry, other):
        return True
    if (entry.dtype, entry.shape) != (other.dtype, other.shape):
        return False
    return bytes_of(ours.tensor(entry)) == bytes_of(theirs.tensor(other))


def _floors(path: Path, others: Sequence[Path]) -> dict[Key, StoredFloor]:
    recording = Recording.open(path)
    floors: dict[Key, StoredFloor] = {}
    collector = Collector(recording, floors)
    for other in others:
        source = _opened(other, path)
        by_place = {entry.place: entry for entry in source.entries}
        for entry in recording.entries:
            found = by_place.get(entry.place)
            is_data = entry.site.startswith(f"{ROOT}:in") and not is_inexact(entry.dtype)
            if is_data and (found is None or not is_same(recording, entry, source, found)):
                raise GlassError(
                    "the noise floor was not measured: with other rounding the script gives its model other data",
                    got=f"{entry.site!r}, step {entry.step}",
                    expected="inputs that do not depend on what the model makes",
                    hint="a script that runs on given tokens; of a model: glass record MODEL --noise-floor",
                )
            if found is not None:
                collector.write(entry.site, entry.step, source.tensor(found))
    if not any(floor.whole for floor in floors.values()):
        raise GlassError(
            "the noise floor was not measured: nothing was rounded otherwise when the script ran again",
            got=str(path),
            hint="what runs outside of PyTorch's ops, or in threads of its own, cannot be rounded otherwise",
        )
    return floors


def main(arguments: Sequence[str]) -> int:
    """Run a script once more, as the first argument says, and return its exit status."""
    asked = json.loads(arguments[0])
    seed = asked["seed"]
    options = {**asked["options"], "steps": asked["options"]["steps"] and frozenset(asked["options"]["steps"])}
    with contextlib.nullcontext() if seed is None else otherwise(seed):
        found = record_script(
            asked["script"], asked["arguments"], path=asked["path"], is_module=asked["is_module"], **options
        )
    return found.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
