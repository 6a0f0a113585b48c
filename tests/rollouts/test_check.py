"""Planted causes are found with their shares; rounding is called rounding, and nothing else is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import IncomparableError, UsageError
from glassengine.rollouts.check import compare
from glassengine.rollouts.formats import Rollout
from glassengine.rollouts.trainer import Trainer
from glassengine.schemas import schema
from tests.rollouts.planted import FAMILIES, PAIRS, SINGLE, TINY, Plant, generate, model_of, outcome, plant, prompts

OF = {one.name: one for one in (*SINGLE, *PAIRS)}


@pytest.fixture(scope="module")
def tiny() -> Any:
    return model_of("tiny-llama")


def _write(samples: list[Any], path: Path) -> str:
    document = {
        "prompt_ids": [one.prompt for one in samples],
        "completion_ids": [one.response for one in samples],
        "logprobs": [one.logprobs.tolist() for one in samples],
    }
    path.write_text(json.dumps(document))
    return str(path)


def test_a_planted_pair_is_found_with_its_shares(tiny: Any) -> None:
    one = OF["temperature + top_p"]
    found = outcome(*plant(tiny, one, number=3, new=16), one)
    assert found.is_right and found.error < 0.1, found
    assert [(cause.setting, cause.value) for cause in found.found.causes] == [("temperature", "0.7"), ("top_p", "0.9")]
    assert found.found.found == "mistake"


def test_rounding_is_ok_on_the_command_line(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(generate(tiny, prompts(2), new=12), tmp_path / "rollout.json")
    page = tmp_path / "answer.html"
    assert main(["check-rollout", str(TINY), "--rollout", file, "--json", "--report", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema("check"))
    assert "Worst tokens" in page.read_text() and "<polyline" in page.read_text()
    assert document["rollout"]["found"] in ("none", "rounding") and document["standing"] == "ok"
    assert document["rollout"]["worst"][0]["text"] is not None


def test_a_gap_that_nothing_explains_is_a_mistake(tiny: Any) -> None:
    one = OF["system prompt"]
    found = outcome(*plant(tiny, one, number=2, new=12), one)
    assert found.found.found == "unexplained" and "not rounding" in found.found.in_words()


def test_tokens_that_the_checkpoint_cannot_give_are_a_mistake(tiny: Any) -> None:
    given = Rollout("TRL", generate(tiny, prompts(2), new=12))
    vocabulary = torch.arange(tiny.config.vocab_size)

    def compared(hidden: torch.Tensor) -> Any:
        model = copy.deepcopy(tiny)

        def hide(_module: Any, _arguments: Any, out: Any) -> None:
            out.logits[..., hidden] = -torch.inf

        model.register_forward_hook(hide)
        return compare(Trainer(model, {}), given, str)

    found = compared(given.samples[0].response[3])
    assert found.num_impossible > 0 and found.found == "unexplained"
    assert "no finite log-probability" in found.in_words()
    with pytest.raises(IncomparableError, match="no token of the rollout a finite log-probability"):
        compared(vocabulary)


def test_incomparable_rollouts_are_refused(tmp_path: Path) -> None:
    document = {"prompt_ids": [[1]], "response_ids": [[5000]], "logprobs": [[-1.0]]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(IncomparableError, match="does not have"):
        glass.check_rollout(str(TINY), tmp_path / "a.json")
    with pytest.raises(UsageError, match="causal language model"):
        glass.check_rollout(torch.nn.Linear(2, 2), tmp_path / "a.json")
    with pytest.raises(UsageError, match="unknown dtype"):
        glass.check_rollout(str(TINY), tmp_path / "a.json", engine_dtype="int8")
    with pytest.raises(UsageError, match="above 0"):
        glass.check_rollout(str(TINY), tmp_path / "a.json", temperature=0.0)


def _plants(family: str) -> list[Plant]:
    found = [one for one in (*SINGLE, *PAIRS) if one.dense or family == "mixtral"]
    return [one for one in found if family != "gpt2" or "theta" not in one.name]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_most_planted_causes_come_first(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, plants = model_of(family), _plants(family)
    found = {one.name: outcome(*plant(model, one), one) for one in plants}
    right = sum(one.is_right for one in found.values())
    close = sum(one.error <= 0.1 for one in found.values())
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{family}: the right cause first in {right} of {len(found)}, shares within 10 points in {close}"
        )
    assert right >= 0.9 * len(found) and close >= 0.9 * len(found)
    for one in plants:
        result = found[one.name].found
        is_rounding = one.name in ("nothing", "bfloat16", "head in bfloat16", "rounded values")
        assert (result.found in ("none", "rounding")) == is_rounding, (one.name, result.in_words())


def test_causes_of_part_of_the_responses_are_named(tiny: Any) -> None:
    samples = [*generate(tiny, prompts(2), new=12), *generate(tiny, prompts(4)[2:], new=12, temperature=0.7)]
    found = compare(Trainer(tiny, {}), Rollout("planted", samples), lambda token: None)
    assert [(one.setting, one.value) for one in found.causes] == [("temperature", "0.7")]
    assert "in 2 of 4 responses" in found.causes[0].text


def test_values_of_a_few_decimals_are_rounding_and_zeros_alone_are_refused(tiny: Any) -> None:
    samples = generate(tiny, prompts(2), new=12, reports=lambda values: (values.double() * 1000).round() / 1000)
    found = compare(Trainer(tiny, {}), Rollout("planted", samples), lambda token: None)
    assert found.found == "rounding" and [one.value for one in found.causes] == ["rounded to 3 decimals"]
    zeros = generate(tiny, prompts(1), new=4, reports=torch.zeros_like)
    with pytest.raises(IncomparableError, match="reports 0"):
        compare(Trainer(tiny, {}), Rollout("planted", zeros), lambda token: None)


@pytest.mark.parametrize("family", ["Mamba", "Gemma2"])
def test_families_without_other_kernels_of_attention(family: str) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    more: dict[str, Any] = {"state_size": 4} if family == "Mamba" else {"num_attention_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **more, num_key_value_heads=2, intermediate_size=64)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    given = [[token % 250 + 3 for token in prompt] for prompt in prompts(3)]
    samples = generate(model, given, new=12, temperature=0.6)
    found = compare(Trainer(model, {}), Rollout("planted", samples), lambda token: None)
    assert [(one.setting, one.value) for one in found.causes] == [("temperature", "0.6")]
