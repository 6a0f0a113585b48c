"""An engine of a recurrent model: the tokens of transformers, states as caches, one step a token."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.testing.architectures import save_family

PROMPT = [[17, 80, 41, 99, 250, 7, 33], [60, 61, 62, 200, 3, 9, 120]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("mamba", tmp_path_factory.mktemp("mamba") / "mamba")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> glass.Engine:
    return glass.build(checkpoint, checkpoint.with_name("engine"), backend="eager", add_output=["layers.0.mixer=mixer"])


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    rows = [PROMPT[0], PROMPT[1][3:]]
    made = [model.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False)[0].tolist() for row in rows]
    return [tokens[len(row) :] for tokens, row in zip(made, rows, strict=True)]


def test_tokens_are_those_of_transformers(engine: glass.Engine, expected: list[list[int]]) -> None:
    # The second prompt is shorter: its padding must leave no trace in the states.
    found = engine.generate(input_ids=[PROMPT[0], PROMPT[1][3:]], max_new_tokens=6)
    assert [list(row) for row in found.token_ids] == expected
    assert found.num_steps == len(PROMPT[0]) + 5


def test_padding_leaves_no_trace(engine: glass.Engine) -> None:
    session = engine.session(1, 9, debug=True)
    session.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]]))
    padded = session.debug_buffers
    session = engine.session(1, 9, debug=True)
    session.prefill(torch.tensor([[7]]))
    for name in ("logits", "present_conv_0", "present_recurrent_1"):
        assert torch.equal(padded[name], session.debug_buffers[name]), name


def test_slots_that_are_empty_yet_hold_no_token(engine: glass.Engine) -> None:
    session = engine.session(1, 5, debug=True)
    masks = [
        session.debug_buffers["attention_mask"][0].tolist()
        for _ in session.prefill_steps(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 1]]))
    ]
    session.decode(torch.tensor([8]))
    masks.append(session.debug_buffers["attention_mask"][0].tolist())
    assert masks == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]


def test_states_are_debug_buffers(engine: glass.Engine) -> None:
    session = engine.session(2, 9, debug=True, keep_steps=9)
    session.prefill(torch.tensor(PROMPT))
    assert list(session.debug_buffers)[5:9] == [
        "past_conv_0",
        "past_recurrent_0",
        "present_conv_0",
        "present_recurrent_0",
    ]
    steps = [buffers for _, buffers in session.debug_history]
    assert len(steps) == len(PROMPT[0]) and not steps[0]["past_recurrent_0"].any()
    for before, after in itertools.pairwise(steps):
        assert torch.equal(before["present_recurrent_0"], after["past_recurrent_0"])


def test_every_token_of_the_prompt_is_recorded(engine: glass.Engine, tmp_path: Path) -> None:
    engine.generate(input_ids=PROMPT, max_new_tokens=2, record=tmp_path / "recording")
    recording = glass.Recording.open(tmp_path / "recording")
    assert recording.steps == list(range(len(PROMPT[0]) + 1))
    assert [row[: len(PROMPT[0])] for row in recording.metadata["token_ids"]] == PROMPT
    assert recording.tensor("backbone.layers.0.mixer", 3).shape == (2, 1, 64)


def test_sites_are_those_of_the_engine(engine: glass.Engine, checkpoint: Path) -> None:
    assert [site.name for site in glass.sites(checkpoint)] == [site.name for site in engine.sites]
    assert {site.name for site in engine.sites if site.kind == "kv"} == {
        f"backbone.layers.{layer}.mixer:kv.{kind}" for layer in (0, 1) for kind in ("conv", "recurrent")
    }
