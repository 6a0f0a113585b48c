"""QMoE of ONNX Runtime's own domain in terms of standard operators: the chosen experts, with dequantized weights.

Each expert computes every token, and the tokens take from each what its share is: nothing where it was not chosen.
Products whose activations ONNX Runtime rounds to eight bits are left out, and so are weights of eight-bit floats.

Shape legend: T tokens, E experts, C hidden, F inner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from glassengine.plugins.onnx.table import composed, given_inputs
from glassengine.program.onnx.translated import ValueType

_INPUTS = (
    *("x", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales", "fc3_bias"),
    *("fc1_zero", "fc2_zero", "fc3_zero", "shares_given"),
)
_INTEGERS, _INT8, _FOUR = b"int", 4, 4
_ACTIVATIONS = {b"silu": "silu", b"swiglu": "swiglu", b"relu": "relu", b"gelu": "gelu", b"identity": "identity"}


def experts(
    proto: onnx.NodeProto, attributes: Mapping[str, Any], types: Mapping[str, ValueType], domain: str
) -> onnx.FunctionProto | None:
    """Return a node as a function of standard operators; None for a form that is not known."""
    given = given_inputs(proto, _INPUTS)
    whole = {name: entry.i for name, entry in attributes.items() if entry.type == 2}
    real = {name: entry.f for name, entry in attributes.items() if entry.type == 1}
    bits, block = whole.get("expert_weight_bits", _FOUR), whole.get("block_size", 0)
    widths = {name: whole[name] for name in whole if name.endswith("_expert_weight_bits")}
    rounds = whole.get("accuracy_level", 0) == _INT8 or (block > 0 and bits != _FOUR)
    kind = attributes["quant_type"].s if "quant_type" in attributes else _INTEGERS
    is_known = kind == _INTEGERS and not widths and not rounds and bits in (_FOUR, 8)
    if not is_known or given is None or whole.get("use_sparse_mixer") or "fc1" not in given:
        return None
    if any(f"{name}_scales" not in given for name in ("fc1", "fc2", "fc3") if name in given):
        return None
    activation = _ACTIVATIONS.get(attributes["activation_type"].s if "activation_type" in attributes else b"relu")
    fusion = whole.get("swiglu_fusion", 0)
    if activation is None or (activation == "swiglu" and not fusion and "fc3" not in given):
        return None
    lines = ["minus = Constant <value = int64[1] {-1}> ()", "zero = Constant <value = int64[1] {0}> ()"]
    lines += ["two = Constant <value = int64[1] {2}> ()"]
    for name in ("fc1", "fc2", "fc3"):
        if name in given:
            lines += _weight(name, bits, block, has_zero=f"{name}_zero" in given)
    lines += _shares(whole.get("k", 1), bool(whole.get("normalize_routing_weights")), "shares_given" in given)
    lines += [
        "width = Shape <start = -1> (x)",
        "flat = Concat <axis = 0> (minus, width)",
        "tokens = Reshape (x, flat)",
        *_product("first", "tokens", "fc1", has_bias="fc1_bias" in given),
    ]
    if "fc3" in given:
        lines += _product("third", "tokens", "fc3", has_bias="fc3_bias" in given)
    lines += _activated(activation, fusion, real, has_third="fc3" in given)
    lines += [
        *_product("second", "inner", "fc2", has_bias="fc2_bias" in given),
        "by_expert = Transpose <perm = [1, 0]> (shares)",
        "parts = Unsqueeze (by_expert, minus)",
        "weighed = Mul (second, parts)",
        "added = ReduceSum <keepdims = 0> (weighed, zero)",
        "shape = Shape (x)",
        "y = Reshape (added, shape)",
    ]
    return composed(proto, domain, _INPUTS, ("y",), lines)


def _integers(name: str, source: str, bits: int) -> list[str]:
    """The numbers of bytes along the last axis, the lowest bits first."""
    if bits != _FOUR:
        return [f"{name} = Identity ({source})"]
    return [
        f"{name}_sixteen = Constant <value = uint8[1] {{16}}> ()",
        f"{name}_low = Mod ({source}, {name}_sixteen)",
        f"{name}_high = Div ({source}, {name}_sixteen)",
        f"{name}_low1 = Unsqueeze ({name}_low, minus)",
        f"{name}_high1 = Unsqueeze ({name}_high, minus)",
        f"{name}_pairs = Concat <axis = -1> ({name}_low1, {name}_high1)",
        f"{name}_shape = Constant <value = int64[3] {{0, 0, -1}}> ()",
        f"{name} = Reshape ({name}_pairs, {name}_shape)",
    ]


def _weight(name: str, bits: int, block: int, *, has_zero: bool) -> list[str]:
    """The weight [E, in, out] that integers, scales and zero points stand for."""
    lines = _integers(f"{name}_whole", name, bits)
    lines += [
        f"{name}_blocked = Constant <value = int64[4] {{0, 0, -1, {block}}}> ()" if block else "",
        f"{name}_float = CastLike ({name}_whole, {name}_scales)",
        f"{name}_groups = Reshape ({name}_float, {name}_blocked)"
        if block
        else f"{name}_groups = Identity ({name}_float)",
        f"{name}_step = Unsqueeze ({name}_scales, minus)",
    ]
    if has_zero and block:
        lines += _integers(f"{name}_points_all", f"{name}_zero", bits)
        lines += [
            f"{name}_count = Shape <start = 2, end = 3> ({name}_scales)",
            f"{name}_points = Slice ({name}_points_all, zero, {name}_count, two)",
            f"{name}_points_float = CastLike ({name}_points, {name}_scales)",
            f"{name}_point = Unsqueeze ({name}_points_float, minus)",
        ]
    else:
        lines += [
            f"{name}_middle = Constant <value = float {{{float(2 ** (bits - 1))!r}}}> ()",
            f"{name}_point = CastLike ({name}_middle, {name}_scales)",
        ]
    return [
        line
        for line in (
            *lines,
            f"{name}_centered = Sub ({name}_groups, {name}_point)",
            f"{name}_values = Mul ({name}_centered, {name}_step)",
            f"{name}_flat_shape = Constant <value = int64[3] {{0, 0, -1}}> ()",
            f"{name}_rows = Reshape ({name}_values, {name}_flat_shape)",
            f"{name}_weight = Transpose <perm = [0, 2, 1]> ({name}_rows)",
        )
        if line
    ]


def _shares(number: int, normalized: bool, given: bool) -> list[str]:
    """The share of each expert [T, E]: 0 of those that were not chosen."""
    lines = [f"number = Constant <value = int64[1] {{{number}}}> ()"]
    if given:
        lines += [
            "best, chosen = TopK <axis = 1> (router, number)",
            "taken = GatherElements <axis = 1> (shares_given, chosen)",
        ]
        lines += (
            ["total = ReduceSum (taken, last_axis)", "kept = Div (taken, total)"]
            if normalized
            else ["kept = Identity (taken)"]
        )
    else:
        # The kernel of the processor takes the softmax of the chosen ones, whether it is to normalize them or not.
        lines += ["best, chosen = TopK <axis = 1> (router, number)", "kept = Softmax <axis = 1> (best)"]
    return [
        "last_axis = Constant <value = int64[1] {1}> ()",
        *lines,
        "none = Sub (router, router)",
        "shares = ScatterElements <axis = 1> (none, chosen, kept)",
    ]


def _product(name: str, source: str, weight: str, *, has_bias: bool) -> list[str]:
    """Every expert's product [E, T, out]."""
    made = f"{name} = MatMul ({source}, {weight}_weight)"
    if not has_bias:
        return [made]
    return [
        f"{name}_plain = MatMul ({source}, {weight}_weight)",
        f"{name}_axis = Constant <value = int64[1] {{1}}> ()",
        f"{name}_bias = Unsqueeze ({weight}_bias, {name}_axis)",
        f"{name} = Add ({name}_plain, {name}_bias)",
    ]


def _activated(kind: str, fusion: int, real: Mapping[str, float], *, has_third: bool) -> list[str]:
    if kind != "swiglu":
        lines = {
            "silu": ["sigmoid = Sigmoid (first)", "bent = Mul (first, sigmoid)"],
            "relu": ["bent = Relu (first)"],
            "gelu": [
                "root = Constant <value = float {1.4142135623730951}> ()",
                "root_like = CastLike (root, first)",
                "half = Constant <value = float {0.5}> ()",
                "half_like = CastLike (half, first)",
                "single = Constant <value = float {1.0}> ()",
                "single_like = CastLike (single, first)",
                "narrow = Div (first, root_like)",
                "error = Erf (narrow)",
                "above = Add (error, single_like)",
                "share = Mul (above, half_like)",
                "bent = Mul (first, share)",
            ],
            "identity": ["bent = Identity (first)"],
        }[kind]
        return [*lines, "inner = Mul (bent, third)" if has_third else "inner = Identity (bent)"]
    lines = []
    if fusion == 1:
        lines += [
            "pairs_shape = Constant <value = int64[4] {0, 0, -1, 2}> ()",
            "pairs = Reshape (first, pairs_shape)",
            "gate1, linear1 = Split <axis = 3, num_outputs = 2> (pairs)",
            "gate = Squeeze (gate1, minus)",
            "linear = Squeeze (linear1, minus)",
        ]
    elif fusion == 2:
        lines.append("gate, linear = Split <axis = 2, num_outputs = 2> (first)")
    else:
        lines += ["gate = Identity (first)", "linear = Identity (third)"]
    numbers = {"alpha": real.get("activation_alpha", 1.0), "beta": real.get("activation_beta", 0.0)}
    if "swiglu_limit" in real:
        numbers |= {"most": real["swiglu_limit"], "least": -real["swiglu_limit"]}
    for name, number in numbers.items():
        lines.append(f"{name}_plain = Constant <value = float {{{number!r}}}> ()")
        lines.append(f"{name} = CastLike ({name}_plain, first)")
    if "swiglu_limit" in real:
        lines += ["gated = Min (gate, most)", "linear_most = Min (linear, most)", "line = Max (linear_most, least)"]
    else:
        lines += ["gated = Identity (gate)", "line = Identity (linear)"]
    return [
        *lines,
        "steep = Mul (gated, alpha)",
        "sigmoid = Sigmoid (steep)",
        "opened = Mul (gated, sigmoid)",
        "raised = Add (line, beta)",
        "inner = Mul (opened, raised)",
    ]
