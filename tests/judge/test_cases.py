"""What a check is given: nothing of `--inputs` is dropped in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, as_inputs, causal_cases, module_cases, read_inputs, texts_of
from glassengine.program import load_model
from glassengine.testing import models

IMAGE_TOKEN = 3


def test_images_beside_tokens_are_looked_at(tmp_path: Path) -> None:
    """A mistake in the vision tower shows in a forward with an image only."""
    ids = torch.full((1, 20), 7)
    ids[0, 2:18] = IMAGE_TOKEN
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.save({"input_ids": ids, "pixel_values": image}, tmp_path / "inputs.pt")
    baseline, candidate = models.llava(num_layers=1), models.llava(num_layers=1)
    candidate.get_parameter("model.vision_tower.encoder.layers.0.mlp.fc1.weight").data[3] *= 2
    result = check(baseline, candidate=candidate, inputs=str(tmp_path / "inputs.pt"))
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "model.vision_tower.encoder.layers.0.mlp.fc1/linear.0"
    assert [item.site for item in result.skipped if item.reason.startswith("pixel_values given:")] == ["decode steps"]


def test_tokens_that_are_missing_are_named(llama: nn.Module, tmp_path: Path) -> None:
    torch.save({"attention_mask": torch.ones(1, 4).long()}, tmp_path / "inputs.pt")
    with pytest.raises(UsageError, match="no input_ids"):
        check(llama, inputs=str(tmp_path / "inputs.pt"))


def test_built_in_prompts_fit_a_model_of_few_positions() -> None:
    model = load_model(models.gpt2(n_positions=10))
    cases = causal_cases(model, None, steps=3)
    assert [case.cache_length for case in cases] == [10, 10, 10]
    assert [int(mask.sum()) for case in cases if (mask := case.attention_mask) is not None] == [7, 7, 14]


def test_f3_every_case_says_what_it_runs_on() -> None:
    made = causal_cases(load_model(models.gpt2()), None, steps=1)[-1].inputs
    assert [(one.name, one.origin, one.shape) for one in made] == [
        ("input_ids", "built-in prompts", (2, 12)),
        ("attention_mask", "built-in prompts", (2, 12)),
    ]
    assert made[0].num_distinct is not None and made[0].num_distinct > 8
    assert (made[1].minimum, made[1].maximum) == (0.0, 1.0)
    given = module_cases([{"x": torch.ones(2, 3), "n": 4}, {"x": torch.tensor([[0.0, float("nan")]]), "n": 4}])[0]
    found = [(one.name, one.step, one.origin, one.dtype, one.shape, one.num_distinct) for one in given.inputs]
    assert found == [
        ("x", 0, "given", "float32", (2, 3), 1),
        ("n", 0, "given", "int", None, None),
        ("x", 1, "given", "float32", (1, 2), 2),
        ("n", 1, "given", "int", None, None),
    ]
    assert given.inputs[1].to_dict()["value"] == "4"


def test_what_a_caller_gives_is_a_name_or_one_dict_a_step(tmp_path: Path) -> None:
    step = {"x": torch.ones(2)}
    assert as_inputs(None) is None and as_inputs(tmp_path / "a.pt") == str(tmp_path / "a.pt")
    assert as_inputs(step) == read_inputs(as_inputs([step])) == [step]
    for given in (torch.ones(2), (torch.ones(2),), [(torch.ones(2),)]):
        (named,) = read_inputs(as_inputs(given), ["x"])
        assert torch.equal(named["x"], torch.ones(2))
    for wrong in ([], ["x"], 3):
        with pytest.raises(UsageError, match="inputs does not hold inputs"):
            as_inputs(wrong)


def test_each_step_reads_what_was_given_or_chosen_before() -> None:
    model = load_model(models.llama(num_hidden_layers=1))
    ids, mask = torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    case = Case("padded", 3, input_ids=ids, attention_mask=mask)
    alone = Case("by token", 4, input_ids=ids[1:], one_token=True)
    chosen = {"padded": [90, 91, 92], "by token": [1, 2, 30, 31]}
    assert texts_of(model, [case, alone, Case("plain", 1)], chosen) == {
        "padded": ("7 8", "90", "91"),
        "by token": ("4", "5", "6", "30"),
    }
    bundled = load_model("examples/tiny-llama")
    (text,) = texts_of(bundled, [Case("prompt", 1, input_ids=torch.tensor([[5, 6]]))], {})["prompt"]
    assert isinstance(text, str) and text != "5 6"
