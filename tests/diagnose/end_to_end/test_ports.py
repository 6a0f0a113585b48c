"""Ports: the same computation in other words raises no alarm, and one mistake in it is found where it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.results import Comparison
from glassengine.testing import models

sys.path.insert(0, str(Path(__file__).parent))

from ports import Port, Style, model

STYLES = {
    "other names": Style(),
    "fused": Style(fused=True),
    "root and explicit attention": Style(norm="root", attention="explicit"),
    "wide norm and einsum": Style(norm="wide", attention="einsum"),
    "sum, in another order": Style(norm="sum", reordered=True),
    "everything": Style(fused=True, norm="wide", attention="explicit", transposed=True),
    "transposed, in another order": Style(transposed=True, norm="root", reordered=True),
    "gpt2, fused": Style("gpt2", fused=True, transposed=True),
    "gpt2, written out": Style("gpt2", norm="written", attention="explicit"),
    "bert, einsum": Style("bert", norm="written", attention="einsum", reordered=True),
    "bert, fused": Style("bert", fused=True, transposed=True, attention="explicit"),
}

# Style, mistake, and the sites at or directly around the op that is guilty.
MISTAKES = [
    ("other names", "half", ("self_attn/cat.1", "self_attn/mul.1")),
    ("fused", "swapped", ("self_attn/linear.1", "self_attn/view.1", "self_attn/cat.2", "self_attn.k_proj/linear.0")),
    ("fused", "gate", ("mlp/mul.0", "mlp/silu.0", "mlp.gate_proj/linear.0")),
    ("root and explicit attention", "epsilon", ("input_layernorm/add.0", "input_layernorm/mul.0")),
    ("root and explicit attention", "softmax axis", ("self_attn/scaled_dot_product_attention.0",)),
    ("wide norm and einsum", "scale", ("self_attn/scaled_dot_product_attention.0",)),
    ("sum, in another order", "residual", ("layers.1/add.0",)),
    ("everything", "epsilon", ("input_layernorm/add.0", "input_layernorm/rsqrt.0", "input_layernorm/mul.0")),
    ("transposed, in another order", "axis", ("self_attn/view.0", "self_attn/transpose.0")),
    ("gpt2, fused", "swapped", ("self_attn/scaled_dot_product_attention.0",)),
    ("gpt2, written out", "scale", ("self_attn/scaled_dot_product_attention.0",)),
    ("bert, einsum", "axis", ("self_attn/view.0", "self_attn/transpose.0")),
    ("bert, fused", "residual", ("layers.1/add.0",)),
]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ids") / "inputs.pt"
    torch.save({"ids": torch.tensor([[3, 17, 9, 41, 22, 8, 30], [5, 1, 44, 3, 27, 12, 20]])}, path)
    return str(path)


def checked(style: str, dtype: str, ids: str, mistake: str = "") -> Comparison:
    torch.set_num_threads(1)
    baseline = model(STYLES[style].family, getattr(torch, dtype))
    return check(baseline, candidate=Port(baseline, STYLES[style], mistake).eval(), inputs=ids)


def sampled(runs: list[tuple[str, ...]], always: set[int]) -> list[object]:
    """A few run always, the rest with `-m slow`."""
    return [pytest.param(*run, marks=() if index in always else SLOW) for index, run in enumerate(runs)]


@pytest.mark.parametrize(
    ("style", "dtype"),
    sampled([(style, dtype) for style in STYLES for dtype in ("float32", "bfloat16")], {5, 17}),
)
def test_a_port_is_no_mistake(style: str, dtype: str, ids: str) -> None:
    result = checked(style, dtype, ids)
    assert result.ok and result.verdict in ("identical", "rounding") and not result.origins
    assert result.coverage > 0.9
    within = [pair for pair in result.pairs if pair.method == "region"]
    assert all(
        pair.verdict in ("identical", "rounding") and "region that ends in" in str(pair.reason) for pair in within
    )
    assert within or STYLES[style].norm != "root"


@pytest.mark.parametrize(
    ("style", "mistake", "sites", "dtype"),
    sampled([(*run, dtype) for run in MISTAKES for dtype in ("float32", "bfloat16")], {3, 7}),
)
def test_a_mistake_in_a_port_is_found_where_it_is(
    style: str, mistake: str, sites: tuple[str, ...], dtype: str, ids: str
) -> None:
    result = checked(style, dtype, ids, mistake)
    assert not result.ok and result.verdict == "wrong"
    assert result.first_divergence is not None and result.first_divergence.level == "candidate"
    assert result.first_divergence.site.removeprefix("layers.1.") in sites
    own = [origin for origin in result.origins if origin.level == "candidate"]
    assert len(own) <= 3 and all(origin.site.startswith("layers.1") for origin in own)


@SLOW
@pytest.mark.parametrize("epsilon", [1e-6, 1e-4])
def test_a_language_model_with_a_norm_of_its_own(epsilon: float, token_ids: str) -> None:
    """The weight is multiplied before the result is rounded to bfloat16; prefill, decode steps and padding."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        root = torch.sqrt((wide * wide).mean(-1, keepdim=True) + self.variance_epsilon)  # type: ignore[operator]
        return (self.weight.float() * (wide / root)).to(x.dtype)  # type: ignore[operator, union-attr]

    torch.set_num_threads(1)
    baseline, port = models.llama(rms_norm_eps=1e-6).bfloat16(), models.llama(rms_norm_eps=1e-6).bfloat16()
    for module in port.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward, module.variance_epsilon = forward.__get__(module), epsilon  # type: ignore[assignment]
    result = check(baseline, candidate=port, inputs=token_ids, steps=1)
    assert result.ok == (epsilon == 1e-6), result.not_ok_because
    if result.ok:
        assert result.verdict in ("identical", "rounding") and result.coverage > 0.9
    else:
        assert result.first_divergence is not None and "norm" in result.first_divergence.site


def wide_gain(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Multiply the gain before rounding."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)  # type: ignore[operator]
    return (norm.weight.float() * wide).to(x.dtype)  # type: ignore[operator, union-attr]


def kernel(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Normalize in one op that knows the dtype of its input alone."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)  # type: ignore[arg-type]


def with_norm(model: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model


def with_wide_residual(model: nn.Module) -> nn.Module:
    """Let layers hand on float32, and everything inside of them compute in the model's dtype."""
    dtype = next(model.parameters()).dtype

    def in_dtype(own: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(x.to(dtype), *args, **kwargs)

    def widened(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return (made[0].float(), *made[1:]) if isinstance(made, tuple) else made.float()

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(("RMSNorm", "RotaryEmbedding")):
            module.forward = partial(in_dtype, module.forward)
        elif kind.endswith(("Attention", "MLP")) or isinstance(module, nn.Embedding):
            module.forward = partial(widened, module.forward)
    return model


def unit_gains(model: nn.Module) -> nn.Module:
    """A fresh model: before and after the gain is the same tensor."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
    return model


REWRITES = {
    # Layers of experts hardly change the stream here: what is normalized twice is nearly the same.
    "mixtral, gain before rounding": (models.mixtral, lambda model: with_norm(model, wide_gain)),
    "unit gains, one op": (lambda: unit_gains(models.llama()), lambda model: with_norm(model, kernel)),
    "float32 residuals": (models.llama, with_wide_residual),
}


@pytest.mark.parametrize(
    "name", [name if name == "unit gains, one op" else pytest.param(name, marks=SLOW) for name in REWRITES]
)
def test_another_place_to_round_is_no_mistake(name: str, token_ids: str) -> None:
    make, rewritten = REWRITES[name]
    torch.set_num_threads(1)
    result = check(make().bfloat16(), candidate=rewritten(make().bfloat16()), inputs=token_ids, steps=0)
    assert result.ok and result.verdict in ("identical", "rounding") and not result.origins
    assert result.coverage > 0.9
