"""Conversions gone wrong, each of which must be named; a healthy one of every architecture is the checkpoint's."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from glassengine.plugins.serving.alignment import numbers_of
from glassengine.plugins.serving.check.weights import JudgedWeight, WeightsFound, judge_weights
from glassengine.plugins.serving.ggml.candidate import open_gguf
from glassengine.plugins.serving.ggml.types import BY_NAME, step_of
from glassengine.plugins.serving.ggml.write import ARCHITECTURES, file_tensors, write_gguf
from glassengine.serving.protocol import ServedWeight, ServingOptions
from glassengine.testing.architectures import FAMILIES
from tests.plugins.serving.check.end_to_end.llama_cpp import quantized

KNOWN = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "mixtral", "bert", "qwen2-moe", "qwen3-moe")


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    module = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def judged(module: nn.Module, path: Path) -> WeightsFound:
    served = open_gguf(str(path), ServingOptions())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = served.weights(module, module.config)
    return judge_weights(parameters, found, served.extra_weights(), numbers_of(module.config))


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_healthy_file(family: str, kind: str, tmp_path: Path) -> None:
    module = made(family)
    write_gguf(module, tmp_path / "a.gguf", kind=kind)
    found = judged(module, tmp_path / "a.gguf")
    assert not found.wrong and len(found.judged) > 14
    assert all(item.site.startswith("pooler") for item in found.skipped)
    # The norms of Gemma have a 1 added in the file, and lose a bit by it.
    rounded = {one.name for one in found.judged if one.verdict == "rounding"}
    assert kind == "Q8_0" or family == "gemma3" or not rounded
    assert kind == "F32" or any("proj" in name or "attn" in name or "query" in name for name in rounded)


def pairs(x: Tensor) -> Tensor:
    return x.reshape(-1, 8, 2, x.shape[-1]).transpose(1, 2).reshape(x.shape)


PLANTED: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("llama", "blk.0.attn_q.weight", pairs, "permutation of rotary pairs is missing"),
    ("llama", "blk.1.attn_k.weight", pairs, "permutation of rotary pairs is missing"),
    ("qwen3", "blk.0.attn_q.weight", lambda x: pairs(x), "permut"),
    ("gemma3", "blk.0.attn_norm.weight", lambda x: x - 1, "1 of the norm was not added"),
    ("llama", "blk.0.attn_norm.weight", lambda x: x + 1, "1 was added to the norm"),
    ("gpt2", "blk.0.attn_output.weight", lambda x: x.T, "transposed"),
    ("gpt2", "blk.1.attn_qkv.weight", lambda x: torch.cat(list(reversed(x.chunk(3)))), "order"),
    ("phi3", "blk.0.attn_qkv.weight", lambda x: torch.cat([x[64:96], x[:64], x[96:]]), "order k, q, v"),
    ("phi3", "blk.0.ffn_up.weight", lambda x: torch.cat(list(reversed(x.chunk(2)))), "2 parts are in another order"),
    ("llama", "blk.0.ffn_down.weight", lambda x: 2 * x, "scale"),
    ("llama", "blk.0.ffn_gate.weight", lambda x: x.flip(0), "reverse|order"),
    ("qwen2", "blk.0.attn_q.bias", torch.zeros_like, "zero"),
    ("bert", "blk.0.attn_v.bias", lambda x: -x, "scaled by -1"),
    ("bert", "token_types.weight", lambda x: x.flip(0), "reverse|swapped|order|parts"),
    ("mixtral", "blk.0.ffn_down_exps.weight", lambda x: x.roll(1, 0), "axis 0|order|parts"),
    ("qwen3", "blk.0.attn_q_norm.weight", lambda x: x * 1.25, "scale"),
]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(("family", "name", "change", "said"), PLANTED, ids=[f"{one[0]}-{one[1]}" for one in PLANTED])
def test_a_planted_conversion_is_named(
    family: str, name: str, change: Callable[[Tensor], Tensor], said: str, kind: str, tmp_path: Path
) -> None:
    module = made(family)
    right = dict(file_tensors(module, ARCHITECTURES[module.config.model_type]))[name]
    write_gguf(module, tmp_path / "a.gguf", kind=kind, changed={name: change(right).contiguous()})
    (wrong,) = judged(module, tmp_path / "a.gguf").wrong
    assert name in wrong.served.stored and wrong.hints
    if kind == "F32":
        assert re.search(said, wrong.hints[0].text), wrong.hints


def test_two_weights_are_exchanged(tmp_path: Path) -> None:
    module = made("llama")
    tensors = dict(file_tensors(module, "llama"))
    gate, up = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"
    for kind in ("F32", "Q8_0"):
        write_gguf(module, tmp_path / "a.gguf", kind=kind, changed={gate: tensors[up], up: tensors[gate]})
        found = judged(module, tmp_path / "a.gguf").wrong
        assert [one.name.split(".")[-2] for one in found] == ["gate_proj", "up_proj"]
        assert "up_proj" in found[0].hints[0].text and "gate_proj" in found[1].hints[0].text


def test_one_wrong_scale_of_a_block_is_found(tmp_path: Path) -> None:
    module = made("llama")
    write_gguf(module, tmp_path / "a.gguf", kind="Q8_0")
    served = open_gguf(str(tmp_path / "a.gguf"), ServingOptions())
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    tensor = served.file.tensors["blk.1.ffn_down.weight"]
    for block in range(4):  # the scale of a block is its first two bytes: another exponent
        data[tensor.offset + 34 * block + 1] ^= 0x04
    (tmp_path / "a.gguf").write_bytes(data)
    (wrong,) = judged(module, tmp_path / "a.gguf").wrong
    assert wrong.served.stored == ("blk.1.ffn_down.weight",) and "scale" in wrong.hints[0].kind


def test_a_type_that_is_called_another(tmp_path: Path) -> None:
    module = made("llama")
    write_gguf(module, tmp_path / "a.gguf", kind="F16")
    data = (tmp_path / "a.gguf").read_bytes()
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at] == 1
    (tmp_path / "a.gguf").write_bytes(data[:at] + bytes([30]) + data[at + 1 :])
    (wrong,) = judged(module, tmp_path / "a.gguf").wrong
    assert "float16, called BF16" in wrong.hints[0].text


def test_a_head_that_is_not_tied_and_a_bias_that_is_missing(tmp_path: Path) -> None:
    module = made("qwen2")
    tensors = dict(file_tensors(module, "qwen2"))
    write_gguf(module, tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    # Planted: the tensors are there under names that llama.cpp does not read.
    for name in ("output.weight", "blk.0.attn_k.bias"):
        assert name in tensors
        other = name.replace("t.w", "t_w").replace("k.b", "k_b")
        head = struct.pack("<Q", len(name))
        data = data.replace(head + name.encode(), head + other.encode(), 1)
    (tmp_path / "a.gguf").write_bytes(data)
    found = judged(module, tmp_path / "a.gguf")
    assert [(one.name, one.hints[0].kind) for one in found.wrong] == [
        ("model.layers.0.self_attn.k_proj.bias", "bias missing"),
        ("lm_head.weight", "swapped"),
    ]
    assert len([item for item in found.skipped if item.side == "candidate"]) == 2


def relabelled(path: Path, name: str, new: int) -> None:
    data = path.read_bytes()
    at = data.index(name.encode()) + len(name) + 4 + 16
    path.write_bytes(data[:at] + bytes([new]) + data[at + 1 :])


def swapped(path: Path, name: str) -> None:
    tensor = open_gguf(str(path), ServingOptions()).file.tensors[name]
    data = bytearray(path.read_bytes())
    held = slice(tensor.offset, tensor.offset + tensor.num_bytes)
    data[held] = np.frombuffer(data[held], np.int16).byteswap().tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("F16", partial(relabelled, new=30), "its bytes are float16, called BF16"),
        ("BF16", partial(relabelled, new=1), "its bytes are bfloat16, called F16"),
        ("F16", swapped, "its bytes are in the other order"),
        ("BF16", swapped, "its bytes are in the other order"),
    ],
)
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight"])
def test_f67_bytes_of_another_type_or_order_are_named(
    name: str, kind: str, change: Callable[[Path, str], None], said: str, tmp_path: Path
) -> None:
    module = made("llama")
    write_gguf(module, tmp_path / "a.gguf", kind=kind)
    assert not judged(module, tmp_path / "a.gguf").wrong
    change(tmp_path / "a.gguf", name)
    (wrong,) = judged(module, tmp_path / "a.gguf").wrong
    assert said in wrong.hints[0].text and wrong.hints[0].proven


def test_f67_scales_that_are_no_numbers_are_placed(tmp_path: Path) -> None:
    module = made("llama")
    write_gguf(module, tmp_path / "a.gguf", kind="Q8_0")
    tensor = open_gguf(str(tmp_path / "a.gguf"), ServingOptions()).file.tensors["blk.1.ffn_up.weight"]
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[tensor.offset + 34 * 4 : tensor.offset + 34 * 4 + 2] = b"\x00\x7c"
    (tmp_path / "a.gguf").write_bytes(data)
    (wrong,) = judged(module, tmp_path / "a.gguf").wrong
    assert "has NaN or infinity in 32 of" in wrong.hints[0].text and "in rows 2 to 2" in wrong.hints[0].text


@pytest.mark.parametrize("kind", ["MXFP4", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("drawn", ["normal", "laplace", "uniform"])
def test_f61_what_llama_cpp_itself_makes_is_right(drawn: str, kind: str) -> None:
    """It cuts off what is between 6 and 8 scales of MXFP4, and least squares make the others smaller."""
    torch.manual_seed(3)
    weight = {
        "normal": torch.randn(128, 512),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((128, 512)),
        "uniform": torch.rand(128, 512) - 0.5,
    }[drawn]

    def mistakes(value: Tensor) -> list[JudgedWeight]:
        served = ServedWeight(("blk.0.ffn_up.weight",), value, step_of(value, BY_NAME[kind]), (kind,))
        return judge_weights({"up": weight}, {"up": served}, [], {}).wrong

    assert not mistakes(quantized(weight, kind))
    if kind in ("MXFP4", "Q4_0", "Q4_K", "Q6_K", "Q8_0"):  # planted: a factor below every step
        assert mistakes(quantized(1.08 * weight, kind))
