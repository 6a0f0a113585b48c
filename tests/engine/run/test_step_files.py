"""Step files: what is in them, whose files are moved and whose are left, hostile names, disks that fill up."""

from __future__ import annotations

import errno
import json
import logging
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine
from glassengine.engine.run import step_files as module
from glassengine.errors import UsageError

PROMPT = "Hey, are you conscious?"


def session(step: int, **tensors: torch.Tensor) -> Any:
    """Return what an `on_step` callback sees of a session."""
    return SimpleNamespace(step=step, debug_buffers=tensors)


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def write(directory: Path, *steps: int, formats: tuple[str, ...] = ("pt",), **tensors: torch.Tensor) -> None:
    with glass.compat.StepFiles(directory, formats=formats) as files:
        for step in steps:
            files(session(step, **(tensors or {"x": torch.tensor([float(step)])})))


def load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def test_every_input_and_output_of_every_step(engine: Engine, tmp_path: Path) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    with glass.compat.StepFiles(tmp_path / "new" / "a") as files:

        def both(current: Any) -> None:
            files(current)
            kept.append(current.debug_buffers)

        engine.generate(PROMPT, max_new_tokens=3, debug=True, on_step=both)
    assert files.num_steps == 3
    assert names(files.directory) == {f"step{i}.{suffix}" for i in range(3) for suffix in ("pt", "txt")}
    for step, expected in enumerate(kept):
        found = load(files.directory / f"step{step}.pt")
        assert list(found) == list(expected) == engine.debug_names
        assert {"input_ids", "logits", "position_ids", "past_key_0", "present_value_1", "head"} <= found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The value of the cache before a step is the one after the step before.
    first, second = (load(files.directory / f"step{step}.pt") for step in (0, 1))
    assert torch.equal(second["past_key_0"], first["present_key_0"])
    assert not torch.equal(second["past_key_0"], second["present_key_0"])


def test_files_of_two_engines_are_compared(engine: Engine, tmp_path: Path) -> None:
    for side in "ab":
        with glass.compat.StepFiles(tmp_path / side, formats=["pt"]) as files:
            engine.generate(PROMPT, max_new_tokens=1, debug=["mlp", "logits"], on_step=files)
    result = glass.compare(tmp_path / "a/step0.pt", tmp_path / "b/step0.pt")
    assert result.ok and result.verdict == "identical" and result.counts["compared"] == 3
    # Planted: one element of the candidate.
    changed = load(tmp_path / "b/step0.pt")
    changed["logits"].view(-1)[7] += 1
    torch.save(changed, tmp_path / "b/step0.pt")
    result = glass.compare(tmp_path / "a/step0.pt", tmp_path / "b/step0.pt")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == "logits"


def test_files_are_compared_with_a_recording_of_the_same_run(engine: Engine, tmp_path: Path) -> None:
    """Files have the documents' names, recordings those of sites: the recording knows both, the logits' too."""
    with glass.compat.StepFiles(tmp_path / "files", formats=["pt"]) as files:
        engine.generate(PROMPT, max_new_tokens=2, debug=["mlp", "logits"], on_step=files, record=tmp_path / "recording")
    for sides in (("recording", "files"), ("files", "recording")):
        result = glass.compare(tmp_path / sides[0], tmp_path / sides[1], min_coverage=0.0)
        assert result.ok and result.verdict == "identical"
        assert {"logits", "lm_head"} & {pair.site for pair in result.pairs}, sides


def test_text(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, float("nan"), float("inf"), -float("inf")])
    tensors = {
        "mixed": values,
        "long": torch.arange(100).reshape(10, 10),
        "bf16": torch.full((2,), 0.5, dtype=torch.bfloat16),
        "f8": torch.full((2,), 0.5).to(torch.float8_e4m3fn),
        "empty": torch.zeros((0, 3)),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "new\nline": torch.tensor(3),
    }
    write(tmp_path, 0, formats=("txt",), **tensors)
    text = (tmp_path / "step0.txt").read_text()
    assert "mixed: float32 [6]\n  min 1  mean 2.33333  median 2  max 4  std 1.52753  NaN 1  Inf 2\n" in text
    assert "[1, 2, 4, nan, inf, -inf]" in text
    assert "long: int64 [10, 10]" in text and "[0, 1, 2, 3, 4, 5, 6, 7, ..., 92, 93, 94, 95, 96, 97, 98, 99]" in text
    assert "bf16: bfloat16 [2]" in text and "[0.5, 0.5]" in text and "f8: float8_e4m3fn [2]" in text
    assert "empty: float32 [0, 3]\n  min -" in text and "[True, False]" in text
    assert "complex: complex64 [1]" in text and "[(1+2j)]" in text
    assert "'new\\nline': int64 []" in text
    assert len(text.splitlines()) == 3 * len(tensors)


def test_numpy_files(tmp_path: Path) -> None:
    half = torch.tensor([0.1, -3.0], dtype=torch.bfloat16)
    write(tmp_path, 0, 1, formats=("npy",), **{"layers/6/mlp": torch.arange(3), "half": half})
    assert names(tmp_path) == {f"{n}-step{i}.npy" for n in ("layers.6.mlp", "half") for i in (0, 1)} | {module.NAMES}
    assert np.load(tmp_path / "layers.6.mlp-step1.npy").tolist() == [0, 1, 2]
    stored = np.load(tmp_path / "half-step0.npy")
    assert stored.dtype == np.float32 and stored.tolist() == half.tolist()
    files = json.loads((tmp_path / module.NAMES).read_text())["files"]
    assert files["layers.6.mlp"] == {"name": "layers/6/mlp", "dtype": "int64"}
    assert files["half"]["dtype"] == "bfloat16" and "float32" in files["half"]["note"]


def test_numpy_files_of_steps_with_other_tensors_keep_their_names(tmp_path: Path) -> None:
    with glass.compat.StepFiles(tmp_path, formats=("npy",)) as files:
        for step, tensors in enumerate(({"a/b": 0, "first": 1}, {"a.b": 2}, {"a.b": 3, "a/b": 4})):
            files(session(step, **{name: torch.tensor(value) for name, value in tensors.items()}))
    notes = json.loads((tmp_path / module.NAMES).read_text())["files"]
    stems = {note["name"]: stem for stem, note in notes.items()}
    assert stems.keys() == {"a/b", "a.b", "first"} == {note["name"] for note in notes.values()}
    for name, step, value in (("a/b", 0, 0), ("first", 0, 1), ("a.b", 1, 2), ("a.b", 2, 3), ("a/b", 2, 4)):
        assert int(np.load(tmp_path / f"{stems[name]}-step{step}.npy")) == value


@pytest.mark.parametrize("fmt", ["pt", "txt", "npy"])
def test_names_never_become_paths(tmp_path: Path, fmt: str) -> None:
    hostile = [
        "../../escape",
        "/etc/escape",
        "..",
        ".",
        "a/b",
        "a.b",
        "A.B",
        "\u00e9 \u2603",
        "x" * 4096,
        "",
        "con\x00",
    ]
    tensors = {name: torch.tensor(float(index)) for index, name in enumerate(hostile)}
    write(tmp_path / "in" / "side", 0, formats=(fmt,), **tensors)
    assert all(name.startswith("in/side/") and name.count("/") == 2 for name in names(tmp_path))
    directory = tmp_path / "in" / "side"
    if fmt == "npy":
        files = json.loads((directory / module.NAMES).read_text())["files"]
        assert len({stem.lower() for stem in files}) == len(hostile)
        found = {entry["name"]: float(np.load(directory / f"{stem}-step0.npy")) for stem, entry in files.items()}
        assert found == {name: float(tensor) for name, tensor in tensors.items()}
    elif fmt == "pt":
        assert load(directory / "step0.pt") == tensors


def test_files_of_an_earlier_run_are_moved_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0, 1, 2, formats=("pt", "txt", "npy"))
    ours = names(tmp_path)
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / "step0.pt").write_text("of rank 1")
    foreign = {"step0.pt.bak", "notes.txt", "stepx.pt", "sub/step0.pt"}
    (tmp_path / "sub").mkdir()
    for name in foreign:
        (tmp_path / name).write_text("mine")
    with caplog.at_level(logging.WARNING, "glassengine"):
        write(tmp_path, 0)
    assert "earlier-001" in caplog.text
    moved = {f"earlier-001/{name}" for name in ours | {"rank1/step0.pt"}}
    assert names(tmp_path) == {"step0.pt"} | foreign | moved
    assert float(load(tmp_path / "earlier-001/step2.pt")["x"]) == 2
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    write(tmp_path, 0, 1)
    assert names(tmp_path) == {"step0.pt", "step1.pt", "earlier-002/step0.pt"} | foreign | moved


def test_an_earlier_run_stays_where_it_is_until_there_is_a_step(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with glass.compat.StepFiles(tmp_path):
        pass
    assert names(tmp_path) == {"step0.pt"}


def test_links_are_replaced_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_text("mine")
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "step0.pt").symlink_to(outside)
    (directory / "rank3").symlink_to(tmp_path)
    write(directory, 0)
    assert outside.read_text() == "mine" and float(load(directory / "step0.pt")["x"]) == 0
    assert (directory / "earlier-001" / "rank3").is_symlink()


def test_ranks_have_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "rank2").mkdir()
    (tmp_path / "rank2" / "step9.pt").write_text("of an earlier run with more ranks")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        write(tmp_path, 0)
    # Rank 0 came last and has moved what no rank of this run writes, and not what rank 1 had just written.
    assert names(tmp_path) == {"step0.pt", "rank1/step0.pt", "earlier-001/rank2/step9.pt"}
    monkeypatch.setenv("RANK", "1")
    write(tmp_path, 0)
    assert {"rank1/step0.pt", "rank1/earlier-001/step0.pt"} <= names(tmp_path)
    monkeypatch.setenv("RANK", "of another launcher")
    write(tmp_path / "other", 0)
    assert names(tmp_path / "other") == {"step0.pt"}
    # A rank without a known number of ranks cannot tell whose the other directories are.
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "0")
    write(tmp_path, 0)
    assert "rank1/step0.pt" in names(tmp_path)


def test_a_disk_that_fills_up_keeps_the_run_and_the_complete_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = torch.save

    def fill_up(value: Any, path: Path) -> None:
        save(value, path)
        if float(value["input_ids"].sum()) and len(list(tmp_path.glob("step*.pt"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(module.torch, "save", fill_up)
    expected = engine.generate(PROMPT, max_new_tokens=4)
    made = None
    full = pytest.raises(UsageError, match=r"from step 2 on\n.*No space left")
    with full as error, glass.compat.StepFiles(tmp_path, formats=["pt"]) as files:
        made = engine.generate(PROMPT, max_new_tokens=4, debug=True, on_step=files)
    assert made is not None and made.texts == expected.texts
    assert "2 steps were written" in str(error.value) and "--debug-dir" in str(error.value)
    assert "No space left" in caplog.text
    assert names(tmp_path) == {"step0.pt", "step1.pt"}


def test_errors_of_torch_on_a_full_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(UsageError, match="File too large"):
            write(tmp_path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == set()


def test_an_interrupt_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0)

    def interrupt(value: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module.torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 0)
    assert names(tmp_path) == {"earlier-001/step0.pt"}


def test_refusals_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no/such")):
        with (
            pytest.raises(UsageError, match=r"cannot be written\n(.*\n)*.*--debug-dir"),
            glass.compat.StepFiles(directory),
        ):
            pass
    with pytest.raises(UsageError, match=r"format.*\n.*csv\n.*pt, txt, npy"):
        glass.compat.StepFiles(tmp_path, formats=["pt", "csv"])


def test_two_runs_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    with glass.compat.StepFiles(tmp_path, formats=["pt"]) as files:
        files(session(0, x=torch.tensor([1.0])))
        with pytest.raises(UsageError, match=r"another run is writing.*\n.*\n.*--debug-dir"):
            write(tmp_path, 0, 1)
        files(session(1, x=torch.tensor([1.0])))
    assert names(tmp_path) == {"step0.pt", "step1.pt"} and load(tmp_path / "step0.pt")["x"].item() == 1
    write(tmp_path, 0)
    assert "earlier-001/step1.pt" in names(tmp_path)


def test_a_session_that_keeps_nothing_is_an_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="debug=True"), glass.compat.StepFiles(tmp_path) as files:
        engine.generate(PROMPT, max_new_tokens=1, on_step=files)
