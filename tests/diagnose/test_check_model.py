"""The ladder: clean models agree on every level, planted mistakes are named on the level where they enter."""

from __future__ import annotations

import copy
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import IncomparableError, UsageError
from glassengine.program.kinds import causal_lm
from glassengine.results import Comparison
from glassengine.testing import models
from tests.diagnose.ladder.test_levels import PlantedBackend, use


def check(baseline: nn.Module, **options: Any) -> Comparison:
    """Check a prefill and one step, where no test looks at a later one."""
    return glass.check(baseline, **{"steps": 1, **options})


def verdicts(result: Comparison) -> dict[str, str]:
    return {level.name: level.verdict for level in result.levels}


@pytest.mark.parametrize(
    ("family", "dtype", "steps"),
    [
        ("llama", "float32", 1),
        pytest.param("llama", "float32", None, marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("mixtral", "float32", 1, marks=pytest.mark.slow),
        pytest.param("gpt2", "float16", None, marks=pytest.mark.slow),
        pytest.param("gemma3", "float32", None, marks=pytest.mark.slow),
    ],
)
def test_a_clean_model_agrees_on_every_level(family: str, dtype: str, steps: int | None, token_ids: str) -> None:
    options: dict[str, Any] = {} if steps is None else {"steps": steps}
    result = glass.check(models.CAUSAL_LMS[family](), backend="eager", dtype=dtype, inputs=token_ids, **options)
    assert result.ok and result.verdict in ("identical", "rounding")
    assert set(verdicts(result)) == {"program", "engine", "release"}
    assert result.coverage == 1.0
    assert {pair.step for pair in result.pairs} == set(range((3 if steps is None else steps) + 1))
    assert result.first_divergence is None and not result.origins
    assert result.severity["release"]["token_agreement"] == 1.0


def scaled_attention(model: Any) -> str:
    model.model.layers[1].self_attn.scaling *= 1.05
    return "model.layers.1.self_attn/scaled_dot_product_attention.0"


def swapped_projections(model: Any) -> str:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    return "model.layers.0.mlp.gate_proj/linear.0"


def one_wrong_weight(model: Any) -> str:
    weight = model.model.layers[1].self_attn.k_proj.weight.data
    weight[3, 5] = -2 * weight[3, 5]
    return "model.layers.1.self_attn.k_proj/linear.0"


def norm_epsilon(model: Any) -> str:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-5
    return "model.layers.1.post_attention_layernorm/add.0"


def rotary_base(model: Any) -> str:
    model.model.rotary_emb.inv_freq *= 0.99
    return "model.rotary_emb/mul.0"


def activation(model: Any) -> str:
    model.model.layers[0].mlp.act_fn = nn.GELU()
    return "model.layers.0.mlp.act_fn/silu.0"


def extra_factor(model: Any) -> str:
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x) * 1.02
    return "model.layers.1/add.1"


MISTAKES = {
    scaled_attention: ": 0.25 in the baseline, 0.2625 in the candidate",
    swapped_projections: "gate_proj.weight holds the weight of model.layers.0.mlp.up_proj.weight",
    one_wrong_weight: "differs in 1 of",
    norm_epsilon: ": 1e-06 in the baseline, 1e-05 in the candidate",
    rotary_base: "scaled by 0.99",
    activation: None,
    extra_factor: None,
}


# Named as others are: by a literal that differs, by an op that only the candidate has, and by a stored tensor.
ALIKE = (norm_epsilon, extra_factor, rotary_base, activation)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(mistake, marks=pytest.mark.slow) if mistake in ALIKE else mistake for mistake in MISTAKES],
    ids=lambda m: m.__name__,
)
def test_a_mistake_in_a_copy_is_named(llama: nn.Module, mistake: Any, token_ids: str) -> None:
    candidate = models.llama()
    site = mistake(candidate)
    result = check(llama, candidate=candidate, inputs=token_ids)
    assert not result.ok and result.verdict == "wrong"
    found = result.first_divergence
    assert found is not None and found.level == "candidate" and found.step == 0
    # A replaced activation has another op: the first op that both sides have is the product it feeds.
    assert found.site == site or (mistake is activation and found.site == "model.layers.0.mlp/mul.0")
    assert (found.source is not None and "modeling_llama.py:" in found.source) or mistake is activation
    others = [d for d in result.origins if d.level == "candidate" and d.site != found.site]
    # The swap is two mistakes, and both are named.
    assert [d.site for d in others] == (
        ["model.layers.0.mlp.up_proj/linear.0"] if mistake is swapped_projections else []
    )
    assert verdicts(result)["program"] == "rounding"
    hint = MISTAKES[mistake]
    assert hint is None or any(hint in guess.text for guess in found.hints), found.hints


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [scaled_attention, swapped_projections, rotary_base], ids=lambda m: m.__name__)
def test_large_mistakes_are_named_in_bfloat16_too(llama: nn.Module, mistake: Any, token_ids: str) -> None:
    candidate = models.llama()
    site = mistake(candidate)
    result = check(llama, candidate=candidate, inputs=token_ids, dtype="bfloat16")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == site


def test_an_identical_copy_is_ok_and_a_bfloat16_copy_is_rounding(llama: nn.Module, token_ids: str) -> None:
    assert check(llama, candidate=models.llama(), inputs=token_ids).ok
    result = check(llama, candidate=models.llama().to(torch.bfloat16), inputs=token_ids)
    assert result.ok, result.first_divergence


@pytest.mark.slow
def test_a_scale_that_moved_into_the_query_is_no_mistake(llama: nn.Module, token_ids: str) -> None:
    candidate: Any = models.llama()
    for layer in candidate.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.data *= 0.5  # exact in binary
        attention.scaling *= 2
    result = check(llama, candidate=candidate, inputs=token_ids)
    # The projections and what rotates them differ, by design; attention and everything after it agrees.
    wrong = {pair.site for pair in result.pairs if pair.verdict == "wrong" and pair.level == "candidate"}
    assert all("q_proj" in site or "self_attn/" in site for site in wrong)
    assert not any("scaled_dot_product" in site or "o_proj" in site for site in wrong)
    assert result.severity["candidate"]["token_agreement"] == 1.0


def test_a_mistake_that_only_decode_shows(llama: nn.Module, token_ids: str) -> None:
    class Forgetful(nn.Module):
        """Rotates by one position too many once there is a cache."""

        def __init__(self, rotary: nn.Module) -> None:
            super().__init__()
            self.rotary = rotary

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            late = (position_ids >= 8).to(position_ids.dtype)
            return self.rotary(x, position_ids + late)

    candidate: Any = models.llama()
    candidate.model.rotary_emb = Forgetful(candidate.model.rotary_emb)
    result = check(llama, candidate=candidate, inputs=token_ids)
    assert not result.ok and result.first_divergence is not None and result.first_divergence.step == 1


def test_a_mistake_in_a_pass_is_named_by_pass_and_site(llama: nn.Module, tmp_path: Path, token_ids: str) -> None:
    file = tmp_path / "passes.py"
    file.write_text(
        textwrap.dedent(
            """
            def harmless(module):
                pass

            def wrong_scale(module):
                graph = module.graph
                node = [n for n in graph.nodes if "scaled_dot_product" in n.name][1]
                with graph.inserting_before(node):
                    new = graph.call_function(node.target, node.args, {**node.kwargs, "scale": 0.5})
                node.replace_all_uses_with(new)
                graph.erase_node(node)
            """
        )
    )
    passes = [f"{file}:harmless", f"{file}:wrong_scale"]
    result = check(llama, passes=passes, backend="eager", inputs=token_ids)
    found = result.first_divergence
    assert not result.ok and found is not None
    assert found.level == f"pass {file}:wrong_scale"
    assert found.site == "model.layers.1.self_attn/scaled_dot_product_attention.0"
    assert verdicts(result)[f"pass {file}:harmless"] == "identical"


def test_a_mistake_in_our_own_wrapper_shows_on_the_first_level(monkeypatch: pytest.MonkeyPatch, token_ids: str) -> None:
    original = causal_lm.CausalLM.forward

    def off_by_one(
        self: Any, input_ids: Any, attention_mask: Any, position_ids: Any, cache_position: Any, cache: Any
    ) -> Any:
        return original(self, input_ids, attention_mask, position_ids * 2, cache_position, cache)

    monkeypatch.setattr(causal_lm.CausalLM, "forward", off_by_one)
    result = check(models.llama(), backend="eager", inputs=token_ids)
    assert not result.ok and verdicts(result)["program"] == "wrong"
    assert result.first_divergence is not None and result.first_divergence.level == "program"
    assert result.first_divergence.site == "./mul.0" and "missing" in result.first_divergence.hints[0].text
    assert verdicts(result)["engine"] == "identical", "the engine does what the (wrong) program says"


class ObservedBackend(PlantedBackend):
    """Planted: its answer is right only when somebody looks."""

    def changed(self, inputs: Any, outputs: Any) -> Any:
        if not any(name.startswith("dbg.") for name in outputs):
            outputs["logits"] = outputs["logits"] * 1.01
        return outputs


class WrongKernelBackend(PlantedBackend):
    """Planted: one op of the fused engine is wrong, in decode only."""

    def changed(self, inputs: Any, outputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == 1 and "dbg.silu_1" in outputs:
            outputs["dbg.silu_1"] = outputs["dbg.silu_1"] + 1e-3
        return outputs


def test_a_backend_that_answers_differently_when_outputs_are_added(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch, token_ids: str
) -> None:
    use(monkeypatch, ObservedBackend)
    result = check(llama, backend="planted", inputs=token_ids)
    found = result.first_divergence
    assert not result.ok and verdicts(result)["engine"] == "identical" and verdicts(result)["release"] == "wrong"
    assert found is not None and found.level == "release" and found.site == "lm_head/linear.0"
    assert any(hint.evidence == "observer" for hint in found.hints) and any(
        hint.kind == "scale" for hint in found.hints
    )


def test_a_wrong_kernel_is_named_by_op_and_step(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch, token_ids: str
) -> None:
    use(monkeypatch, WrongKernelBackend)
    result = check(llama, backend="planted", inputs=token_ids)
    found = result.first_divergence
    assert found is not None and (found.level, found.step) == ("engine", 1)
    assert found.site == "model.layers.1.mlp.act_fn/silu.0"


def test_a_port_with_another_class_is_judged_at_module_outputs(
    llama: nn.Module, tmp_path: Path, token_ids: str
) -> None:
    """A candidate that cannot be exported still gets an answer, and the missing level is listed."""
    candidate: Any = models.llama()
    forward = candidate.model.layers[1].mlp.forward

    def data_dependent(x: torch.Tensor) -> torch.Tensor:
        return forward(x) if float(x.sum()) > 1e30 else forward(x) * 1.02

    candidate.model.layers[1].mlp.forward = data_dependent
    result = check(llama, candidate=candidate, inputs=token_ids)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.level == "candidate, untouched"
    assert result.first_divergence.site == "model.layers.1.mlp"
    assert any("not judged op by op" in item.reason for item in result.skipped)


def test_plain_modules_are_checked_too(tmp_path: Path) -> None:
    file = tmp_path / "vision.py"
    file.write_text(
        "import torch\nfrom glassengine.testing.models import vision\n"
        "def inputs():\n    g = torch.Generator().manual_seed(0)\n"
        "    return [{'pixel_values': torch.randn(2, 3, 16, 16, generator=g)} for _ in range(2)]\n"
        "def wrong():\n    m = vision()\n    m.norm.eps = 1e-2\n    return m\n"
    )
    result = check(models.vision(), backend="eager", inputs=f"{file}:inputs")
    assert result.ok and result.coverage == 1.0
    result = check(models.vision(), candidate=f"{file}:wrong", inputs=f"{file}:inputs")
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "norm/layer_norm.0"


@pytest.mark.slow
def test_models_with_nothing_in_common_are_refused_or_not_ok(llama: nn.Module, token_ids: str) -> None:
    with pytest.raises(IncomparableError, match="do not match those of the baseline"):
        check(llama, candidate=models.vision(), inputs=token_ids)
    result = check(llama, candidate=models.gpt2(), inputs=token_ids, steps=0)
    assert not result.ok


def test_too_little_coverage_is_not_ok(llama: nn.Module, token_ids: str) -> None:
    other: Any = models.llama()
    result = check(llama, candidate=other, inputs=token_ids, min_coverage=1.01)
    assert not result.ok and result.too_little and "coverage" in str(result.not_ok_because)


def test_f3_a_plain_module_is_checked_on_inputs_that_are_made_up() -> None:
    result = check(models.vision(), backend="eager")
    assert result.ok
    assert {(one.name, one.origin) for case in result.inputs for one in case.inputs} == {("pixel_values", "made up")}


def test_a_plain_module_whose_inputs_cannot_be_made_up() -> None:
    class Nested(torch.nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["x"] + batch["y"]

    with pytest.raises(UsageError, match="give inputs with --inputs"):
        check(Nested())


def test_the_result_is_json() -> None:
    wrong: Any = models.vision()
    wrong.norm.eps = 1e-2
    data = json.loads(json.dumps(check(models.vision(), candidate=wrong).to_dict(), allow_nan=False))
    assert data["counts"]["compared"] == len(data["pairs"])


def test_the_model_that_is_judged_is_left_as_it_was(token_ids: str) -> None:
    model = models.llama()
    before = copy.deepcopy(model.state_dict())
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    assert check(model, backend="eager", inputs=token_ids, dtype="bfloat16").ok
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
