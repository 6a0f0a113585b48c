"""Every class of op that the families contain has a rounding bound of its own or is listed as having none."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from glassengine.numerics.bounds import has_bound
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named
from glassengine.program.representation.naming import op_name
from tests.corpus.families import BUNDLED, FAMILIES, make_bench

# What the programs of forty architectures have between them: decoders with and without experts, encoders, encoder and
# decoder, vision, audio, state spaces.
_KNOWN_TEXT = """
    _native_batch_norm_legit_no_training _to_copy _unsafe_view _weight_norm adaptive_avg_pool1d adaptive_avg_pool2d add
    addmm alias baddbmm bmm cat ceil clamp clone conv1d conv2d copy cos cumsum div einsum embedding exp expand full
    gather gelu getitem group_norm hardtanh index index_copy layer_norm linear log masked_fill matmul max max_pool2d
    mean mul neg new_empty pad permute pow relu repeat repeat_interleave roll rsqrt scaled_dot_product_attention scatter
    select sigmoid silu sin slice slice_scatter softmax softplus split split_with_sizes sqrt square squeeze stack sub
    sum tanh topk transpose type_as unbind unsqueeze view where zeros zeros_like
"""
KNOWN = _KNOWN_TEXT.split()

QUICK = ("vit", "t5", "resnet")
ISSUE = ("llama", "qwen3", "gemma3", "gpt2", "phi3", "mixtral", "bert", "mamba")
OTHERS = tuple(name for name in FAMILIES if name not in (*QUICK, *ISSUE, BUNDLED, "llama-1024"))


def is_listed(name: str) -> bool:
    return has_bound(name) or named(name).rounding is Rounding.UNBOUNDED or named(name).is_arbitrary


def makes_floats(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return node.op == "call_function" and isinstance(first, torch.Tensor) and first.is_floating_point()


def test_every_known_op_is_listed() -> None:
    assert [name for name in KNOWN if not is_listed(name)] == []


def test_an_op_of_no_class_is_not_listed() -> None:
    assert not is_listed("fft_fft") and not is_listed("")


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in (*ISSUE, *OTHERS))])
def test_every_op_of_a_family_is_listed(family: str) -> None:
    program = make_bench(family, "float32").program
    found = {op_name(node) for node in program.graph.nodes if makes_floats(node)}
    assert len(found) >= 5
    assert sorted(name for name in found if not is_listed(name)) == []
