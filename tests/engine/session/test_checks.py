"""The table of inputs: everything that does not fit in one message, and nothing else costs a decode step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from glassengine.engine import Engine
from glassengine.engine.session.checks import InputRow, check_prompts, refuse, render, render_tensors, results_of
from glassengine.errors import CorruptError, UsageError


def refused(engine: Engine, ids: Any, mask: Any, length: int) -> UsageError:
    with pytest.raises(UsageError, match="the inputs do not fit the engine 'tiny'") as caught:
        check_prompts(engine.manifest, ids, mask, length=length)
    return caught.value


def test_everything_wrong_is_in_one_table(engine: Engine) -> None:
    ids = torch.full((9, 140), 999)
    mask = torch.ones((9, 140), dtype=torch.float32)
    error = refused(engine, ids, mask, 150)
    lines = [re.split(r"  +", line) for line in str(error.got).strip().splitlines()]
    assert lines[0] == ["input", "dtype", "device", "shape", "built for", "problem", "to do"]
    assert [line[0] for line in lines[1:]] == ["batch size", "length", "input_ids", "attention_mask"]
    batch, length, tokens, attention = lines[1:]
    assert batch[3:] == ["9", "1..8", "9 sequences, at most 8", "build with --max-batch-size 9"]
    assert length[4:6] == ["1..128", "prompt and new tokens are 150 tokens, at most 128"]
    assert tokens[1:4] == ["int64", "cpu", "[9, 140]"] and "999" in tokens[5] and "--tokenizer" in tokens[6]
    assert tokens[4].startswith("int64 cpu [1..8, 1..128], ids 0..")
    assert attention[1:4] == ["float32", "cpu", "[9, 140]"] and attention[5].startswith("dtype must be")
    for fix in ("--max-batch-size 9", "--max-seq-len 150", "--max-new-tokens", "--tokenizer", ".to(torch.int64)"):
        assert fix in str(error.hint)


def test_inputs_that_fit_are_shown_as_fitting(engine: Engine) -> None:
    error = refused(engine, torch.zeros((2, 3), dtype=torch.int64), torch.ones((2, 3), dtype=torch.int64), 200)
    rows = [line for line in str(error.got).splitlines() if re.search(r" ok$", line)]
    assert [row.split()[0] for row in rows] == ["batch", "input_ids", "attention_mask"]


def test_nothing_is_said_when_all_fits(engine: Engine) -> None:
    check_prompts(
        engine.manifest, torch.zeros((2, 3), dtype=torch.int64), torch.ones((2, 3), dtype=torch.int64), length=128
    )


def test_table() -> None:
    rows = [
        InputRow("a", "int64", "cpu", "[1]", "int64 cpu [2]", "too small", "pass more"),
        InputRow("bb", "-", "-", "3", "1..4"),
    ]
    assert render(rows).splitlines() == [
        "input  dtype  device  shape  built for      problem    to do",
        "a      int64  cpu     [1]    int64 cpu [2]  too small  pass more",
        "bb     -      -       3      1..4           ok",
    ]
    refuse("e", rows[1:])
    with pytest.raises(UsageError) as caught:
        refuse("e", rows)
    assert caught.value.hint == "pass more"


def test_values_are_never_printed() -> None:
    text = render_tensors({"x": torch.full((2,), 123456.0)})
    assert text.splitlines() == ["input  dtype    device  shape", "x      float32  cpu     [2]"]


def test_decode_steps_of_generate_check_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from glassengine.engine.session import session

    checked: list[int] = []
    row = session.token_row
    monkeypatch.setattr(session, "token_row", lambda *a, **k: (checked.append(1), row(*a, **k))[1])
    engine.generate(input_ids=[[5, 6]], max_new_tokens=6, eos_token_id=None)
    assert len(checked) == 1  # the prefill


def test_s11_a_result_that_is_not_there(engine: Engine) -> None:
    one, two = torch.ones(1), torch.zeros(1)
    first = engine.manifest.outputs[0]
    manifest = dataclasses.replace(engine.manifest, outputs=(first, dataclasses.replace(first, name="state")))
    outputs, inputs = {first.name: one}, {"past": two}
    found = results_of(manifest, outputs, inputs, {"state": "past"})
    assert found[first.name] is one and found["state"] is two
    with pytest.raises(CorruptError, match="gives no 'state'"):
        results_of(manifest, outputs, inputs, {})
