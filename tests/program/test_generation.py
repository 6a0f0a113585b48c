"""Every kind of generation is recognized, exported, and has a way to be judged."""

from __future__ import annotations

import pytest
from torch import nn

from glassengine.diagnose.ladder.generations import JUDGED
from glassengine.program import export_programs, load_model
from glassengine.program.generation import (
    CAUSAL,
    ENCODER_DECODER,
    GENERATIONS,
    IMAGE_TEXT,
    PLAIN,
    RECURRENT,
    GenerationKind,
    generation_of,
)
from glassengine.testing.architectures import FAMILIES


@pytest.mark.parametrize(
    ("family", "generation", "kinds"),
    [
        ("llama", CAUSAL, ["causal_lm"]),
        ("mamba", RECURRENT, ["causal_lm"]),
        # The tests of engines with two programs build both kinds.
        pytest.param("t5", ENCODER_DECODER, ["module", "causal_lm"], marks=pytest.mark.slow),
        pytest.param("llava", IMAGE_TEXT, ["module", "causal_lm"], marks=pytest.mark.slow),
    ],
)
def test_a_model_is_exported_by_its_kind(family: str, generation: GenerationKind, kinds: list[str]) -> None:
    model = load_model(FAMILIES[family]())
    programs = export_programs(model)
    assert [program.kind for program in programs] == kinds
    assert generation.has_encoder == (len(programs) == 2) and programs[-1].generates == generation.generates


@pytest.mark.parametrize(
    ("family", "generation"),
    [("llama", CAUSAL), ("mamba", RECURRENT), ("t5", ENCODER_DECODER), ("llava", IMAGE_TEXT), ("bert", PLAIN)],
)
def test_a_model_is_recognized(family: str, generation: GenerationKind) -> None:
    assert load_model(FAMILIES[family]()).generation is generation


def test_what_is_no_model_of_transformers_is_plain() -> None:
    assert generation_of(nn.Linear(2, 2)) is PLAIN and load_model(nn.Linear(2, 2)).kind == "module"


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda one: one.name)
def test_every_kind_can_be_judged_alone_and_by_its_programs(generation: GenerationKind) -> None:
    assert generation in JUDGED
    alone = generation.alone
    assert alone.alone is alone and not alone.has_encoder and not alone.one_token
    assert not generation.one_token or generation.decodes_tokens
    assert len({one.name for one in GENERATIONS}) == len(GENERATIONS)
