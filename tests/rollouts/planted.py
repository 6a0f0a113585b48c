"""Rollouts with planted causes, by `generate` of transformers: with a cache, left padding and its own sampling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from glassengine.results.without_tensors import RolloutComparison
from glassengine.rollouts.check import compare
from glassengine.rollouts.formats import Rollout, Sample, sample
from glassengine.rollouts.gap import Gap, shares
from glassengine.rollouts.settings import RolloutSettings
from glassengine.rollouts.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/tiny-llama"
FAMILIES = ("tiny-llama", "llama", "qwen3", "gpt2", "mixtral")
_SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "initializer_range": 0.08, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
THETA = "the theta of RoPE"


def model_of(family: str) -> Any:
    """Return a model in float32 whose tokens have about three nats of entropy."""
    torch.manual_seed(0)
    if family == "tiny-llama":
        return LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=1024, n_embd=128, n_layer=4, n_head=4, n_positions=512, initializer_range=0.08, bos_token_id=1,
            eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        model: Any = GPT2LMHeadModel(config)
    elif family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(3 if family == "gpt2" else 2.5 / (head.std() * 128**0.5))
    return model.eval()


def prompts(number: int, seed: int = 3) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer((TINY / "held_out.txt").read_text()[:20000], add_special_tokens=False).input_ids
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        first, size = (
            int(torch.randint(*bounds, (1,), generator=generator)) for bounds in ((0, len(ids) - 60), (10, 40))
        )
        found.append([1, *ids[first : first + size]])
    return found


@torch.no_grad()
def generate(
    model: Any,
    given: Sequence[Sequence[int]],
    *,
    new: int = 24,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    head: torch.dtype | None = None,
    batch: int = 8,
    raw: bool = False,
    claims: Callable[[list[int]], list[int]] = list,
    reports: Callable[[Tensor], Tensor] = lambda values: values,
    gate_noise: float = 0.0,
    **sampling: Any,
) -> list[Sample]:
    """Return what an engine writes into its file.

    Args:
        model: In float32.
        given: Prompts that it reads.
        new: Tokens at most.
        seed: Of sampling.
        dtype: That it runs in.
        head: Dtype of its head alone.
        batch: Prompts at a time.
        raw: Whether it reports values before its processors.
        claims: Returns the prompt that the file has, of the one that it reads.
        reports: Returns what the file has of the log-probabilities of a response.
        gate_noise: Deviation of noise on the weights of its routers.
        sampling: As for `generate` of transformers.
    """
    engine = copy.deepcopy(model).to(dtype).eval()
    torch.manual_seed(seed)
    if head is not None:
        layer = engine.get_output_embeddings()
        weight = layer.weight
        layer.register_forward_hook(lambda _, args, __: nn.functional.linear(args[0].to(head), weight.to(head)))
    gates = [part for name, part in engine.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:
        gate.weight.add_(torch.randn_like(gate.weight) * gate.weight.std() * gate_noise)
    found: list[Sample] = []
    for at in range(0, len(given), batch):
        found += _generated(
            engine, gates, [list(one) for one in given[at : at + batch]], new, raw, claims, reports, sampling
        )
    return found


def _generated(
    engine: Any,
    gates: list[nn.Module],
    part: list[list[int]],
    new: int,
    raw: bool,
    claims: Callable[[list[int]], list[int]],
    reports: Callable[[Tensor], Tensor],
    sampling: Mapping[str, Any],
) -> list[Sample]:
    width = max(map(len, part))
    taken: list[list[Tensor]] = [[] for _ in gates]
    hooks = [
        gate.register_forward_hook(lambda _, __, result, layer=layer: taken[layer].append(result[2].clone()))
        for layer, gate in enumerate(gates)
    ]
    ids = torch.tensor([[0] * (width - len(one)) + one for one in part])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in part])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
    made = engine.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new, output_scores=True, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    values = torch.stack(made.logits if raw else made.scores, 1).float().log_softmax(-1)
    found = []
    for row, prompt in enumerate(part):
        response = made.sequences[row, width:].tolist()
        response = response[: response.index(2) + 1] if 2 in response else response
        logprobs = reports(values[row, torch.arange(len(response)), response])
        routes = None
        if gates:
            layers = []
            for steps in taken:
                first = steps[0].reshape(len(part), width, -1)[row, width - len(prompt) :]
                rest = [step.reshape(len(part), -1)[row][None] for step in steps[1:]]
                layers.append(torch.cat([first, *rest])[: len(prompt) + len(response) - 1])
            routes = torch.stack(layers, 1)
        found.append(sample(claims(prompt), response, logprobs.double().tolist(), routes=routes))
    return found


@dataclass(frozen=True)
class Plant:
    """A planted cause, or two.

    Attributes:
        name: Of it.
        engine: Arguments of `generate`.
        truth: Settings that are the truth; None where none of those that are tried is.
        change: Changes the engine's model.
        prompts: Changes what the engine reads.
        precision: Dtype that the rest is rounding in.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Any] | None = field(default_factory=dict)
    change: Callable[[Any], None] | None = None
    prompts: Callable[[list[int]], list[int]] = list
    precision: str = "float32"
    dense: bool = True


def step_of(model: Any) -> None:
    """Change all weights as some steps of training do."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.02)


def with_theta(model: Any) -> None:
    rope = model.model.rotary_emb
    size = len(rope.inv_freq)
    rope.inv_freq.copy_(5e5 ** -(torch.arange(size) / size))


def to_fp8(model: Any) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in name for part in ("embed", "wte", "wpe", "head", "gate.weight")):
                weight.copy_(weight.to(torch.float8_e4m3fn).float())


def _shifted(values: Tensor) -> Tensor:
    return torch.cat([values[1:], values[:1]])


_BF16 = torch.bfloat16
_NO_BOS: dict[str, Any] = {"claims": lambda prompt: [1, *prompt]}
SINGLE = (
    Plant("nothing"),
    Plant("bfloat16", {"dtype": _BF16}, precision="bfloat16"),
    Plant("temperature", {"temperature": 0.7}, {"temperature": 0.7}),
    Plant("top_p", {"top_p": 0.9}, {"top_p": 0.9}),
    Plant("top_k", {"top_k": 20}, {"top_k": 20}),
    Plant("min_p", {"min_p": 0.05}, {"min_p": 0.05}),
    Plant("repetition", {"repetition_penalty": 1.1}, {"repetition": 1.1}),
    Plant("head in bfloat16", {"head": _BF16}, {"head": "bfloat16"}),
    Plant("another step", {}, {"weights": "step 1"}, step_of),
    Plant("theta", {}, {"config": (THETA, 5e5)}, with_theta),
    Plant("fp8", {}, {"quantized": "fp8"}, to_fp8),
    Plant("no BOS", _NO_BOS, {"tokens": "without its first token"}, prompts=lambda prompt: prompt[1:]),
    Plant("system prompt", {"claims": lambda p: [1, *p[4:]]}, None, prompts=lambda p: [1, 300, 17, 412, *p[1:]]),
    Plant("shift", {"reports": _shifted}, {"shift": -1}),
    Plant("rounded values", {"reports": lambda v: v.bfloat16().float()}, {"kind": "rounded to bfloat16"}),
    Plant("base 2", {"reports": lambda v: v / 0.6931471805599453}, {"kind": "logarithm to base 2"}),
    Plant("no end", {"suppress_tokens": [2]}, {"eos": "suppressed"}),
    Plant("gate", {"gate_noise": 0.05}, {"routes": "file"}, dense=False),
)
"""Causes alone."""
_OF = {one.name: one for one in SINGLE}


def _pair(first: str, second: str, **changes: Any) -> Plant:
    one, two = _OF[first], _OF[second]
    return replace(
        one,
        name=f"{first} + {second}",
        engine={**one.engine, **two.engine},
        truth={**(one.truth or {}), **(two.truth or {})},
        change=one.change or two.change,
        prompts=two.prompts if two.prompts is not list else one.prompts,
        precision=two.precision if two.precision != "float32" else one.precision,
        **changes,
    )


PAIRS = (
    _pair("temperature", "top_p"),
    _pair("temperature", "top_k"),
    _pair("repetition", "bfloat16"),
    _pair("another step", "top_p"),
    _pair("no BOS", "repetition"),
    _pair("theta", "top_k"),
    _pair("another step", "temperature"),
    _pair("temperature", "bfloat16"),
    _pair("fp8", "temperature"),
    _pair("theta", "no BOS"),
    _pair("head in bfloat16", "temperature"),
    _pair("repetition", "temperature"),
)
"""Two causes together."""


@dataclass(frozen=True)
class Outcome:
    """What was found of a plant.

    Attributes:
        found: The result.
        truth: Setting -> its true share.
        is_right: Whether the largest cause is the largest of the truth, or the kind of an unknown cause is right.
        error: Largest error of a share.
    """

    found: RolloutComparison
    truth: Mapping[str, float]
    is_right: bool
    error: float


def plant(
    model: Any, one: Plant, *, number: int = 8, new: int = 24, routes: bool = True, dtype: torch.dtype | None = None
) -> tuple[Trainer, list[Sample]]:
    """Return the trainer of a planted rollout, and its samples."""
    engine, other = copy.deepcopy(model), copy.deepcopy(model)
    step_of(other)
    if one.change is not None:
        one.change(engine)
    samples = generate(engine, [one.prompts(prompt) for prompt in prompts(number)], new=new, **one.engine)
    samples = samples if routes else [replace(each, routes=None) for each in samples]
    trainer = Trainer(model if dtype is None else copy.deepcopy(model).to(dtype), {"step 1": other.state_dict})
    return trainer, samples


def outcome(trainer: Trainer, samples: list[Sample], one: Plant) -> Outcome:
    """Search the causes, and hold them against the truth."""
    found = compare(trainer, Rollout("planted", samples), lambda token: None)
    causes = [cause for cause in found.causes if cause.setting != "routes" or "routes" in (one.truth or {})]
    if not one.truth:
        kinds = ("none", "rounding") if one.truth is not None else ("unexplained",)
        is_right = found.found in kinds
        return Outcome(found, {}, is_right, 0.0)
    base = RolloutSettings()
    gap = Gap(trainer, samples, base)
    start = replace(base, routes="file") if any(cause.setting == "routes" for cause in found.causes) else base
    truth, _ = shares(gap, replace(start, **one.truth), base)
    truth.pop("routes", None) if "routes" not in one.truth else None
    first = max(truth, key=lambda name: truth[name])
    known = {cause.setting: cause.share for cause in causes}
    error = max(abs(known.get(name, 0.0) - truth.get(name, 0.0)) for name in truth.keys() | known.keys())
    is_right = bool(causes) and causes[0].setting == first
    return Outcome(found, truth, is_right, error)
