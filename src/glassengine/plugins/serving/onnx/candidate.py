"""`genai:FOLDER`, and any ONNX file that decodes with a cache: ONNX Runtime with a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from glassengine.compare.matching.globs import NameIndex, captures, substitute
from glassengine.compare.matching.layouts import LayoutOperation
from glassengine.compare.matching.maps import MapRule
from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import AlignmentTable, numbers_of, table_of
from glassengine.plugins.serving.onnx.decoder import CONFIG, OnnxDecoder, open_decoder
from glassengine.plugins.serving.onnx.held import Held, HeldGraph
from glassengine.plugins.serving.onnx.record import run_decoder, site_names
from glassengine.plugins.serving.parameters import Unread, adds_one, as_parameter
from glassengine.program.onnx.stored.options import SessionSettings
from glassengine.serving.protocol import EngineSetting, ServedWeight, ServingOptions, ServingRun


@dataclass
class OnnxCandidate:
    """A decoder and ONNX Runtime.

    Args:
        decoder: Checked.
        session: How a file is run as deployed; a folder says that itself.
    """

    decoder: OnnxDecoder
    kind: str = "genai"
    session: SessionSettings = field(default_factory=SessionSettings)
    _extra: list[str] = field(default_factory=list)

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"genai:{self.decoder.place}"

    @property
    def architecture(self) -> str:
        """As the tables call it: what has norms in front of its feed-forward layers too is a Gemma."""
        nodes = self.decoder.file.model.graph.node
        return "gemma" if any("pre_feedforward_layernorm" in name for n in nodes for name in n.output) else "decoder"

    def table(self, config: Any) -> AlignmentTable:
        """Return the table for a checkpoint."""
        return table_of("onnx", self.architecture, numbers_of(config))

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return what the nodes of the graph read, by the module's parameters and in their layout."""
        graph = HeldGraph(self.decoder.file)
        names = site_names(graph)
        held = {_renamed(name, names): one for name, one in graph.held().items()}
        table, index = self.table(config), NameIndex(held)
        readers: dict[str, Callable[[], ServedWeight]] = {}
        used: set[str] = set()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            rule, stored = _chosen(name, table.weights, index)
            if stored:
                used.update(stored)
                readers[name] = partial(_weight, stored, _as_gain(rule, module, name), held, parameter)
            elif name.endswith(".bias") and _chosen(f"{name.removesuffix('.bias')}.weight", table.weights, index)[1]:
                readers[name] = partial(ServedWeight, (name,), None, reason="nothing is added to the product")
            else:
                readers[name] = partial(ServedWeight, (), None, reason="the tables name no node that reads it")
        tensors = {tensor for name in used for tensor in held[name].stored}
        self._extra = [name for name, one in held.items() if name not in used and not tensors.issuperset(one.stored)]
        return Unread(readers)

    def extra_weights(self) -> Sequence[str]:
        """Return what the graph's nodes read that stands for no parameter."""
        return self._extra

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return the numbers of genai_config.json that the checkpoint's configuration has too."""
        return list(_settings(self.decoder, config))

    def record(self, run: ServingRun, path: Path) -> None:
        """Run the decoder and write down every value of its graph."""
        run_decoder(self.decoder, run, path, architecture=self.architecture, session=self.session)


def open_genai(place: str, options: ServingOptions) -> OnnxCandidate:
    """Return the candidate of a folder or file.

    Raises:
        UsageError: There is no decoder.
        CorruptError: It is damaged.
    """
    decoder = open_decoder(place)
    if options.session.given and decoder.config is not None:
        raise UsageError("--session-options are for a file", got=place, hint=f"write them into its {CONFIG}")
    return OnnxCandidate(decoder, session=options.session)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    value, _, part = name.rpartition(":")
    return f"{names.get(value, value)}:{part}"


def _chosen(name: str, rules: Sequence[MapRule], held: NameIndex) -> tuple[MapRule | None, tuple[str, ...]]:
    """Return the rule of a parameter all of whose tensors are there; a model may be a part of another."""
    for rule in reversed(rules):
        captured = next(captures(rule.baseline, name), None)
        if captured is None:
            continue
        wanted = (substitute(one, captured) for one in rule.candidates)
        stored = [[one] if one in held else held.with_suffix(one) for one in wanted]
        if all(len(one) == 1 for one in stored):
            return rule, tuple(one[0] for one in stored)
    return None, ()


def _as_gain(rule: MapRule | None, module: nn.Module, name: str) -> MapRule | None:
    """Return the rule for a parameter; a graph has the gains of norms, from which a checkpoint may leave out the 1."""
    if rule is None or not adds_one(module, name):
        return rule
    return replace(rule, candidate_ops=(*rule.candidate_ops, LayoutOperation("add", {"value": -1})))


def _weight(stored: tuple[str, ...], rule: MapRule | None, held: Mapping[str, Held], parameter: Tensor) -> ServedWeight:
    found = [held[name].read() for name in stored]
    names = tuple(tensor for name in stored for tensor in held[name].stored)
    types = tuple(kind for one in found for kind in one.types)
    return as_parameter(names, rule, [one.value for one in found], [one.step for one in found], types, parameter)


def _settings(decoder: OnnxDecoder, config: Any) -> Iterator[EngineSetting]:
    if decoder.config is None:
        return
    numbers = numbers_of(config)
    one = decoder.config.decoder
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = {
        "num_attention_heads": (one.num_attention_heads, numbers["heads"]),
        "num_key_value_heads": (one.num_key_value_heads, numbers["kv_heads"]),
        "head_size": (one.head_size, numbers["head_dim"]),
        "hidden_size": (one.hidden_size, numbers["hidden"]),
        "num_hidden_layers": (one.num_hidden_layers, numbers["layers"]),
        "vocab_size": (decoder.config.vocab_size, getattr(text, "vocab_size", None)),
    }
    for name, (found, expected) in known.items():
        if found is not None and isinstance(expected, int):
            yield EngineSetting(f"genai_config.json: {name}", float(found), float(expected), "other")
