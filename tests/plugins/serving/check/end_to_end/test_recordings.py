"""Serving engines that are recorded first and judged afterwards, and engines that are given several prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import glassengine as glass
from glassengine import commands
from glassengine.errors import IncomparableError, UsageError
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.recording.reader import Recording
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module: Any = FAMILIES["llama"]().eval()
    path = tmp_path_factory.mktemp("recorded")
    save_checkpoint(module, path / "checkpoint")
    write_gguf(module, path / "plain.gguf")
    write_gguf(module, path / "base.gguf", rope_freq_base=20000.0)
    (path / "ids.json").write_text(json.dumps({"input_ids": [[5, 6, 7, 8, 9]]}))
    return path


def test_a_recording_is_judged_without_the_engine(folder: Path, tmp_path: Path) -> None:
    ids = str(folder / "ids.json")
    assert commands.is_served(f"gguf:{folder}/base.gguf") and not commands.is_served(str(folder / "checkpoint"))
    made = commands.record_served(f"gguf:{folder}/base.gguf", tmp_path / "rec", inputs=ids, max_new_tokens=2)
    assert made.ok and made.num_steps == 2 and made.num_tensors > 50
    found = glass.check(folder / "checkpoint", candidate=tmp_path / "rec")
    assert not found.ok and [level.name for level in found.levels] == ["weights", "program", "record"]
    assert any("freq_base is 20000" in hint.text for hint in found.first_divergence.hints)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="exists"):
        commands.record_served(f"gguf:{folder}/base.gguf", tmp_path / "rec", inputs=ids)
    again = commands.record_served(
        f"gguf:{folder}/plain.gguf", tmp_path / "rec", tokens_of=str(tmp_path / "rec"), overwrite=True, as_deployed=True
    )
    assert again.num_steps == 2
    found = glass.check(folder / "checkpoint", candidate=tmp_path / "rec")
    assert found.ok and [level.name for level in found.levels] == ["weights", "program", "record as deployed"]


def test_a_recording_that_names_no_layout_is_given_one(folder: Path, tmp_path: Path) -> None:
    commands.record_served(f"gguf:{folder}/plain.gguf", tmp_path / "rec", inputs=str(folder / "ids.json"))
    elsewhere(tmp_path / "rec")
    found = glass.check(folder / "checkpoint", candidate=tmp_path / "rec", layout="ggml", steps=0)
    assert found.ok and found.coverage == 1.0 and found.weights is None
    with pytest.raises(UsageError, match="layout"):
        glass.check(folder / "checkpoint", candidate=tmp_path / "rec", layout="sgl", steps=0)
    with pytest.raises(UsageError, match="--layout is for a recording"):
        glass.check(folder / "checkpoint", candidate=folder / "checkpoint", layout="ggml")


@pytest.mark.slow
def test_a_dump_of_one_forward_is_given_its_tokens(folder: Path, tmp_path: Path) -> None:
    ids = str(folder / "ids.json")
    commands.record_served(f"gguf:{folder}/plain.gguf", tmp_path / "rec", inputs=ids)
    recording = Recording.open(tmp_path / "rec")
    values = {one.site: recording.tensor(one).contiguous() for one in recording.entries}
    save_file(values, dump := tmp_path / "dump.safetensors")
    with pytest.raises(IncomparableError, match="on which tokens"):
        glass.check(folder / "checkpoint", candidate=dump, layout="ggml")
    found = glass.check(folder / "checkpoint", candidate=dump, layout="ggml", inputs=ids)
    assert found.ok and found.coverage == 1.0


def elsewhere(recording: Path) -> None:
    """Take from a recording what says by whom it was made."""
    manifest = next(path for path in recording.iterdir() if path.suffix == ".json")
    found = json.loads(manifest.read_text())
    for name in ("layout", "target", "architecture"):
        del found["metadata"][name]
    manifest.write_text(json.dumps(found))


@pytest.mark.slow
def test_each_prompt_of_a_file_is_run(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One.\nTwo and three.\n")
    found = glass.check(folder / "checkpoint", candidate=f"gguf:{folder}/plain.gguf", inputs=str(prompts), steps=1)
    assert found.ok and found.verdict == "rounding"
    assert [item.site for item in found.skipped if "one at a time" in item.reason] == ["prompts 0 and 1, left-padded"]


def test_prompts_of_several_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps({"input_ids": [[1, 2], [3, 4]]}))
    with pytest.raises(UsageError, match="one prompt"):
        commands.record_served(f"gguf:{folder}/plain.gguf", tmp_path / "rec", inputs=str(tmp_path / "two.json"))
    with pytest.raises(UsageError, match="needs token ids"):
        commands.record_served(f"gguf:{folder}/plain.gguf", tmp_path / "rec")
