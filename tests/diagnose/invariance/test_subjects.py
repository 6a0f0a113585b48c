"""Language models and engines beside themselves: planted mistakes of decoding, and right ones without an alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.diagnose.invariance import causes
from glassengine.diagnose.invariance.causes import MIXED
from glassengine.diagnose.invariance.subjects import prove_batch_invariant
from glassengine.errors import UsageError
from glassengine.results.without_tensors import Variation
from tests.diagnose.invariance.planted import seeded

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
FEWER_KEYS = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
OLDER = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FEWER_KEYS,
    "qwen3": FEWER_KEYS,
    "mixtral": {**FEWER_KEYS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**FEWER_KEYS, "sliding_window": 16},
    "phi3": {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {**OLDER, "ffn_dim": 128, "max_position_embeddings": 256, "word_embed_proj_dim": 64},
    "bloom": {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": SMALL,
    "olmo2": {**SMALL, "num_key_value_heads": 2},
    "mamba": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}
CHANGES = ("run", "batch", "padding", "length", "cache", "order")


def family(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **FAMILIES[name], bos_token_id=1, eos_token_id=2)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return model


def attention_of(model: Any) -> nn.Module:
    found: nn.Module = model.model.layers[1].self_attn
    return found


def wrapped(model: Any, change: Callable[[dict[str, Any]], None]) -> nn.Module:
    """Change the arguments of the attention of the second layer before each call."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        change(kwargs)
        return args, kwargs

    attention_of(model).register_forward_pre_hook(before, with_kwargs=True)
    return model  # type: ignore[no-any-return]


def unmasked(kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = torch.zeros_like(kwargs["attention_mask"])


def restarted(kwargs: dict[str, Any]) -> None:
    cos, sin = kwargs["position_embeddings"]
    kwargs["position_embeddings"] = torch.ones_like(cos), torch.zeros_like(sin) * cos.shape[1]
    if cos.shape[1] < 4:  # positions of a chunk begin again
        kwargs["position_embeddings"] = cos, -sin


class Averaging(nn.Module):
    """Subtracts the mean over all tokens of the call: chunks have other means."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.1 * x.mean(1, keepdim=True)


class OverRows(nn.Module):
    """Scales by the largest value of the whole batch, as a dynamic quantization by tensor does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 31
        return torch.round(x / scale) * scale


class Remembering(nn.Module):
    """Adds what the last call left."""

    def __init__(self) -> None:
        super().__init__()
        self.before: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.before = self.before, x[:1, -1:].clone()
        return x if before is None else x + 0.05 * before


def after_mlp(model: Any, module: nn.Module) -> nn.Module:
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, module)
    return model  # type: ignore[no-any-return]


def changed(model: nn.Module, what: str) -> Variation:
    (found,) = glass.check_invariant(model, invariant=[what]).changes
    return found


PLANTED = [
    ("length", lambda m: after_mlp(m, Averaging()), "mean", "another function"),
    ("padding", lambda m: after_mlp(m, Averaging()), "mean", causes.PADDING),
    ("padding", lambda m: wrapped(m, unmasked), "attention", ""),
    ("batch", lambda m: after_mlp(m, OverRows()), "amax", causes.MIXED),
    ("length", lambda m: wrapped(m, restarted), "", ""),
    ("cache", lambda m: after_mlp(m, Remembering()), "mul", causes.STATE),
    ("run", lambda m: after_mlp(m, nn.Dropout(0.1)), "bernoulli_", causes.RANDOM),
]


class Uncopied(nn.Module):
    """Refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise RuntimeError("it holds a lock")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be copied"):
        glass.check_invariant(Uncopied(), invariant=["run"], inputs={"x": torch.zeros(2, 4)})


SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in PLANTED[1:]]


@pytest.mark.parametrize(("what", "plant", "operation", "cause"), [PLANTED[0], *SLOW])
def test_a_planted_mistake_of_decoding_is_named(
    what: str, plant: Callable[[nn.Module], nn.Module], operation: str, cause: str
) -> None:
    model = plant(family("llama"))
    if what == "run":
        model.eval = lambda: model  # type: ignore[method-assign, assignment]
        for part in model.modules():
            part.training = isinstance(part, nn.Dropout)
    change = changed(model, what)
    assert change.verdict == "beyond rounding", change
    assert change.first is not None and operation in change.first.name, change.in_words()
    assert cause in (change.cause or ""), change


@pytest.mark.slow
def test_a_language_model_gives_the_bits_of_a_step_by_another_kernel() -> None:
    change = changed(family("llama"), "batch")
    assert change.verdict == "within rounding" and change.num_changed_tokens == 0 and change.num_tokens > 0
    assert change.first is not None and change.first.name == "mm" and change.first.inputs_equal
    assert causes.SHAPE in (change.cause or "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_models_raises_no_alarm(name: str, dtype: torch.dtype) -> None:
    found = glass.check_invariant(family(name, dtype), invariant=CHANGES)
    assert found.ok, found
    assert found.change("run").verdict == "bitwise"
    assert {one.what for one in found.changes if one.first is None} == {
        one.what for one in found.changes if one.verdict == "bitwise"
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["threads", "attention", "compile"])
def test_the_switch_is_tried(what: str) -> None:
    change = changed(family("llama"), what)
    assert change.verdict in ("bitwise", "within rounding"), change
    assert change.verdict == "bitwise" or change.cause is not None
    if what == "threads" and change.verdict != "bitwise":
        assert change.switch == "torch.set_num_threads(1)"


class Layers(nn.Module):
    """Two layers over rows x [n, 32]; `mixes` subtracts a share of the mean over rows."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden - 0.1 * hidden.mean(0)) if self.mixes else self.last(hidden)


INPUTS = [{"x": seeded((4, 32))}, {"x": seeded((7, 32))}]


def built(folder: Path, *, mixes: bool, backend: str) -> Path:
    torch.manual_seed(0)
    module = Layers(mixes=mixes).eval()
    glass.build(module, folder / backend, backend=backend, inputs=INPUTS, add_output=["*"])
    return folder / backend


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_engine_that_mixes_rows_is_named(backend: str, tmp_path: Path) -> None:
    found = glass.check_invariant(
        built(tmp_path, mixes=True, backend=backend), invariant=["run", "batch"], inputs=INPUTS
    )
    assert not found.ok and found.change("run").verdict == "bitwise"
    change = found.change("batch")
    assert change.verdict == "beyond rounding" and change.cause == MIXED
    assert (
        change.first is not None and change.first.name == "mean" and "test_subjects.py" in (change.first.source or "")
    )
    assert not prove_batch_invariant(tmp_path / backend, INPUTS[0], num_batches=5).ok


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_engine_that_does_not_is_ok(backend: str, tmp_path: Path) -> None:
    found = glass.check_invariant(built(tmp_path, mixes=False, backend=backend), invariant="all", inputs=INPUTS)
    assert found.ok, found
    assert {one.what for one in found.changes} == {"run", "batch", "cache", "order"}


def test_changes_that_engines_do_not_support_are_refused(tmp_path: Path) -> None:
    engine = built(tmp_path, mixes=False, backend="eager")
    with pytest.raises(UsageError, match="--invariant compile"):
        glass.check_invariant(engine, invariant=["compile"], inputs=INPUTS)
    with pytest.raises(UsageError, match="needs inputs"):
        glass.check_invariant(engine, invariant=["batch"])


def test_other_back_ends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="depend on their number"):
        glass.build(Layers(mixes=False), tmp_path / "engine", backend="eager", inputs=INPUTS, batch_invariant=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "inductor"])
def test_a_batch_invariant_engine_gives_rows_the_bits_that_they_have_alone(
    backend: str, root: Path, tmp_path: Path
) -> None:
    glass.build(root / "examples/tiny-llama", tmp_path / "engine", backend=backend, batch_invariant=True)
    proof = prove_batch_invariant(tmp_path / "engine")
    assert proof.ok and proof.num_batches == 200 and proof.num_rows > 200
    found = glass.check_invariant(tmp_path / "engine", invariant="all")
    assert found.ok and found.change("batch").verdict == "bitwise"
