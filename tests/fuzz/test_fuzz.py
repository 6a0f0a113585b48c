"""Whatever a file holds, opening it ends well or with a reason. In processes of their own, with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import children

HERE = Path(__file__).parent

OUTSIDE = "its file is outside of the directory"
# Case -> how it ends, or what is skipped with which reason.
ENDS: dict[str, str | list[str]] = {
    **dict.fromkeys(
        [
            "index_that_is_cut", "shard_that_is_cut", "offsets_that_overlap", "absurd_lengths", "absurd_offset",
            "checksum_that_does_not_match", "record_of_two_gigabytes", "shards_that_are_links", "manifest_that_nests",
            "pickle_that_runs_code", "bare_pickle_that_runs_code", "pickle_that_fills_memory", "pickle_that_unfolds",
            "name_that_torch_searches_for_minutes",
            "json_that_nests", "json_of_many_items", "json_string_without_end", "safetensors_with_an_absurd_header",
        ],
        "CorruptError",
    ),
    "pipe_instead_of_a_file": "UsageError",
    "names_of_a_recording": "8 tensors",
    "zip_with_names_that_leave": "8 tensors",
    "zip_bomb": ["4685547 bytes unfold to 1073741824: save it uncompressed"],
    "zip_of_many_members": ["not an array: EOF"],
    "object_array_that_runs_code": ["an object array is a pickle, and reading it would run code"],
    "tensor_that_is_expanded": ["4 bytes that are expanded to 4398046511104"],
    "debug_tree_that_leaves": [OUTSIDE],
    "debug_tree_with_a_link": ["its file is a link, which could leave the directory"],
    "printed_tensor_of_absurd_size": ["the text is not that of a tensor: it claims 1125899906842624 elements"],
    "polygraphy_array_of_absurd_size": ["the header claims 4503599627370496 bytes, the file has 0"],
    "msprobe_that_leaves": ["its file cannot be opened: File name too long", OUTSIDE],
}  # fmt: skip


def run(*arguments: str, cwd: Path, timeout: float, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script of this folder; `prelude` is run after it is imported and before it begins."""
    name = Path(arguments[0]).stem
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {name}; {prelude}\nsys.exit({name}.main())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments[1:]]
    return children.run(command, cwd=cwd, env=environment, timeout=timeout)


def hostile(cwd: Path, records: int, timeout: float) -> dict[str, dict[str, Any]]:
    done = run("hostile.py", str(records), cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return {found["case"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_hostile_files_end_with_a_reason(tmp_path: Path) -> None:
    found = hostile(tmp_path, 5_000, 900)
    for name, expected in ENDS.items():
        case = found.pop(name)
        if isinstance(expected, str):
            assert case["ended"] == expected, case
        else:
            assert case["ended"] == "0 tensors" and len(case["skipped"]) == len(expected), case
            assert all(reason.startswith(start) for reason, start in zip(case["skipped"], expected, strict=True)), case
        assert case["new_files"] == [] and not case["ran"]
    many = found.pop("index_of_many_records")
    assert many["ended"] == "5012 tensors" and found == {}
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_an_index_of_a_million_records_opens(tmp_path: Path) -> None:
    found = hostile(tmp_path, 1_000_000, 900)
    assert found["index_of_many_records"]["ended"] == "1000012 tensors"
    assert found["zip_of_many_members"]["ended"] == "CorruptError"


def fuzz(seconds: float, seed: int, cwd: Path, *kinds: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    return run("fuzzer.py", str(seconds), str(seed), *kinds, cwd=cwd, timeout=10 * seconds + 600, prelude=prelude)


def test_a_few_seconds_of_fuzzing_find_nothing(tmp_path: Path) -> None:
    done = fuzz(2, int.from_bytes(os.urandom(4)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # Changes that reach new lines are kept, beside the seed of each of the fifteen kinds.
    assert int(done.stdout.split(" kept")[0].split()[-1]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_minutes_of_fuzzing_find_nothing(seed: int, tmp_path: Path) -> None:
    done = fuzz(120, seed, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        # An error of ours where a number of the header is not what it should be.
        ("import glassengine.recording.formats.files as f; read = f.describe\n"
         "def worse(path, *a, **k):\n    data = path.read_bytes()\n    return {147: read}[data[0]](path, *a, **k)\n"
         "f.describe = worse", "KeyError"),
        ("fuzzer.MAX_SECONDS = 1\n"
         "def forever(path):\n    while True:\n        pass\n"
         "fuzzer.open_source = forever", "TimeoutError"),
        # No line of Python is run.
        ("fuzzer.MAX_SECONDS = fuzzer.PATIENCE = 1\n"
         "fuzzer.open_source = lambda path: sum(iter(int, 1))", "Timeout (0:00:02)!"),
        ("fuzzer.open_source = lambda path: bytearray(8 << 30)", "MemoryError"),
        ("real = fuzzer.open_source\n"
         "def leave(path):\n    (path.parent.parent / 'outside').touch()\n    return real(path)\n"
         "fuzzer.open_source = leave", "a file outside of the directory"),
    ],
)  # fmt: skip
def test_planted_faults_are_found(fault: str, finding: str, tmp_path: Path) -> None:
    done = fuzz(20, 1, tmp_path, "npy", prelude=fault)
    assert done.returncode == 1 and finding in done.stdout + done.stderr, done.stdout + done.stderr
