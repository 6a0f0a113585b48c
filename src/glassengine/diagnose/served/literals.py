"""Settings as hints: numbers in the engine's own nodes, or among its settings, that the checkpoint has otherwise."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glassengine.results import Divergence, Hint, Kind
from glassengine.serving.protocol import Setting

_DEPTH = 8
_SAME = 1e-5


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
    found: Sequence[Divergence], graph: Mapping[str, Any], config: Any, settings: Sequence[Setting]
) -> list[Divergence]:
    """Return divergences with hints: literals of the nodes near them that the checkpoint has otherwise.

    Args:
        found: Of ops.
        graph: Site of the recording -> its sources and parameters, as `serving.ggml.child` keeps them.
        config: Of the checkpoint.
        settings: Of the engine.
    """
    made = []
    for one in found:
        hints = list(dict.fromkeys(_hints(one, graph, config, settings)))
        made.append(dataclasses.replace(one, hints=(*hints, *one.hints)) if hints else one)
    return made


def _hints(one: Divergence, graph: Mapping[str, Any], config: Any, settings: Sequence[Setting]) -> Iterator[Hint]:
    expected = _expected(config)
    near = [site for name in (one.candidate_site or "").split() for site in _above(name, graph)]
    for site in near:
        op = site.rpartition("/")[2].partition(".")[0]
        params = graph[site].get("params") or []
        for literal in _LITERALS:
            if literal.op != op or literal.place >= len(params) or literal.name not in expected:
                continue
            number = _number(params[literal.place], literal.is_float)
            known = expected[literal.name]
            if all(abs(number - value) > _SAME * max(abs(number), abs(value)) for value in known):
                what = " or ".join(f"{value:.6g}" for value in known)
                yield Hint(
                    literal.kind,
                    f"{literal.name} is {number:.6g} in {site}, in the checkpoint {what}",
                    1.0,
                    evidence="argument",
                )
    kinds = {_KIND.get(site.rpartition("/")[2].partition(".")[0]) for site in near} - {None}
    for setting in settings:
        if setting.differs and setting.kind in kinds:
            text = f"{setting.name} is {setting.found:.6g}, in the checkpoint {setting.expected:.6g}"
            yield Hint(setting.kind, text, 0.9, evidence="argument")


_KIND = {"rope": "position", "rms_norm": "eps", "norm": "eps", "soft_max": "mask", "flash_attn_ext": "mask"}
"""Op near which a setting of a kind counts."""
_OBSERVED = {"rope", "rms_norm", "norm", "mul_mat", "soft_max", "get_rows", "add", "mul", "swiglu", "geglu", "set_rows"}


def _above(site: str, graph: Mapping[str, Any]) -> Iterator[str]:
    """Yield a node and what it is made of, up to products with weights: those are judged by themselves."""
    waiting, seen = [(site, 0)], set()
    while waiting:
        name, depth = waiting.pop(0)
        if name in seen or name not in graph or depth > _DEPTH:
            continue
        seen.add(name)
        yield name
        op = name.rpartition("/")[2].partition(".")[0]
        if op in ("rope", "rms_norm", "norm") or (depth and op in ("add", "set_rows")):
            continue
        is_weight = op == "mul_mat" and any("/" not in source for source in graph[name]["sources"][:1])
        if not is_weight:
            waiting += [(source, depth + 1) for source in graph[name]["sources"]]


def _number(word: int, is_float: bool) -> float:
    if not is_float:
        return float(word)
    found: float = struct.unpack("<f", struct.pack("<i", word))[0]
    return found


def _expected(config: Any) -> dict[str, list[float]]:
    """Return what the checkpoint has for each literal; several where layers differ."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    parts = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    bases = [float(one["rope_theta"]) for one in parts if isinstance(one.get("rope_theta"), (int, float))]
    factors = [float(one["factor"]) for one in parts if isinstance(one.get("factor"), (int, float))]
    plain = all(one.get("rope_type", "default") in ("default", "linear") for one in parts)
    eps = [getattr(text, name, None) for name in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")]
    hidden, heads = getattr(text, "hidden_size", 0), getattr(text, "num_attention_heads", 1)
    width = getattr(text, "head_dim", None) or hidden // heads
    scalar = getattr(text, "query_pre_attn_scalar", None) or width
    found = {
        "freq_base": bases,
        "freq_scale": [1.0, *(1.0 / factor for factor in factors)] if plain else [],
        "eps": [float(one) for one in eps if isinstance(one, float)],
        # Where q is scaled before, the softmax has 1.
        "attention scale": [float(scalar) ** -0.5, 1.0],
        "soft cap of the attention": [float(getattr(text, "attn_logit_softcapping", None) or 0.0)],
    }
    return {name: values for name, values in found.items() if values}
