"""A batch of 3 prompts of different lengths, left-padded: the tokens of transformers for each, alone and in the batch.

64 new tokens in float32, on both compiled back-ends; in one piece and with the prefill in pieces. One family on ONNX
Runtime and another one on Inductor always; the other builds, among them one with a sliding window, are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.backends.inductor import backend as inductor
from glassengine.engine import Engine
from glassengine.engine.prompts import pad_left
from glassengine.testing import models

NEW = 64
LENGTHS = (19, 7, 2)
MARGIN = 1e-4
"""Difference of the two best logits within which the rounding of another back-end may swap them."""

ALWAYS = {("qwen3", "onnxruntime")}
BUILDS = [
    pytest.param(
        (family, backend), id=f"{family}-{backend}", marks=() if (family, backend) in ALWAYS else pytest.mark.slow
    )
    for family in ("llama", "gpt2", "qwen3", "gemma3")
    for backend in ("inductor", "onnxruntime")
]


class Case:
    """A model, its engine, and prompts."""

    def __init__(self, family: str, backend: str, directory: Path) -> None:
        # What takes long is Inductor: one layer takes it half as long, and every op three times as long as the modules
        # within a layer and one op.
        layers = {"num_hidden_layers": 1} if (family, backend) == ("llama", "inductor") else {}
        self.model: Any = models.CAUSAL_LMS[family](**layers)
        outputs = ["*.0.*", "lm_head/linear.0"]
        with pytest.MonkeyPatch.context() as patch:
            # Weights outside: steps of one token have a package of their own.
            patch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0 if layers else inductor.FREEZE_LIMIT_BYTES)
            self.engine: Engine = glass.build(
                self.model, directory, backend=backend, add_output=outputs, max_batch_size=3, max_seq_len=96
            )
        assert (directory / "main" / "one_token.pt2").is_file() == bool(layers)
        generator = torch.Generator().manual_seed(17)
        self._expected: dict[str, list[list[int]]] = {}
        self.rows = [torch.randint(3, 256, (size,), generator=generator).tolist() for size in LENGTHS]

    def expected(self, rows: list[list[int]]) -> list[list[int]]:
        """Return what transformers generates, which is asked for in each test."""
        if str(rows) not in self._expected:
            self._expected[str(rows)] = self._generated(rows)
        return self._expected[str(rows)]

    def _generated(self, rows: list[list[int]]) -> list[list[int]]:
        ids, mask = pad_left(rows, 0)
        with torch.no_grad():
            made = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
            )
        return [row[ids.shape[1] :].tolist() for row in made]

    def made(self, rows: list[list[int]], **options: Any) -> tuple[tuple[int, ...], ...]:
        """Return what the engine generates."""
        return self.engine.generate(input_ids=rows, max_new_tokens=NEW, eos_token_id=None, **options).token_ids


def agrees(model: Any, prompt: list[int], actual: tuple[int, ...], expected: list[int]) -> None:
    """Assert equal tokens; the first that differs may only be a tie, as the model itself sees it."""
    assert len(actual) == len(expected) == NEW
    first = next((i for i in range(NEW) if actual[i] != expected[i]), None)
    if first is not None:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + expected[:first]])).logits[0, -1]
        assert abs(float(logits[actual[first]] - logits[expected[first]])) < MARGIN, f"token {first}"


@pytest.fixture(scope="module", params=BUILDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, backend = request.param
    yield Case(family, backend, tmp_path_factory.mktemp("tokens") / "engine")


@pytest.mark.parametrize("chunk", [None, 5, 18], ids=["whole", "pieces of 5", "a piece of 1 at the end"])
def test_left_padded_batch(case: Case, chunk: int | None) -> None:
    # In pieces of 5, the first three of the shortest prompt are nothing but padding.
    actual = case.made(case.rows, prefill_chunk=chunk)
    together = case.expected(case.rows)
    for row, prompt in enumerate(case.rows):
        agrees(case.model, prompt, actual[row], together[row])
        agrees(case.model, prompt, actual[row], case.expected([prompt])[0])
        agrees(case.model, prompt, case.made([prompt])[0], together[row])


def test_pieces_are_one_step_to_whoever_looks(case: Case) -> None:
    ids, mask = pad_left(case.rows, 0)
    sessions = [case.engine.session(3, 24, debug=True) for _ in range(2)]
    for session, chunk in zip(sessions, (None, 5), strict=True):
        session.prefill(ids, mask, chunk=chunk)
        assert (session.step, session.position) == (0, 19)
    whole, pieces = (session.debug_buffers for session in sessions)
    assert list(whole) == list(pieces) and len(whole) > 15
    real = mask.bool()
    for name, value in whole.items():
        other = pieces[name]
        assert (other.shape, other.dtype) == (value.shape, value.dtype), name
        assert not value.is_floating_point() or torch.isfinite(other).all(), name
        if value.shape[:2] == real.shape and value.dim() == 3:
            value, other = value[real], other[real]
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert not pieces["past_key_0"].any()
    decoded = [session.decode(torch.tensor([9, 8, 7])) for session in sessions]
    torch.testing.assert_close(decoded[1], decoded[0], rtol=1e-4, atol=1e-4)
    assert sessions[1].debug_buffers["logits"].shape == (3, 1, 256)


def test_another_token_is_no_tie() -> None:
    # Planted: one token of 64 is the second best instead of the best.
    model: Any = models.llama()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
    expected = made.sequences[0, 3:].tolist()
    agrees(model, [5, 6, 7], tuple(expected), expected)
    wrong = [*expected[:40], int(made.logits[40][0].topk(2).indices[1]), *expected[41:]]
    with pytest.raises(AssertionError, match="token 40"):
        agrees(model, [5, 6, 7], tuple(wrong), expected)


def test_debug_buffers_have_the_documents_names_on_each_backend(case: Case) -> None:
    session = case.engine.session(3, 40, debug=True)
    ids, mask = pad_left(case.rows, 0)
    session.prefill(ids, mask)
    first = session.debug_buffers
    caches = {name: first[name].clone() for name in first if name.startswith("present_")}
    logits = session.decode(torch.tensor([5, 6, 7]))
    second = session.debug_buffers
    count = len(case.engine.manifest.caches) // 2
    names = [f"{when}_{kind}_{i}" for i in range(count) for when in ("past", "present") for kind in ("key", "value")]
    fixed = ["input_ids", "logits", "position_ids", "attention_mask", "cache_position"]
    assert list(second)[: len(fixed) + len(names)] == [*fixed, *names]
    assert torch.equal(second["logits"], logits)
    for name, before in caches.items():
        # The next step's past is this step's present, which the next step has left alone.
        assert torch.equal(first[name], before)
        assert torch.equal(second[name.replace("present", "past")], before)
        assert not torch.equal(second[name], before)
