"""Sessions: prefill and decode over the static cache, padding, debug buffers, and what they refuse."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine, build_program
from glassengine.engine.build.build import settings_of
from glassengine.engine.build.write import write_engine
from glassengine.engine.prompts import pad_left
from glassengine.engine.session import session as session_module
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program import Program

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
# Of Inductor, test_tokens_of_transformers shows tokens and buffers always.
NAMES = ["engine", pytest.param("inductor_engine", marks=pytest.mark.slow)]


def reference(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of a plain forward without cache."""
    with torch.no_grad():
        result: torch.Tensor = model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits
    return result


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_model(name: str, model: Any, request: pytest.FixtureRequest) -> None:
    session = request.getfixturevalue(name).session(2, 10)
    ids, mask = pad_left(ROWS, 0)
    assert session.step == -1
    logits = [session.prefill(ids, mask)]
    for tokens in ([20, 21], [22, 23], [24, 25], [26, 27]):  # forced
        new = torch.tensor(tokens)
        logits.append(session.decode(new))
        ids = torch.cat([ids, new[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones((2, 1), dtype=torch.int64)], dim=1)
    assert (session.step, session.position) == (4, 10)
    expected = reference(model, ids, mask)
    actual = torch.cat(logits, dim=1)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_decode_takes_columns_too(engine: Engine) -> None:
    a, b = engine.session(1, 4), engine.session(1, 4)
    for session in (a, b):
        session.prefill(torch.tensor([[5, 6]]))
    assert torch.equal(a.decode(torch.tensor([7])), b.decode(torch.tensor([[7]])))


@pytest.mark.parametrize("name", [*NAMES, "frozen_engine"])
def test_a_prefill_without_readers_makes_the_last_logits_alone(name: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(name)
    ids, mask = pad_left(ROWS, 0)
    all_logits = engine.session(2, 8).prefill(ids, mask)
    for chunk in (None, 4):
        session = engine.session(2, 8)
        found = session.prefill(ids, mask, keep=False, chunk=chunk)
        assert found.shape == (2, 1, all_logits.shape[2])
        torch.testing.assert_close(found, all_logits[:, -1:], rtol=1e-5, atol=1e-5)
        assert session.decode(found[:, -1].argmax(-1)).shape == found.shape
    assert engine.session(2, 8, debug=["logits"]).prefill(ids, mask, keep=False).shape == all_logits.shape


def test_an_engine_without_the_input_makes_all_logits(program: Program, tmp_path: Path) -> None:
    """As those that were built before."""
    settings = dataclasses.replace(settings_of(program, "eager"), all_logits=True)
    write_engine(program, tmp_path, "old", settings, None)
    engine = glass.load(tmp_path)
    assert not engine.makes_kept_logits
    ids, mask = pad_left(ROWS, 0)
    assert engine.session(2, 8).prefill(ids, mask, keep=False).shape[1] == 6
    assert engine.generate(input_ids=ROWS, max_new_tokens=2).num_steps == 2


def test_single_token_prompt(engine: Engine, model: Any) -> None:
    ids = torch.tensor([[9]])
    logits = engine.session(1, 1).prefill(ids)
    torch.testing.assert_close(logits, reference(model, ids, torch.ones_like(ids)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_debug_buffers_are_named_and_ordered_as_documented(name: str, request: pytest.FixtureRequest) -> None:
    session = request.getfixturevalue(name).session(2, 8, debug=True)
    ids, mask = pad_left(ROWS, 0)
    session.prefill(ids, mask)
    assert list(session.debug_buffers) == [
        "input_ids", "logits", "position_ids", "attention_mask", "cache_position",
        "past_key_0", "past_value_0", "present_key_0", "present_value_0",
        "past_key_1", "past_value_1", "present_key_1", "present_value_1",
        "model.layers.0.mlp", "model.layers.1.mlp", "mm_default", "head",
    ]  # fmt: skip
    first = dict(session.debug_buffers)
    kept = {key: value.clone() for key, value in first.items()}
    logits = session.decode(torch.tensor([20, 21]))
    second = session.debug_buffers
    # past is the value before the step, present the one after it; only the written slot differs
    assert not first["past_key_0"].any()
    for kind in ("key_0", "value_0", "key_1", "value_1"):
        assert torch.equal(second[f"past_{kind}"], first[f"present_{kind}"])
        changed = (second[f"past_{kind}"] != second[f"present_{kind}"]).any(-1).any(1)
        assert changed.nonzero().tolist() == [[0, 6], [1, 6]]
    assert second["input_ids"].tolist() == [[20], [21]]
    assert second["position_ids"].tolist() == [[6], [3]] and second["cache_position"].tolist() == [6]
    assert second["attention_mask"].tolist() == [[1] * 7 + [0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert torch.equal(second["head"], second["logits"]) and torch.equal(second["logits"], logits)
    assert second["mm_default"].shape == (2, 1, 64)
    # what the first step handed out is not touched by the second
    assert all(torch.equal(first[key], kept[key]) for key in first)
    second["logits"].add_(1).requires_grad_()


def test_debug_buffers_are_the_values_of_the_model(engine: Engine, model: Any) -> None:
    seen: dict[str, torch.Tensor] = {}
    hook = model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: seen.update(mlp=out))
    try:
        ids = torch.tensor([[5, 6, 7]])
        reference(model, ids, torch.ones_like(ids))
    finally:
        hook.remove()
    session = engine.session(1, 4, debug=["layers.1.mlp"])
    session.prefill(ids)
    assert list(session.debug_buffers) == ["model.layers.1.mlp"]
    torch.testing.assert_close(session.debug_buffers["model.layers.1.mlp"], seen["mlp"], rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_without_debug(engine: Engine) -> None:
    session = engine.session(1, 4)
    session.prefill(torch.tensor([[5]]))
    assert session.debug_buffers == {}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("past_key_1", ["past_key_1"]),
        ("past_*_0", ["past_key_0", "past_value_0"]),
        ("re:^present_key", ["present_key_0", "present_key_1"]),
        ("mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("mm_default", ["mm_default"]),
        ("linear", ["mm_default"]),
        ("q_proj/linear.0", ["mm_default"]),
        ("mm_default_*", ["model.layers.0.mlp", "model.layers.1.mlp", "head"]),
    ],
)
def test_debug_patterns(engine: Engine, pattern: str, names: list[str]) -> None:
    session = engine.session(1, 4, debug=[pattern])
    session.prefill(torch.tensor([[5]]))
    assert list(session.debug_buffers) == names


def test_debug_of_what_was_not_built(engine: Engine) -> None:
    with pytest.raises(UsageError, match="was not built as an output") as caught:
        engine.session(1, 4, debug=["layers.0.mlp.gate_proj"])
    assert "--add-output 'layers.0.mlp.gate_proj'" in str(caught.value.hint)


def test_debug_of_an_unknown_name(engine: Engine) -> None:
    with pytest.raises(UnknownNameError, match=r"nearest: .*past_key_0"):
        engine.session(1, 4, debug=["pst_key_0"])


@pytest.mark.parametrize("size", [0, 9])
def test_batch_that_does_not_fit(engine: Engine, size: int) -> None:
    with pytest.raises(UsageError, match="sequences") as caught:
        engine.session(size, 4)
    assert size == 0 or "--max-batch-size 9" in str(caught.value.hint)


def test_length_that_does_not_fit(engine: Engine) -> None:
    with pytest.raises(UsageError, match="prompt and new tokens are 129 tokens, at most 128") as caught:
        engine.session(1, 129)
    assert "--max-seq-len 129" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (torch.zeros((1, 2), dtype=torch.int64), "1 sequences in a session of 2"),
        (torch.zeros((2, 2), dtype=torch.int32), r"dtype must be int64 +pass \.to\(torch\.int64\)"),
        (torch.zeros((2, 0), dtype=torch.int64), "0 tokens a sequence instead of at least 1"),
        (torch.zeros(2, dtype=torch.int64), "1 dimensions instead of 2"),
        (torch.zeros((2, 2), dtype=torch.int64, device="meta"), r"must be on the CPU +pass \.cpu\(\)"),
        (torch.zeros((2, 5), dtype=torch.int64), "the cache of the session is full: 5 more tokens, 4 slots left"),
        ([[1, 2], [3, 4]], "no tensor"),
    ],
    ids=["batch", "dtype", "empty", "dimensions", "device", "length", "list"],
)
def test_tokens_that_do_not_fit(engine: Engine, ids: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=r"input_ids .* int64 cpu \[2, 1\.\.4\], ids 0\.\.258 +" + problem):
        engine.session(2, 4).prefill(ids)


@pytest.mark.parametrize("token", [-1, 259])
def test_tokens_outside_of_the_vocabulary(engine: Engine, token: int) -> None:
    session = engine.session(1, 4)
    with pytest.raises(UsageError, match="0 to 258"):
        session.prefill(torch.tensor([[3, token]]))
    session.prefill(torch.tensor([[3]]))
    with pytest.raises(UsageError, match="--tokenizer"):
        session.decode(torch.tensor([token]))


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ([[1, 0]], "padding on the right +padding on the left"),
        ([[1, 1, 1]], r"another shape than the token ids +pass \[1, 2\]"),
        ([[1.0, 1.0]], "dtype must be a whole number or bool"),
        ([[2, 1]], "values other than 0 and 1"),
    ],
    ids=["side", "shape", "dtype", "values"],
)
def test_mask_that_does_not_fit(engine: Engine, mask: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"input_ids .* ok\n *attention_mask .*{problem}"):
        engine.session(1, 4).prefill(torch.tensor([[3, 4]]), torch.tensor(mask))


def test_mask_of_booleans(engine: Engine) -> None:
    ids, mask = pad_left(ROWS, 0)
    a, b = engine.session(2, 8), engine.session(2, 8)
    assert torch.equal(a.prefill(ids, mask.bool()), b.prefill(ids, mask))


def test_order_of_calls(engine: Engine) -> None:
    session = engine.session(1, 3)
    with pytest.raises(UsageError, match=r"call prefill\(\) before decode\(\)"):
        session.decode(torch.tensor([1]))
    session.prefill(torch.tensor([[3, 4]]))
    with pytest.raises(UsageError, match="prefilled already"):
        session.prefill(torch.tensor([[3, 4]]))
    session.decode(torch.tensor([5]))
    with pytest.raises(UsageError, match="cache of the session is full"):
        session.decode(torch.tensor([6]))


def test_engine_of_a_module_has_no_session(tmp_path: Path) -> None:
    import glassengine as glass

    module = glass.build(torch.nn.Linear(2, 2), backend="eager", inputs={"input": torch.zeros(3, 2)})
    with pytest.raises(UsageError, match="no prefill and decode"):
        module.session(1, 4)


def test_ring_of_the_last_steps(engine: Engine) -> None:
    session = engine.session(1, 8, debug=["logits", "layers.0.mlp"], keep_steps=3)
    session.prefill(torch.tensor([[5, 6]]))
    seen = [session.debug_buffers]
    for token in (7, 8, 9, 10):
        session.decode(torch.tensor([token]))
        seen.append(session.debug_buffers)
    assert [step for step, _ in session.debug_history] == [2, 3, 4]
    assert all(buffers is seen[step] for step, buffers in session.debug_history)
    assert list(session.debug_history[0][1]) == ["logits", "model.layers.0.mlp"]
    # what was dropped is gone from memory, once nobody else holds it
    dropped = weakref.ref(seen[0]["logits"])
    seen.clear()
    assert dropped() is None


def test_ring_is_off_by_default(engine: Engine) -> None:
    session = engine.session(1, 4, debug=True)
    session.prefill(torch.tensor([[5, 6]]))
    assert len(session.debug_history) == 0


def test_ring_reaches_an_observer(engine: Engine) -> None:
    steps: list[list[int]] = []
    engine.generate(
        input_ids=[[5]], max_new_tokens=4, eos_token_id=None, debug=["logits"], keep_steps=2,
        on_step=lambda session: steps.append([step for step, _ in session.debug_history]),
    )  # fmt: skip
    assert steps == [[0], [0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("arguments", [{"keep_steps": 2}, {"keep_steps": -1, "debug": True}])
def test_ring_of_nothing(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--debug PATTERN"):
        engine.session(1, 4, **arguments)


def test_only_what_was_asked_for_is_copied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Size] = []
    copy = session_module._copy
    monkeypatch.setattr(session_module, "_copy", lambda tensor: (copied.append(tensor.shape), copy(tensor))[1])
    session = engine.session(1, 4, debug=["layers.1.mlp"])
    session.prefill(torch.tensor([[5, 6]]))
    assert copied == [(1, 2, 64)]


def test_inputs_of_each_step_are_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "glassengine"):
        session = engine.session(1, 4)
        session.prefill(torch.tensor([[5, 6]]))
        session.decode(torch.tensor([7]))
    tables = [record.getMessage() for record in caplog.records if record.getMessage().startswith("inputs of step")]
    assert [table.splitlines()[0] for table in tables] == ["inputs of step 0:", "inputs of step 1:"]
    lines = [line.split() for line in tables[1].splitlines()]
    assert ["input_ids", "int64", "cpu", "[1,", "1]"] in lines
    assert ["past_key_0", "float32", "cpu", "[1,", "2,", "4,", "16]"] in lines
    caplog.clear()
    with caplog.at_level(logging.INFO, "glassengine"):
        engine.session(1, 4).prefill(torch.tensor([[5, 6]]))
    assert caplog.text == ""


def test_casts_on_reading(program: Program, tmp_path: Path) -> None:
    outputs = ["model.layers.0.mlp=own", "model.layers.0.mlp=wide:float64"]
    engine = build_program(program, tmp_path / "e", backend="eager", outputs=outputs)
    session = engine.session(1, 4, debug=["own", "wide"])
    session.prefill(torch.tensor([[5, 6]]))
    own, wide = session.debug_buffers["own"], session.debug_buffers["wide"]
    assert (own.dtype, wide.dtype) == (torch.float32, torch.float64) and torch.equal(own.double(), wide)


def test_an_engine_keeps_the_program_it_was_built_from(program: Program, tmp_path: Path) -> None:
    engine = build_program(program, tmp_path / "e", backend="eager", outputs=["re:^model.layers.0.self_attn/view"])
    (tmp_path / "e" / "program.pt2").unlink()  # nothing is read back
    session = engine.session(1, 4, debug=["self_attn/view.*"])
    session.prefill(torch.tensor([[5, 6]]))
    assert session.debug_buffers and engine.program is program
