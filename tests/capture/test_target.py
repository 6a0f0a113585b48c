"""Recording on another recording's tokens: the two can be compared, whatever each model would have chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import commands
from glassengine.capture.target import KnownTokens
from glassengine.cli.main import main
from glassengine.errors import IncomparableError, UsageError
from glassengine.recording.write.writer import RecordingWriter
from glassengine.testing import models

IDS = torch.tensor([[0, 0, 17, 200, 9, 33], [5, 91, 14, 3, 77, 120]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}

FACTORIES = """
import torch
from glassengine.testing import models

def baseline():
    return models.llama()

def candidate():
    model = models.llama()
    model.lm_head.weight.data.neg_()  # what was likeliest is now the least likely
    return model

def inputs():
    ids = torch.tensor([[0, 0, 17, 200, 9, 33], [5, 91, 14, 3, 77, 120]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}
"""


def tokens_of(path: Path) -> list[list[int]]:
    found: list[list[int]] = glass.Recording.open(path).metadata["token_ids"]
    return found


def negated() -> nn.Module:
    """Return a model that chooses otherwise in every step."""
    model = models.llama()
    model.lm_head.weight.data.neg_()  # type: ignore[operator, union-attr]
    return model


def test_the_flag_that_the_refusal_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(FACTORIES)
    given = ["--inputs", f"{tmp_path}/net.py:inputs", "--max-new-tokens", "4"]
    a, b = tmp_path / "a", tmp_path / "b"
    for side, path in (("baseline", a), ("candidate", b)):
        assert main(["record", f"{tmp_path}/net.py:{side}", *given, "-o", str(path)]) == 0
    assert main(["compare", str(a), str(b)]) == 4
    hint = f"glass record TARGET --tokens-of {a}"
    assert hint in " ".join(capsys.readouterr().err.split())
    # As the hint says; the recording has the prompts too.
    command = hint.split()[1:]
    command[1] = f"{tmp_path}/net.py:candidate"
    assert main([*command, "-o", str(b), "--overwrite"]) == 0
    assert tokens_of(a) == tokens_of(b)
    result = glass.compare(a, b)
    assert result.first_divergence is not None and result.first_divergence.site == "lm_head"
    assert result.counts["missing_steps"] == 0
    assert {p.verdict for p in result.pairs if p.site.startswith("model.layers")} == {"identical"}


def test_rows_that_ended_and_prompts_one_after_the_other(tmp_path: Path) -> None:
    """A row that ended is given padding from then on; a run that ended early is followed for its steps."""
    batches = [INPUTS, {"input_ids": IDS[1:, :3]}]
    model = models.llama()
    first = model.generate(**INPUTS, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    model.generation_config.eos_token_id = int(first[0, 7])  # type: ignore[union-attr]
    commands.record_target(model, tmp_path / "a", inputs=batches, max_new_tokens=5)
    commands.record_target(negated(), tmp_path / "b", inputs=batches, tokens_of=tmp_path / "a")
    assert tokens_of(tmp_path / "a") == tokens_of(tmp_path / "b")
    assert glass.Recording.open(tmp_path / "a").steps == glass.Recording.open(tmp_path / "b").steps
    # With a noise floor, its runs take the same tokens.
    commands.record_target(
        negated(), tmp_path / "c", inputs=batches, tokens_of=tmp_path / "a", then=commands.measure_noise_floor
    )
    result = glass.compare(tmp_path / "c", tmp_path / "b")
    assert result.ok and result.calibration == f"calibrated by the floor of {tmp_path / 'c'}"


def test_a_recording_of_one_forward_each(tmp_path: Path) -> None:
    commands.record_target(models.llama(), tmp_path / "a", inputs=INPUTS)
    found = commands.record_target(negated(), tmp_path / "b", inputs=INPUTS, tokens_of=tmp_path / "a")
    assert found.num_steps == 1 and tokens_of(tmp_path / "a") == tokens_of(tmp_path / "b")


def test_other_prompts_and_no_tokens_are_refused(tmp_path: Path) -> None:
    commands.record_target(models.llama(), tmp_path / "a", inputs=INPUTS, max_new_tokens=2)
    with pytest.raises(IncomparableError, match="other prompts"):
        commands.record_target(negated(), tmp_path / "b", inputs={"input_ids": IDS[1:] + 1}, tokens_of=tmp_path / "a")
    with pytest.raises(UsageError, match="no tokens"):
        commands.record_target(models.vision(), tmp_path / "b", inputs=models.vision_inputs(), tokens_of=tmp_path / "a")
    commands.record_target(models.vision(), tmp_path / "image", inputs=models.vision_inputs())
    with pytest.raises(UsageError, match="has no tokens"):
        KnownTokens(tmp_path / "image")
    assert not (tmp_path / "b").exists()


def test_prompts_of_a_recording_that_says_how_long_they_were(tmp_path: Path) -> None:
    """As those of engines do."""
    writer = RecordingWriter(tmp_path / "a", metadata={"prompt_lengths": [2, 3]})
    writer.commit(0, token_ids=[[7, 8], [4, 5, 6]])
    writer.commit(1, token_ids=[[1], [2]])
    writer.close()
    known = KnownTokens(tmp_path / "a")
    prompts = known.prompts()
    assert prompts["input_ids"].tolist() == [[0, 7, 8], [4, 5, 6]]
    assert prompts["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert known.following([prompts])[0].tolist() == [[1], [2]]
