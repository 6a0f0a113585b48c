"""Records of other token ids are refused, and the class of the difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.compare.compare import compare
from glassengine.errors import IncomparableError
from glassengine.recording.write.writer import RecordingWriter

IDS = [1, 20, 30, 40, 50, 60]
SAMPLING = {"do_sample": False, "temperature": 1.0, "bos_token_id": 1}


def recorded(path: Path, ids: list[int], **metadata: Any) -> Path:
    with RecordingWriter(path, metadata=metadata) as writer:
        writer.write("a", 0, torch.ones(3))
        writer.commit(0, token_ids=[ids])
    return path


@pytest.mark.parametrize(
    ("ids", "ours", "theirs", "words"),
    [
        ([1, *IDS], {}, {}, r"row 0: BOS twice: the candidate begins with \[1, 1, 20"),
        ([7, *IDS], {}, {}, r"one id more at the front: the candidate begins with \[7, 1"),
        (IDS[1:], {"sampling": SAMPLING}, {}, r"no BOS: the baseline begins with \[1, 20"),
        (IDS[1:], {}, {}, r"one id fewer at the front"),
        ([1, 20, 31, 41, 50], {}, {}, r"from position 2 on, \[30, 40, 50, 60\] in the baseline, \[31, 41, 50\] in"),
        (IDS[:4], {}, {}, r"from position 4 on, \[50, 60\] in the baseline, nothing in the candidate"),
        (
            [1, 20, 9],
            {"prompt": "x y"},
            {"prompt": "x z"},
            r"the texts of the prompts differ: 'y', in the candidate 'z'",
        ),
        (
            [1, 20, 9],
            {"prompt": "x y"},
            {"prompt": "x y"},
            r"the text of the prompt is the same: the tokenizers differ",
        ),
        (
            [*IDS[:5], 61],
            {"prompt_lengths": [4], "sampling": SAMPLING},
            {"prompt_lengths": [4], "sampling": {**SAMPLING, "do_sample": True}},
            r"the prompts are the same, generated token 1 is another: [^$]*do_sample False in the baseline, True in",
        ),
    ],
)
def test_the_class_is_named(
    ids: list[int], ours: dict[str, Any], theirs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    x, y = recorded(tmp_path / "x", IDS, **ours), recorded(tmp_path / "y", ids, **theirs)
    with pytest.raises(IncomparableError, match=words) as refused:
        compare(x, y)
    is_generated = "the prompts are the same" in words
    assert ("--tokens-of" if is_generated else "glass check-prompt") in str(refused.value.hint)


def test_other_settings_on_the_same_ids_are_a_note(tmp_path: Path) -> None:
    x = recorded(tmp_path / "x", IDS, sampling=SAMPLING)
    y = recorded(tmp_path / "y", IDS, sampling={**SAMPLING, "repetition_penalty": 1.1})
    result = compare(x, y)
    words = "the settings of generation differ: repetition_penalty not set in the baseline, 1.1 in the candidate"
    assert result.ok and result.notes == (words,)
    assert compare(x, x).notes == () and compare(x, recorded(tmp_path / "z", IDS)).notes == ()
