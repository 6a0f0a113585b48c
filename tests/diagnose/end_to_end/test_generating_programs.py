"""Recurrent models and encoder-decoders are judged on the programs that their engines generate with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.diagnose import check
from glassengine.diagnose.ladder.generations import start_both
from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.verdict.run import run_cases
from glassengine.program import load_model
from glassengine.program.kinds.encoder_decoder import SOURCE_MASK
from glassengine.results import Comparison
from glassengine.testing.models import from_config

MISTAKES = {
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wi", "decoder.block.0.layer.1.EncDecAttention.q"),
    "mamba": ("backbone.layers.0.mixer.x_proj",),
}


def mamba() -> nn.Module:
    config = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 64, "bos_token_id": 1}
    return from_config("MambaForCausalLM", "MambaConfig", config)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    return from_config("T5ForConditionalGeneration", "T5Config", {**sizes, "decoder_start_token_id": 0})


MODELS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "mamba": mamba}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function (family) -> engine of the model with a weight of each of its programs changed."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("engines") / family
            model = MODELS[family]()
            for path in MISTAKES[family]:
                model.get_submodule(path).get_parameter("weight").data[1] *= 1.5
            glass.build(model, made[family], backend="eager", max_batch_size=2, max_seq_len=16)
        return made[family]

    return make


@pytest.fixture(scope="module")
def judged(engines: Callable[[str], Path]) -> Callable[[str], Comparison]:
    made: dict[str, Comparison] = {}

    def make(family: str) -> Comparison:
        if family not in made:
            made[family] = check(MODELS[family](), candidate=engines(family), steps=1)
        return made[family]

    return make


FAMILIES = ["t5", "mamba"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_wrong_op_of_an_engine_is_named(judged: Callable[[str], Comparison], family: str) -> None:
    result = judged(family)
    assert not result.ok and result.first_divergence is not None
    sites = {origin.site for origin in result.origins if origin.level == "engine"}
    assert sites == {f"{path}/linear.0" for path in MISTAKES[family]}
    assert result.first_divergence.site == f"{MISTAKES[family][0]}/linear.0"
    assert result.weights is not None
    assert {name.removeprefix("user.") for name in result.weights.different} == {
        f"{path}.weight" for path in MISTAKES[family]
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_untouched_model_is_its_program(judged: Callable[[str], Comparison], family: str) -> None:
    levels = {level.name: level for level in judged(family).levels}
    assert set(levels) == {"program", "op-by-op", "engine", "release"}
    assert levels["program"].verdict in ("identical", "rounding") and levels["program"].coverage == 1.0
    assert levels["engine"].coverage == 1.0


@pytest.mark.slow
def test_every_token_of_a_recurrent_prompt_is_judged(judged: Callable[[str], Comparison]) -> None:
    # Prompts of 8 and 5 tokens and a decode step; the second is padded where both run together.
    steps = {(pair.case, pair.step) for pair in judged("mamba").pairs if pair.level == "program"}
    assert {case for case, _ in steps} == {"prompt 0", "prompt 1", "prompts 0 and 1, left-padded"}
    assert {step for case, step in steps if case == "prompt 0"} == set(range(9))
    states = {pair.candidate_site for pair in judged("mamba").pairs if pair.level == "program"}
    assert {f"backbone.layers.0.mixer:kv.{kind}" for kind in ("conv", "recurrent")} <= states


@pytest.mark.slow
def test_both_programs_are_in_one_answer(judged: Callable[[str], Comparison]) -> None:
    result = judged("t5")
    assert result.counts["compared"] == len(result.pairs)
    of_engine = {pair.site.split(".")[0] for pair in result.pairs if pair.level == "engine"}
    assert {"encoder", "decoder", "lm_head/linear"} <= of_engine
    assert {pair.step for pair in result.pairs if pair.site.startswith("lm_head")} == {0, 1}


def test_untouched_encoder_and_decoder_are_their_programs() -> None:
    with ExitStack() as stack:
        climbs = start_both(load_model(t5()), None, 1, stack, lambda _: None)
        for climb, sites in zip(climbs, ("encoder.", "decoder."), strict=True):
            (score,) = climb.scores
            case = climb.cases[-1]
            run_cases(climb.program, [case], climb.model, [score], coarsest=None, on_step=lambda *_: None)
            assert {pair.verdict for pair in score.pairs} <= {"identical", "rounding"}
            assert sum(pair.site.startswith(sites) for pair in score.pairs) > 8
        # Of both prompts together the second is padded: on its right, as the encoder is given them.
        assert climbs[1].cases[-1].constants[SOURCE_MASK][1].tolist() == [1] * 7 + [0] * 5
        assert climbs[1].cases[-1].input_ids is not None
        assert climbs[1].cases[-1].input_ids.tolist() == [[0], [0]]
        steps = {pair.step for pair in climbs[1].scores[0].pairs}
        assert steps == {0, 1}


def test_engines_of_other_kinds_are_refused(engines: Callable[[str], Path]) -> None:
    with pytest.raises(IncomparableError, match=r"one program[\s\S]*encoder and decoder"):
        check(MODELS["t5"](), candidate=engines("mamba"))


@pytest.mark.slow
def test_engines_of_encoder_decoders_are_refused_for_other_models(engines: Callable[[str], Path]) -> None:
    with pytest.raises(IncomparableError, match=r"encoder and decoder[\s\S]*one program"):
        check(MODELS["mamba"](), candidate=engines("t5"))


def test_inputs_that_lack_those_of_the_encoder_are_refused(tmp_path: Path) -> None:
    torch.save({"decoder_input_ids": torch.ones(1, 2).long()}, tmp_path / "inputs.pt")
    with pytest.raises(UsageError, match="the input of the encoder is missing"):
        check(MODELS["t5"](), inputs=str(tmp_path / "inputs.pt"), backend="eager")


def test_steps_of_a_prompt_that_runs_token_by_token() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [0, 8, 9]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    case = Case("prompts", 4, input_ids=ids, attention_mask=mask, one_token=True)
    assert case.cache_length == 4
    first = StepInputs.first(case)
    second = first.following(torch.tensor([99, 99]))
    third = second.following(torch.tensor([99, 99]))
    chosen = third.following(torch.tensor([3, 4]))
    steps = [first, second, third, chosen]
    assert [step.input_ids.flatten().tolist() for step in steps] == [[5, 0], [6, 8], [7, 9], [3, 4]]
    assert [step.position_ids.flatten().tolist() for step in steps] == [[0, 0], [1, 0], [2, 1], [3, 2]]
    assert [step.token_mask.flatten().tolist() for step in steps] == [[True, False], *[[True, True]] * 3]
    assert chosen.attention_mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
