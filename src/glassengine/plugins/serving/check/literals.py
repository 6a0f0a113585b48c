"""Settings as hints: numbers in the engine's own nodes, or among its settings, that the checkpoint has otherwise."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glassengine.plugins.serving.alignment import EPSILONS
from glassengine.results import Divergence, Hint, Kind
from glassengine.serving.protocol import EngineSetting

_DEPTH = 8
_SAME = 1e-5
_NEAR = 1e-3
"""Of numbers that are read off tables."""
_NEARBY, _PERHAPS = 0.9, 0.5
"""Score of a setting that the op reads, and of one of the model's structure where nothing else explains the op."""


@dataclass(frozen=True)
class _Literal:
    """A number in the parameters of a node: of which op, where, and what it is called."""

    op: str
    place: int
    name: str
    kind: Kind
    is_float: bool = True


_LITERALS = (
    _Literal("rope", 1, "rotated elements", "position", is_float=False),
    _Literal("rope", 5, "freq_base", "position"),
    _Literal("rope", 6, "freq_scale", "position"),
    _Literal("rms_norm", 0, "eps", "eps"),
    _Literal("norm", 0, "eps", "eps"),
    _Literal("soft_max", 0, "attention scale", "scale"),
    _Literal("flash_attn_ext", 0, "attention scale", "scale"),
    _Literal("flash_attn_ext", 2, "soft cap of the attention", "scale"),
)


def with_settings(
    found: Sequence[Divergence], graph: Mapping[str, Any], config: Any, settings: Sequence[EngineSetting]
) -> list[Divergence]:
    """Return divergences with hints: literals of the nodes near them that the checkpoint has otherwise.

    Args:
        found: Of ops.
        graph: Site of the recording -> its sources and parameters, as `plugins.serving.ggml.child` keeps them, or
            operator, sources and literals, as `plugins.serving.onnx.held` does.
        config: Of the checkpoint.
        settings: Of the engine.
    """
    made = []
    structure = tuple(_of(setting, _PERHAPS) for setting in settings if setting.differs and setting.kind == "other")
    for one in found:
        hints = _without_repeats(_hints(one, graph, config, settings))
        if one.noise_ratio is None:  # of another size, or no number
            hints = [*structure, *hints]
        elif not hints and not any(hint.proven for hint in one.hints):
            hints = [*one.hints, *structure]
        hints = _without_repeats([*hints, *one.hints])
        made.append(replace(one, hints=tuple(hints)) if len(hints) > len(one.hints) else one)
    return made


def _without_repeats(hints: Iterable[Hint]) -> list[Hint]:
    """Return each hint once; what a hint changes may be a list, which has no hash."""
    found: list[Hint] = []
    for hint in hints:
        if hint not in found:
            found.append(hint)
    return found


def _hints(one: Divergence, graph: Mapping[str, Any], config: Any, settings: Sequence[EngineSetting]) -> Iterator[Hint]:
    expected = _expected(config)
    near = [site for name in (one.candidate_site or "").split() for site in _above(name, graph)]
    for site in near:
        for name, kind, number, same in _numbers(site, graph[site]):
            known = expected.get(name)
            if known and all(abs(number - value) > same * max(abs(number), abs(value)) for value in known):
                what = " or ".join(f"{value:.6g}" for value in known)
                text = f"{name} is {number:.6g} in {site}, in the checkpoint {what}"
                yield Hint(kind, text, 1.0, evidence="argument")
    kinds = {_KIND.get(_op_of(site, graph)) for site in near} - {None}
    for setting in settings:
        if setting.differs and setting.kind in kinds:
            yield _of(setting, _NEARBY)


def _of(setting: EngineSetting, score: float) -> Hint:
    text = f"{setting.name} is {setting.found:.6g}, in the checkpoint {setting.expected:.6g}"
    return Hint(setting.kind, text, score, evidence="argument")


def _numbers(site: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Kind, float, float]]:
    """Yield the numbers that a node computes with: name, kind of a hint, number, how near it is to another."""
    for name, number in (node.get("literals") or {}).items():
        yield name, _KIND_OF.get(name, "other"), float(number), _NEAR
    op, params = site.rpartition("/")[2].partition(".")[0], node.get("params") or []
    for literal in _LITERALS:
        if literal.op == op and literal.place < len(params):
            yield literal.name, literal.kind, _number(params[literal.place], literal.is_float), _SAME


_KIND_OF: dict[str, Kind] = {
    "eps": "eps",
    "freq_base": "position",
    "attention scale": "scale",
    "soft cap of the attention": "scale",
    "window": "mask",
}
"""Name of a number -> kind of the hint that it is; "other" for the rest."""


def _op_of(site: str, graph: Mapping[str, Any]) -> str:
    """Return the operation of a node: what the engine says, or the end of its name."""
    return str(graph.get(site, {}).get("op") or site.rpartition("/")[2].partition(".")[0])


_KIND = {"rope": "position", "rms_norm": "eps", "norm": "eps", "soft_max": "mask", "flash_attn_ext": "mask"}
"""Op near which a setting of a kind counts."""


def _above(site: str, graph: Mapping[str, Any]) -> Iterator[str]:
    """Yield a node and what it is made of, up to products with weights: those are judged by themselves."""
    waiting, seen = [(site, 0)], set()
    while waiting:
        name, depth = waiting.pop(0)
        if name in seen or name not in graph or depth > _DEPTH:
            continue
        seen.add(name)
        yield name
        op = _op_of(name, graph)
        if op in _ENDS or op.endswith("normalization") or (depth and op in ("add", "set_rows")):
            continue
        is_weight = op == "mul_mat" and any("/" not in source for source in graph[name]["sources"][:1])
        if not is_weight and not (depth and op in _PRODUCTS):
            waiting += [(source, depth + 1) for source in graph[name]["sources"]]


_ENDS = ("rope", "rms_norm", "norm", "groupqueryattention", "multiheadattention", "rotaryembedding")
_PRODUCTS = ("matmul", "gemm", "matmulnbits")


def _number(word: int, is_float: bool) -> float:
    if not is_float:
        return float(word)
    found: float = struct.unpack("<f", struct.pack("<i", word))[0]
    return found


def not_reached(config: Any, longest: int) -> list[str]:
    """Return the windows of a checkpoint that no sequence is longer than, in words: nothing shows them there."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    windows = sorted({int(window) for window in _windows(text) if longest <= window})
    return [
        f"not judged: the window of {window:,} tokens, which no sequence here reaches ({longest} at most)"
        for window in windows
    ]


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotation, of each kind of layer."""
    rope = getattr(text, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    return [one for one in rope.values() if isinstance(one, dict)] or [rope]


def _windows(text: Any) -> list[float]:
    """Return the windows that layers have; -1 for none."""
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    if not window:
        return [-1.0]
    return [float(window) if kind == "sliding_attention" else -1.0 for kind in sorted(kinds)]


def _expected(config: Any) -> dict[str, list[float]]:
    """Return what the checkpoint has for each literal; several where layers differ."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parts = _ropes(text)
    bases = [float(one["rope_theta"]) for one in parts if isinstance(one.get("rope_theta"), (int, float))]
    factors = [float(one["factor"]) for one in parts if isinstance(one.get("factor"), (int, float))]
    plain = all(one.get("rope_type", "default") in ("default", "linear") for one in parts)
    eps = [getattr(text, name, None) for name in EPSILONS]
    hidden, heads = getattr(text, "hidden_size", 0), getattr(text, "num_attention_heads", 1)
    width = getattr(text, "head_dim", None) or hidden // heads
    scale = getattr(text, "attention_multiplier", None)
    scale = scale or float(getattr(text, "query_pre_attn_scalar", None) or width) ** -0.5
    expected = {
        "freq_base": bases,
        "freq_scale": [1.0, *(1.0 / factor for factor in factors)] if plain else [],
        "eps": [float(one) for one in eps if isinstance(one, float)],
        # Where q is scaled before, the softmax has 1.
        "attention scale": [float(scale), 1.0],
        "soft cap of the attention": [float(getattr(text, "attn_logit_softcapping", None) or 0.0)],
        "heads": [float(heads)],
        "key and value heads": [float(getattr(text, "num_key_value_heads", None) or heads)],
        "window": _windows(text),
    }
    return {name: values for name, values in expected.items() if values}
