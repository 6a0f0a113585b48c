"""GroupQueryAttention of ONNX Runtime's own domain in terms of standard operators: how decoders of GenAI attend.

Keys and values that are new take their places behind those of the past, of each row where it ends; every query sees the
keys up to its own place, or the last ones of them. Caches of integers, and such that hold a window alone, are left out.

Shape legend: B batch, S new tokens, H heads, K key/value heads, G heads of each, D head size, P past, N all slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from glassengine.plugins.onnx.table import composed, given_inputs
from glassengine.program.onnx.translated import ValueType

_INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens", "total", "cos", "sin", "positions", "bias"),
    *("sink", "k_scale", "v_scale", "q_gain", "k_gain"),
)
_LEFT_OUT = frozenset({"positions", "k_scale", "v_scale", "q_gain", "k_gain"})
"""Inputs of forms that ONNX Runtime has on accelerators alone, or reads in another way in a prompt."""


def group_query(
    proto: onnx.NodeProto, attributes: Mapping[str, Any], types: Mapping[str, ValueType], domain: str
) -> onnx.FunctionProto | None:
    """Return a node as a function of standard operators; None for a form that is not known."""
    given = given_inputs(proto, _INPUTS)
    kinds = {entry.s for name, entry in attributes.items() if name.endswith("_quant_type")}
    if given is None or given.keys() & _LEFT_OUT or kinds - {b"NONE"} or len(proto.output) > 3:
        return None
    if any(attributes[name].i for name in ("sliding_window_cache", "qk_output") if name in attributes):
        return None
    widths = {name: _last(types, value) for name, value in given.items()}
    heads, kv_heads = attributes["num_heads"].i, attributes["kv_num_heads"].i
    whole = widths["query"]
    rotates = "do_rotary" in attributes and bool(attributes["do_rotary"].i)
    rotated = 2 * (widths.get("cos") or 0)
    if whole is None or (rotates and (not rotated or not {"cos", "sin"} <= given.keys())) or heads % kv_heads:
        return None
    size = whole // (heads if "key" in given else heads + 2 * kv_heads)
    number = {name: entry.f for name, entry in attributes.items() if name in ("scale", "softcap")}
    lines = [*_heads(heads, kv_heads, size, is_packed="key" not in given), *_places()]
    for name in ("q", "k"):
        interleaved = "rotary_interleaved" in attributes and bool(attributes["rotary_interleaved"].i)
        lines += (
            _rotation(name, rotated, size, interleaved=interleaved)
            if rotates
            else [f"{name}_turned = Identity ({name}_heads)"]
        )
    for name, new in (("key", "k_turned"), ("value", "v_heads")):
        lines += _slots(name, new, has_past=f"past_{name}" in given)
    scale = number.get("scale") or size**-0.5
    lines += _scores(heads, kv_heads, size, scale, number.get("softcap", 0.0))
    window = attributes["local_window_size"].i if "local_window_size" in attributes else -1
    causal = attributes["causal"].i if "causal" in attributes else 1
    lines += _mask(window, causal=bool(causal), has_bias="bias" in given)
    smooth = "smooth_softmax" in attributes and attributes["smooth_softmax"].i == 1
    lines += _results(heads, kv_heads, size, has_sink="sink" in given, smooth=smooth)
    made = ("y", "present_key", "present_value")[: len(proto.output)]
    return composed(proto, domain, _INPUTS, made, lines)


def _last(types: Mapping[str, ValueType], name: str) -> int | None:
    shape = types[name].shape if name in types else None
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def _list(*numbers: int) -> str:
    return f"Constant <value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}> ()"


def _heads(heads: int, kv_heads: int, size: int, *, is_packed: bool) -> list[str]:
    """Query, key and value as [B, heads, S, D]."""
    lines = [f"one = {_list(1)}", f"zero = {_list(0)}"]
    names = ("query", "key", "value")
    if is_packed:
        lines.append(f"sizes = {_list(heads * size, kv_heads * size, kv_heads * size)}")
        lines.append("q_flat, k_flat, v_flat = Split <axis = 2> (query, sizes)")
        names = ("q_flat", "k_flat", "v_flat")
    for own, name, number in zip("qkv", names, (heads, kv_heads, kv_heads), strict=True):
        lines.append(f"{own}_shape = {_list(0, 0, number, size)}")
        lines.append(f"{own}_rows = Reshape ({name}, {own}_shape)")
        lines.append(f"{own}_heads = Transpose <perm = [0, 2, 1, 3]> ({own}_rows)")
    return lines


def _places() -> list[str]:
    """Tokens of each row [B], those before the new ones [B], and the places of the new ones [B, S]."""
    return [
        "new = Shape <start = 2, end = 3> (q_heads)",
        "total_long = Cast <to = 7> (total)",
        "slots = Reshape (total_long, one)",
        "last = Cast <to = 7> (seqlens)",
        "minus = Constant <value = int64[1] {-1}> ()",
        "last_flat = Reshape (last, minus)",
        "ends = Add (last_flat, one)",
        "is_prompt = Equal (new, slots)",
        "before = Sub (ends, new)",
        "past_rows = Where (is_prompt, zero, before)",
        "past_column = Unsqueeze (past_rows, one)",
        "first = Constant <value = int64 {0}> ()",
        "step = Constant <value = int64 {1}> ()",
        "new_number = Squeeze (new, zero)",
        "steps = Range (first, new_number, step)",
        "places = Add (past_column, steps)",
    ]


def _rotation(name: str, rotated: int, size: int, *, interleaved: bool) -> list[str]:
    half = rotated // 2
    rest = [] if rotated == size else [f"{name}_rest"]
    lines = [f"{name}_cut = {_list(rotated, *([size - rotated] if rest else []))}"]
    lines.append(f"{', '.join([f'{name}_turning', *rest])} = Split <axis = 3> ({name}_heads, {name}_cut)")
    for table in ("cos", "sin"):
        lines.append(f"{name}_{table}_rows = Gather <axis = 0> ({table}, places)")
        lines.append(f"{name}_{table} = Unsqueeze ({name}_{table}_rows, one)")
    lines.append(f"{name}_halves = {_list(half, half)}")
    if interleaved:
        lines.append(f"{name}_pairs_shape = {_list(0, 0, -1, half, 2)}")
        lines.append(f"{name}_pairs = Reshape ({name}_turning, {name}_pairs_shape)")
        lines.append(f"{name}_singles = {_list(1, 1)}")
        lines.append(f"{name}_a5, {name}_b5 = Split <axis = 4> ({name}_pairs, {name}_singles)")
        lines.append(f"{name}_fourth = {_list(4)}")
        lines += [f"{name}_{part} = Squeeze ({name}_{part}5, {name}_fourth)" for part in "ab"]
    else:
        lines.append(f"{name}_a, {name}_b = Split <axis = 3> ({name}_turning, {name}_halves)")
    for result, (left, right, op) in {"real": ("a", "b", "Sub"), "imaginary": ("b", "a", "Add")}.items():
        lines.append(f"{name}_{result}_cos = Mul ({name}_{left}, {name}_cos)")
        lines.append(f"{name}_{result}_sin = Mul ({name}_{right}, {name}_sin)")
        lines.append(f"{name}_{result} = {op} ({name}_{result}_cos, {name}_{result}_sin)")
    if interleaved:
        lines += [f"{name}_{part}5 = Unsqueeze ({name}_{part}, {name}_fourth)" for part in ("real", "imaginary")]
        lines.append(f"{name}_woven = Concat <axis = 4> ({name}_real5, {name}_imaginary5)")
        lines.append(f"{name}_flat_shape = {_list(0, 0, -1, rotated)}")
        lines.append(f"{name}_part = Reshape ({name}_woven, {name}_flat_shape)")
    else:
        lines.append(f"{name}_part = Concat <axis = 3> ({name}_real, {name}_imaginary)")
    joined = f"Concat <axis = 3> ({name}_part, {name}_rest)" if rest else f"Identity ({name}_part)"
    return [*lines, f"{name}_turned = {joined}"]


def _slots(name: str, new: str, *, has_past: bool) -> list[str]:
    """The cache [B, K, N, D]: slot t of a row is the past's, or what is new where its past ends."""
    joined = f"Concat <axis = 2> (past_{name}, {new})" if has_past else f"Identity ({new})"
    past = f"Shape <start = 2, end = 3> (past_{name})" if has_past else "Identity (zero)"
    return [
        f"{name}_joined = {joined}",
        f"{name}_past = {past}",
        f"{name}_number = Max ({name}_past, slots)",
        f"{name}_scalar = Squeeze ({name}_number, zero)",
        f"{name}_slots = Range (first, {name}_scalar, step)",
        f"{name}_is_past = Less ({name}_slots, past_column)",
        f"{name}_own = Sub ({name}_slots, past_column)",
        f"{name}_behind = Add ({name}_own, {name}_past)",
        f"{name}_most = Shape <start = 2, end = 3> ({name}_joined)",
        f"{name}_most_index = Sub ({name}_most, one)",
        f"{name}_clipped = Min ({name}_behind, {name}_most_index)",
        f"{name}_from = Where ({name}_is_past, {name}_slots, {name}_clipped)",
        f"{name}_axes = {_list(1, 3)}",
        f"{name}_from4 = Unsqueeze ({name}_from, {name}_axes)",
        f"{name}_outer = Shape <start = 0, end = 2> ({name}_joined)",
        f"{name}_inner = Shape <start = 3, end = 4> ({name}_joined)",
        f"{name}_sizes = Concat <axis = 0> ({name}_outer, {name}_number, {name}_inner)",
        f"{name}_index = Expand ({name}_from4, {name}_sizes)",
        f"present_{name} = GatherElements <axis = 2> ({name}_joined, {name}_index)",
    ]


def _scores(heads: int, kv_heads: int, size: int, scale: float, cap: float) -> list[str]:
    """Scores [B, K, G, S, N]."""
    lines = [
        f"grouped_shape = {_list(0, kv_heads, heads // kv_heads, -1, size)}",
        "grouped = Reshape (q_turned, grouped_shape)",
        f"third = {_list(2)}",
        "keys = Unsqueeze (present_key, third)",
        "values = Unsqueeze (present_value, third)",
        "keys_turned = Transpose <perm = [0, 1, 2, 4, 3]> (keys)",
        "products = MatMul (grouped, keys_turned)",
        f"scale_plain = Constant <value = float {{{scale!r}}}> ()",
        "scale = CastLike (scale_plain, products)",
        "scaled = Mul (products, scale)",
    ]
    if not cap:
        return [*lines, "scores = Identity (scaled)"]
    return [
        *lines,
        f"cap_plain = Constant <value = float {{{cap!r}}}> ()",
        "cap = CastLike (cap_plain, products)",
        "shrunk = Div (scaled, cap)",
        "bent = Tanh (shrunk)",
        "scores = Mul (bent, cap)",
    ]


def _mask(window: int, *, causal: bool, has_bias: bool) -> list[str]:
    """Scores with those of unseen slots at minus infinity."""
    lines = [
        f"inner_axes = {_list(1, 2, 3)}",
        f"query_axes = {_list(1, 2, 4)}",
        "ends_column = Unsqueeze (ends, one)",
        "is_held2 = Less (key_slots, ends_column)",
        "is_held = Unsqueeze (is_held2, inner_axes)",
        "queries = Unsqueeze (places, query_axes)",
        "is_before = LessOrEqual (key_slots, queries)" if causal else "is_before = Identity (is_held)",
        "is_known = And (is_held, is_before)",
    ]
    if window > 0:
        lines += [
            f"window = {_list(window)}",
            "nearest = Sub (queries, window)",
            "is_near = Greater (key_slots, nearest)",
            "is_seen = And (is_known, is_near)",
        ]
    else:
        lines.append("is_seen = Identity (is_known)")
    if has_bias:
        lines += [
            f"bias_shape = {_list(2)}",
            "bias5 = Unsqueeze (bias, bias_shape)",
            "biased = Add (scores, bias5)",
        ]
    return [
        *lines,
        "lowest_plain = Constant <value = float {-3.0e38}> ()",
        "lowest = CastLike (lowest_plain, scores)",
        f"masked = Where (is_seen, {'biased' if has_bias else 'scores'}, lowest)",
    ]


def _results(heads: int, kv_heads: int, size: int, *, has_sink: bool, smooth: bool) -> list[str]:
    lines = []
    if has_sink or smooth:
        lines += [
            f"sink_shape = {_list(1, kv_heads, heads // kv_heads, 1, 1)}",
            "sink5 = Reshape (sink, sink_shape)"
            if has_sink
            else "sink5 = Constant <value = float[1, 1, 1, 1, 1] {0.0}> ()",
            "sink_like = CastLike (sink5, masked)",
            "outer5 = Shape <start = 0, end = 4> (masked)",
            "column = Concat <axis = 0> (outer5, one)",
            "sinks = Expand (sink_like, column)",
            "with_sink = Concat <axis = 4> (masked, sinks)",
            "shares = Softmax <axis = 4> (with_sink)",
            f"fifth = {_list(4)}",
            "weights = Slice (shares, zero, key_number, fifth)",
        ]
    else:
        lines.append("weights = Softmax <axis = 4> (masked)")
    return [
        *lines,
        "mixed = MatMul (weights, values)",
        f"joined_shape = {_list(0, heads, -1, size)}",
        "joined = Reshape (mixed, joined_shape)",
        "by_token = Transpose <perm = [0, 2, 1, 3]> (joined)",
        f"flat_shape = {_list(0, 0, heads * size)}",
        "y = Reshape (by_token, flat_shape)",
    ]
