"""What a file costs and what its engine adds: the printed numbers are those of plain calls of both, and decide."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import glassengine as glass
from glassengine.plugins.serving.ggml.write import file_tensors, write_gguf
from glassengine.report.terminal_check import answer
from glassengine.results import Comparison, ResultComparison
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from tests.plugins.serving.check.end_to_end.llama_cpp import logits_of

IDS = torch.tensor([[7, 99, 3, 200, 41, 180, 22, 5, 63, 118, 31, 77]])


def made(family: str, folder: Path, kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    module: Any = FAMILIES[family]().eval()
    save_checkpoint(module, folder / "checkpoint")
    write_gguf(module, folder / "model.gguf", kind=kind, **more)
    return module


def check(folder: Path, steps: int = 1, **options: Any) -> Comparison:
    candidate = f"gguf:{folder}/model.gguf"
    return glass.check(folder / "checkpoint", candidate=candidate, inputs={"input_ids": IDS}, steps=steps, **options)


def figures(baseline: torch.Tensor, value: torch.Tensor) -> dict[str, float]:
    b, c = baseline.double(), value.double()
    ours, theirs = b.log_softmax(-1), c.log_softmax(-1)
    return {
        "snr": 10 * math.log10(float(b.square().sum() / (c - b).square().sum())),
        "kl": float((ours.exp() * (ours - theirs)).sum(-1).mean()),
        "same": int((b.argmax(-1) == c.argmax(-1)).sum()),
    }


def plain(folder: Path, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the checkpoint's logits by transformers and the file's by llama.cpp, on the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    theirs, picked = logits_of(folder / "model.gguf", IDS[0].tolist(), steps, model.config.vocab_size)
    with torch.no_grad():
        ours = model(input_ids=torch.cat([IDS, torch.tensor([picked], dtype=torch.int64)], 1)).logits[0]
    return ours, theirs


def last(found: Comparison) -> ResultComparison:
    return next(one for one in reversed(found.results) if one.judged_by == "noise floor")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_0"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen2", "Q8_0"), ("gpt2", "Q5_1"), ("llama", "F16"), ("phi3", "Q4_1"), ("qwen3", "Q5_0"))
        ),
    ],
)
def test_f49_the_printed_cost_is_that_of_plain_runs(family: str, kind: str, tmp_path: Path) -> None:
    made(family, tmp_path, kind)
    found = check(tmp_path, steps=1)
    ours, theirs = plain(tmp_path, 1)
    cost = found.quantization
    assert found.ok and cost is not None and cost.kl is not None and cost.token_agreement is not None
    wanted = figures(ours, theirs)
    assert abs(cost.logits_snr_db - wanted["snr"]) < 0.1 and cost.num_tokens == len(ours) == IDS.numel() + 1
    same = round(cost.token_agreement * len(ours))
    assert cost.kl == pytest.approx(wanted["kl"], rel=0.03) and abs(same - wanted["same"]) <= 1  # near a tie
    steps = [(0, ours[: IDS.numel()], theirs[: IDS.numel()])]
    steps += [(1, ours[IDS.numel() :], theirs[IDS.numel() :])]
    step, b, c = min(steps, key=lambda one: figures(one[1], one[2])["snr"])
    (stated,) = (one for one in found.results if one.judged_by == "signal")
    assert stated.step == step and stated.snr_db is not None and abs(stated.snr_db - figures(b, c)["snr"]) < 0.1
    assert stated.max_abs_diff == pytest.approx(float((c - b).abs().max()), rel=0.02)
    lines = [line.plain for line in answer(found)]
    assert lines[0].startswith(f"results  the file against the checkpoint: {cost.logits_snr_db:.1f} dB, {same} of")
    assert lines[1].strip().startswith("the engine on the file's weights: logits agree within the engine's ")


def test_f49_what_the_engine_adds_is_that_of_plain_runs_too(tmp_path: Path) -> None:
    module = made("qwen2", tmp_path, "Q4_0")
    found = last(check(tmp_path, steps=0))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, module.config.num_hidden_layers)
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            one = stored[str(names.get_name(name, try_suffixes=(".weight", ".bias")))]
            parameter.copy_(
                torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()).view_as(parameter)
            )
        ours = module(input_ids=IDS).logits[0]
    theirs, _ = logits_of(tmp_path / "model.gguf", IDS[0].tolist(), 0, module.config.vocab_size)
    wanted = figures(ours, theirs)
    assert found.snr_db is not None and abs(found.snr_db - wanted["snr"]) < 0.1 and found.same_tokens == wanted["same"]
    assert found.mean_kl == pytest.approx(wanted["kl"], rel=0.03)
    assert found.max_abs_diff == pytest.approx(float((theirs - ours).abs().max()), rel=0.02)


def test_f49_a_budget_and_the_drift_are_those_of_the_file(tmp_path: Path) -> None:
    made("qwen2", tmp_path, "Q4_0")
    found = check(tmp_path, min_snr=20.0, drift=True)
    cost = found.quantization
    assert not found.ok and found.standing == "over budget" and cost is not None and cost.logits_snr_db < 20
    assert (last(found).snr_db or 0.0) > 30  # what the engine adds is within the budget
    assert {row.kind for row in found.drift} == {"module", "result"}
    assert len(cost.weights) > 14 and sum(one.share for one in cost.weights) == pytest.approx(1.0)
    assert check(tmp_path, min_snr=5.0).ok


def test_f49_a_file_that_is_not_rounded_has_one_statement(tmp_path: Path) -> None:
    made("qwen2", tmp_path, "F32")
    found = check(tmp_path)
    assert found.ok and found.quantization is None and all(one.judged_by == "noise floor" for one in found.results)
    assert not check(tmp_path, min_snr=150.0).ok


def test_f49_the_types_of_a_file_are_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module: Any = FAMILIES["qwen2"]().eval()
    save_checkpoint(module, tmp_path / "checkpoint")
    write_gguf(module, tmp_path / "model.gguf", kind="Q8_0")
    found = check(tmp_path, steps=0)
    assert "types of 16 matrices: 16 Q8_0" in found.notes


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2-moe", marks=pytest.mark.slow)])
def test_f82_coarser_arithmetic_is_said_as_that(family: str, tmp_path: Path) -> None:
    made(family, tmp_path, "F32")
    found = check(tmp_path)
    exact, deployed = (one for one in found.results if one.level.startswith("record"))
    assert found.ok and exact.within == "rounding" and (exact.snr_db or 0.0) > 100
    assert deployed.within == "the engine's float16 keys and values" and 50 < (deployed.snr_db or 0.0) < 90
    assert "within rounding" not in deployed.in_words()


@pytest.mark.parametrize(
    ("family", "kind", "setting"),
    [
        ("mixtral", "F32", {"expert_used_count": 1}),
        ("qwen2", "F32", {"attention_layer_norm_rms_epsilon": 1e-4}),
        pytest.param("qwen2-moe", "F32", {"expert_used_count": 1}, marks=pytest.mark.slow),
        pytest.param("gpt2", "F32", {"attention_layer_norm_epsilon": 1e-3}, marks=pytest.mark.slow),
        pytest.param("llama", "F16", {"rope_freq_base": 5000.0}, marks=pytest.mark.slow),
    ],
)
def test_f50_results_decide_by_the_floor_of_the_engines_arithmetic(
    family: str, kind: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    made(family, tmp_path, kind, **setting)
    found = check(tmp_path, steps=0)
    assert not found.ok and found.standing == "results differ", found.not_ok_because
    for one in found.results:
        assert one.verdict != "rounding" or not one.is_far_apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_f50_the_floor_is_as_large_as_what_the_engine_does(family: str, kind: str, tmp_path: Path) -> None:
    """Neither an alarm, nor a floor so wide that it decides nothing."""
    made(family, tmp_path, kind)
    found = check(tmp_path, steps=2)
    ratios = [one.noise_ratio or 0.0 for one in found.results if one.level.startswith("record")]
    assert found.ok and all(0.05 < ratio < 3.0 for ratio in ratios), ratios


def test_f50_a_whole_weight_that_is_another_is_not_rounding(tmp_path: Path) -> None:
    module = made("qwen2", tmp_path, "F32")
    right = dict(file_tensors(module, "qwen2"))["blk.1.ffn_down.weight"]
    write_gguf(module, tmp_path / "model.gguf", changed={"blk.1.ffn_down.weight": right * 1.001})
    found = check(tmp_path, steps=0)
    assert not found.ok and found.weights is not None and len(found.weights.different) == 1
    assert all(one.verdict == "wrong" for one in found.results if one.level == "record")
