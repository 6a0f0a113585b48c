"""A quantized candidate: what each layer costs, what is quantization and what is a mistake, on whole models."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from glassengine.cli.main import main
from glassengine.diagnose.check_model import check
from glassengine.errors import IncomparableError, UsageError
from glassengine.report.terminal_check import check as screen
from glassengine.results import Comparison, QuantizedWeight
from glassengine.testing import models
from glassengine.testing.architectures import FAMILIES, save_family
from tests.quantized import save_quantized

V, UP, DOWN = (f"model.layers.{path}" for path in ("1.self_attn.v_proj", "0.mlp.up_proj", "1.mlp.down_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized") / "base"
    model: Any = models.llama()
    model.save_pretrained(directory)
    return directory


def weight_of(result: Comparison, name: str) -> QuantizedWeight:
    assert result.quantization is not None
    return next(weight for weight in result.quantization.weights if weight.name == f"{name}.weight")


def drawn(result: Comparison) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(result))
    return console.export_text()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gptq", {}),
        ("gptq", {"bits": 8, "version": 2}),
        ("awq", {}),
        ("compressed-tensors", {"bits": 3}),
        ("torchao", {"bits": 8}),
        ("bitsandbytes", {}),
        ("fp8", {}),
    ],
)
def test_quantization_is_no_mistake(base: Path, method: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, method, **options)
    result = check(base, candidate=tmp_path, steps=1)
    found = result.quantization
    assert found is not None and found.method == method
    assert result.ok and result.verdict == "rounding" and not result.origins and not found.different
    assert len(found.weights) == 14 and result.counts["identical"] == 7 and result.counts["rounding"] == 14
    assert sum(weight.share for weight in found.weights) == pytest.approx(1)
    shares = [weight.share for weight in found.weights]
    assert shares == sorted(shares, reverse=True)
    for weight in found.weights:
        assert weight.output_over_rounding == pytest.approx(1, abs=0.3), weight


def test_errors_are_those_of_each_layer_alone(base: Path, tmp_path: Path) -> None:
    """Every figure again, by replacing a weight and running the model by hand."""
    expected = save_quantized(models.llama(), tmp_path / "q", "gptq")
    (tmp_path / "ids.json").write_text(json.dumps({"input_ids": [[5, 9, 33, 70, 8, 12]]}))
    result = check(base, candidate=tmp_path / "q", inputs=str(tmp_path / "ids.json"), steps=0)
    model: Any = models.llama()
    ids = torch.tensor([[5, 9, 33, 70, 8, 12]])
    taken: dict[str, tuple[Tensor, Tensor]] = {}

    def take(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        taken["v"] = args[0], output

    with torch.no_grad():
        handle = model.get_submodule(V).register_forward_hook(take)
        logits = model(ids).logits[0].double()
        handle.remove()
        inputs, output = taken["v"]
        alone = (inputs @ expected[f"{V}.weight"].T - output).double()
        model.get_parameter(f"{V}.weight").data = expected[f"{V}.weight"]
        changed = model(ids).logits[0].double()
    found, p = weight_of(result, V), logits.softmax(-1)
    kl = (p * (logits.log_softmax(-1) - changed.log_softmax(-1))).sum(-1).mean()
    assert found.kl == pytest.approx(float(kl), rel=1e-3)
    snr = 10 * torch.log10(logits.square().sum() / (changed - logits).square().sum())
    assert found.logits_snr_db == pytest.approx(float(snr), abs=0.01)
    snr = 10 * torch.log10(output.double().square().sum() / alone.square().sum())
    assert found.output_snr_db == pytest.approx(float(snr), abs=0.01)
    original = models.llama().get_parameter(f"{V}.weight").detach().double()
    snr = 10 * torch.log10(original.square().sum() / (expected[f"{V}.weight"].double() - original).square().sum())
    assert found.snr_db == pytest.approx(float(snr), abs=0.01)
    with torch.no_grad():
        for name, value in expected.items():
            model.get_parameter(name).data = value
        every = model(ids).logits[0].double()
    assert result.quantization is not None and result.quantization.num_tokens == 6
    kl = (p * (logits.log_softmax(-1) - every.log_softmax(-1))).sum(-1).mean()
    assert result.quantization.kl == pytest.approx(float(kl), rel=1e-3)


def test_compensated_errors_are_no_mistake(base: Path, tmp_path: Path) -> None:
    model: Any = models.llama()
    inputs: dict[str, Tensor] = {}

    def take(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].flatten(0, 1)

        return hook

    handles = [m.register_forward_hook(take(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        model(torch.randint(3, 250, (4, 64), generator=torch.Generator().manual_seed(1)))
    for handle in handles:
        handle.remove()
    save_quantized(model, tmp_path, "gptq", calibration=inputs)
    result = check(base, candidate=tmp_path, steps=0)
    assert result.ok and result.verdict == "rounding", result.origins
    assert result.quantization is not None
    assert max(weight.rms_steps for weight in result.quantization.weights) > 0.35  # compensation moved them


def rescaled(model: Any) -> Any:
    """Return the same function, scaled as AWQ does: norm before matrices, rows before columns."""
    generator = torch.Generator().manual_seed(4)

    def factors(size: int) -> Tensor:
        return torch.randn(size, generator=generator).mul(0.4).exp()

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, matrices in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            by = factors(64)
            norm.weight.data /= by
            for matrix in matrices:
                matrix.weight.data *= by
        by = factors(128)
        mlp.up_proj.weight.data /= by[:, None]
        mlp.down_proj.weight.data *= by
    return model


def test_weights_that_were_rescaled_are_judged_in_the_scale_of_the_baseline(base: Path, tmp_path: Path) -> None:
    save_quantized(rescaled(models.llama()), tmp_path / "good", "awq")
    result = check(base, candidate=tmp_path / "good", steps=0)
    assert result.ok and result.verdict == "rounding", result.origins
    assert result.quantization is not None and not result.quantization.different
    is_rescaled = {weight.name: weight.is_rescaled for weight in result.quantization.weights}
    assert is_rescaled.pop("model.layers.0.self_attn.o_proj.weight") is False
    assert is_rescaled.pop("model.layers.1.self_attn.o_proj.weight") is False
    assert all(is_rescaled.values())
    assert all(weight.output_snr_db is not None and weight.output_snr_db > 15 for weight in result.quantization.weights)

    def forget(name: str, parts: dict[str, Tensor]) -> None:
        if name == DOWN:
            parts["scales"] *= torch.randn(64, generator=torch.Generator().manual_seed(2)).mul(0.4).exp().half()

    save_quantized(rescaled(models.llama()), tmp_path / "bad", "awq", spoil=forget)
    result = check(base, candidate=tmp_path / "bad", steps=0)
    assert not result.ok and weight_of(result, DOWN).verdict == "wrong"

    def double(name: str, parts: dict[str, Tensor]) -> None:
        if name == V:
            parts["scales"][:, :3] *= 2

    save_quantized(rescaled(models.llama()), tmp_path / "rows", "awq", spoil=double)
    result = check(base, candidate=tmp_path / "rows", steps=0)
    assert [origin.site for origin in result.origins] == [f"{V}.weight:param"]
    found = weight_of(result, V)
    assert found.is_rescaled and re.search(r"6 of 64 groups are (2|1\.99) times", found.hints[0].text)


def test_a_model_without_logits_has_no_divergence(tmp_path: Path) -> None:
    save_family("bert", tmp_path / "base")
    save_quantized(FAMILIES["bert"](), tmp_path / "q", "gptq")
    result = check(tmp_path / "base", candidate=tmp_path / "q")
    found = result.quantization
    assert result.ok and found is not None and found.kl is None and found.token_agreement is None
    assert len(found.weights) == 13 and all(weight.kl is None and weight.logits_snr_db > 10 for weight in found.weights)


def test_inputs_beside_tokens_are_used(base: Path, tmp_path: Path) -> None:
    """Positions of one's own go into the forward, as everywhere in check."""
    save_quantized(models.llama(), tmp_path / "q", "gptq")
    kls = []
    for number, positions in enumerate(([0, 1, 2, 3], [0, 20, 40, 60])):
        given = {"input_ids": [[5, 9, 33, 70]], "position_ids": [positions]}
        (tmp_path / f"{number}.json").write_text(json.dumps(given))
        found = check(base, candidate=tmp_path / "q", inputs=str(tmp_path / f"{number}.json")).quantization
        assert found is not None and found.num_tokens == 4
        kls.append(found.kl)
    assert kls[0] != kls[1]


def moved_zeros(name: str, parts: dict[str, Tensor]) -> None:
    if name == UP:
        parts["qzeros"] += 0x11111111


def doubled_scales(name: str, parts: dict[str, Tensor]) -> None:
    if name == V:
        parts["scales"] *= 2


def swapped_groups(name: str, parts: dict[str, Tensor]) -> None:
    if name == DOWN:
        parts["scales"] = parts["scales"].flip(0)


def reversed_words(name: str, parts: dict[str, Tensor]) -> None:
    if name == DOWN:
        words = parts["qweight"].view(torch.uint8).reshape(*parts["qweight"].shape, 4)
        halves = ((words >> 4) | (words << 4)).flip(-1).contiguous()
        parts["qweight"] = halves.view(torch.int32)[..., 0]


MISTAKES = [
    (moved_zeros, UP, "wrong zero", "moved by -1"),
    (doubled_scales, V, "wrong scale", "2 times"),
    (swapped_groups, DOWN, "scales of other groups", "scale of another group"),
    (reversed_words, DOWN, "packing order", "from the other end"),
]


@pytest.mark.parametrize(("spoil", "name", "kind", "text"), MISTAKES)
def test_mistakes_of_a_checkpoint_are_named_and_nothing_else(
    base: Path, spoil: Any, name: str, kind: str, text: str, tmp_path: Path
) -> None:
    save_quantized(models.llama(), tmp_path, "gptq", spoil=spoil)
    result = check(base, candidate=tmp_path, steps=0)
    assert not result.ok and result.verdict == "wrong"
    assert [origin.site for origin in result.origins] == [f"{name}.weight:param"]
    assert result.first_divergence is not None and result.first_divergence.level == "weights"
    hint = result.first_divergence.hints[0]
    assert hint.evidence == kind and text in hint.text
    shown = drawn(result)
    assert "NOT OK: 1 weights differ by more than quantization explains" in shown
    assert re.search(rf"{name.removeprefix('model.layers.')}.* MISTAKE", shown)
    assert len(shown.splitlines()) <= 24


def test_a_reader_of_the_wrong_version_is_found(base: Path, tmp_path: Path) -> None:
    """Zeros of version 1 in a checkpoint that says version 2: every weight is moved by a step."""
    save_quantized(models.llama(), tmp_path, "gptq", version=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = check(base, candidate=tmp_path, steps=0)
    assert len(result.origins) == 14
    assert {origin.hints[0].evidence for origin in result.origins} == {"wrong zero"}


def test_a_weight_that_is_not_quantized_and_not_the_baselines(base: Path, tmp_path: Path) -> None:
    model: Any = models.llama()
    model.model.norm.weight.data[3] += 0.5
    save_quantized(model, tmp_path, "gptq")
    result = check(base, candidate=tmp_path, steps=0)
    assert result.quantization is not None and result.quantization.different == ("model.norm.weight",)
    assert not result.ok and [origin.site for origin in result.origins] == ["model.norm.weight:param"]


def test_the_baselines_weights_are_put_back(base: Path, tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, "gptq")
    model = models.llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, candidate=tmp_path, steps=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_does_not_belong_together(base: Path, tmp_path: Path) -> None:
    save_quantized(models.llama(hidden_size=32), tmp_path / "q", "gptq", group_size=16)
    with pytest.raises(IncomparableError, match="no quantized weight of"):
        check(base, candidate=tmp_path / "q")
    save_quantized(models.llama(vocab_size=300), tmp_path / "v", "gptq")
    with pytest.raises(IncomparableError, match=r"differ in shape\n.*300[\s\S]*256"):
        check(base, candidate=tmp_path / "v", steps=0)
    with pytest.raises(UsageError, match="--reproduction and --accum are for ops"):
        check(base, candidate=tmp_path / "q", accumulation="float32")


def test_command_line(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_quantized(models.llama(), tmp_path / "good", "awq")
    report = tmp_path / "report.json"
    arguments = ["check", str(base), "--candidate", str(tmp_path / "good"), "--steps", "0", "--quiet"]
    assert main([*arguments, "--json", str(report)]) == 0
    assert "ok: every difference is explained by the quantization" in capsys.readouterr().out
    document = json.loads(report.read_text())
    assert document["ok"] and len(document["quantization"]["weights"]) == 14
    assert {"share", "kl", "snr_db", "output_snr_db"} <= document["quantization"]["weights"][0].keys()
    save_quantized(models.llama(), tmp_path / "bad", "gptq", spoil=moved_zeros)
    assert main(["check", str(base), "--candidate", str(tmp_path / "bad"), "--steps", "0", "--quiet"]) == 1
    assert f"{UP}.weight: " in capsys.readouterr().out


def test_f15_the_drift_of_a_checkpoint_has_its_modules_and_its_results(base: Path, tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, "gptq")
    result = check(base, candidate=tmp_path, steps=0)
    rows = {row.site: row for row in result.drift}
    assert [row.kind for row in result.drift].count("result") == 1 and result.drift[-1].site == "logits"
    assert rows["model.embed_tokens"].snr_db == math.inf and rows["model.embed_tokens"].share == 0
    down = rows["model.layers.0.mlp.down_proj"]
    # What it introduced on the candidate's inputs, and what came in with these.
    assert down.introduced_db is not None and down.introduced_db > down.snr_db
    inner = result.drift[:-1]
    assert sum(row.share or 0 for row in inner) == pytest.approx(1)
    (ends,) = result.results
    assert ends.judged_by == "signal" and ends.snr_db == rows["logits"].snr_db
    assert result.inputs[0].inputs[0].origin == "built-in prompts"
    assert not check(base, candidate=tmp_path, steps=0, min_snr=90.0).ok
