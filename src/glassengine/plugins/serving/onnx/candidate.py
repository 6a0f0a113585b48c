"""`genai:FOLDER`, and any ONNX file that decodes with a cache: ONNX Runtime with a decoder.

Runs an ONNX decoder step by step and writes down every value of its graph.

As exactly as it can: no optimization. As deployed: all of them; the graph that ONNX Runtime makes of the file is kept,
and observed without being changed again. What is returned then comes from another run, which is not observed at all: of
the loop of onnxruntime-genai where it runs the folder (`generator`), else of a plain session. Runs round differently:
what is returned stands beside the observed values (`returned/logits`), and takes the place of none.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glassengine.compare.matching.layouts import LayoutOperation
from glassengine.compare.matching.maps import MapRule, NameIndex, captures, substitute
from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import (
    AlignmentTable,
    Unread,
    adds_one,
    as_parameter,
    numbers_of,
    recorded,
    table_of,
)
from glassengine.plugins.serving.onnx.decoder import CONFIG, OWN_LOOP, Feeds, OnnxDecoder, generated, open_decoder
from glassengine.plugins.serving.onnx.held import Held, HeldGraph, facts_of, whole_tensor
from glassengine.program.onnx.file import OnnxFile, read_onnx
from glassengine.program.onnx.session import SessionSettings, errors_of_runtime, open_session, start
from glassengine.program.onnx.translated import metadata_of
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import EngineSetting, ServedWeight, ServingOptions, ServingRun
from glassengine.sites import RETURNED

if TYPE_CHECKING:
    import onnx


_MOST_BYTES = 16 << 30
_SUM = 3
"""Place of the sum among the results of a norm that is fused with it."""
_LEGACY = re.compile(r"/(.+)/([A-Za-z]\w*?)(?:_(\d+))?_output_0")
_SCOPES = "pkg.torch.onnx.name_scopes"


def run_decoder(
    decoder: OnnxDecoder, run: ServingRun, path: Path, *, architecture: str, session: SessionSettings | None = None
) -> None:
    """Run a decoder and write a recording of every value.

    Args:
        decoder: What is run.
        run: How.
        path: Of the recording.
        architecture: As the tables call it.
        session: How it is run as deployed; None for ONNX Runtime's own default.

    Raises:
        BackendError: ONNX Runtime does not take the graph, or fails.
        UsageError: The decoder takes something that is not known.
    """
    loop = generated(decoder, run) if run.as_deployed else None
    with tempfile.TemporaryDirectory(prefix="glassengine-onnx-") as folder:
        plain = None
        file = decoder.file
        if run.as_deployed:
            plain, file = _optimized(decoder.file, Path(folder), session or SessionSettings())
        graph = HeldGraph(with_sums(file))
        names = site_names(graph)
        parts = products_of_sums(graph)
        named = (name for node in graph.nodes if node.op_type != "Constant" for name in node.output if name)
        wanted = [name for name in named if name not in parts]
        observed = open_session(graph.file, wanted)
        target = f"genai:{decoder.place.absolute()}"
        metadata = recorded("onnx", target, run, architecture, graph=facts_of(graph, names))
        if loop is not None:
            metadata["generator"] = loop.note or OWN_LOOP
        with RecordingWriter(path, metadata=metadata) as writer:
            _steps(decoder, run, observed, plain, names, writer, [] if loop is None else loop.logits)


def _steps(
    decoder: OnnxDecoder,
    run: ServingRun,
    session: Any,
    plain: Any,
    names: Mapping[str, str],
    writer: RecordingWriter,
    scores: Sequence[Any],
) -> None:
    outputs = [
        one.name for one in session.get_outputs() if "bfloat16" not in one.type and one.type.startswith("tensor(")
    ]
    room = len(run.prompt) + run.steps
    feeds = Feeds(decoder, session.get_inputs(), run.numbers, room)
    if plain is not None and len(scores) <= run.steps:
        scores = [*scores, *_returned(decoder, run, plain, room)[len(scores) :]]
    tokens, left = list(run.prompt), _MOST_BYTES
    for step in range(run.steps + 1):
        given = feeds.of(tokens)
        found = _run(session, outputs, given, decoder.file.path.name)
        found = feeds.cleared(tokens, found)
        writer.write(".:in.input_ids", step, torch.tensor([tokens]))
        if step < len(scores) and scores[step].shape == found[decoder.logits].shape:
            writer.write(f"{RETURNED}logits", step, torch.from_numpy(scores[step]))
        for name, value in found.items():
            tensor = whole_tensor(value)
            if tensor is None:
                continue
            left -= tensor.nbytes
            if left < 0:
                raise UsageError(
                    "the values of the decoder's steps are more than is kept",
                    expected=f"{_MOST_BYTES >> 30} GiB",
                    hint="a shorter prompt: --inputs FILE, or fewer steps: --steps 1",
                )
            writer.write(names.get(name, name), step, tensor)
        writer.commit(step, token_ids=[tokens])
        feeds.take(tokens, found)
        tokens = _following(run, step, found[decoder.logits])


def _returned(decoder: OnnxDecoder, run: ServingRun, plain: Any, room: int) -> list[Any]:
    """Return the scores of a session that is not observed, with a cache of its own."""
    feeds = Feeds(decoder, plain.get_inputs(), run.numbers, room)
    names: list[str] = [one.name for one in plain.get_outputs()]
    tokens, scores = list(run.prompt), []
    for step in range(run.steps + 1):
        found = _run(plain, names, feeds.of(tokens), decoder.file.path.name)
        scores.append(found[decoder.logits])
        feeds.take(tokens, found)
        tokens = _following(run, step, scores[-1])
    return scores


def _following(run: ServingRun, step: int, scores: Any) -> list[int]:
    """Return the token of the next step."""
    if run.following is not None and step < len(run.following):
        return [run.following[step]]
    return [int(scores[0, -1].argmax())]


def products_of_sums(graph: HeldGraph) -> set[str]:
    """Return the products to which a bias is added: what a checkpoint calls a linear layer is their sum with it."""
    held = graph.held()
    sums = (node for node in graph.nodes if node.op_type == "Add" and f"{node.output[0]}:bias" in held)
    made = (graph.makers.get(name) for node in sums for name in node.input)
    return {node.output[0] for node in made if node is not None and node.op_type in ("MatMul", "MatMulNBits")}


def _run(session: Any, names: Sequence[str], given: Mapping[str, Any], file: str) -> dict[str, Any]:
    with errors_of_runtime(f"ONNX Runtime cannot run {file}"):
        return dict(zip(names, session.run(list(names), dict(given)), strict=True))


def _optimized(file: OnnxFile, folder: Path, settings: SessionSettings) -> tuple[Any, OnnxFile]:
    """Return a session as a user makes it, and the graph that ONNX Runtime made for it."""
    target = folder / "optimized.onnx"
    options = settings.options()
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.bin")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    with errors_of_runtime(f"ONNX Runtime does not take {file.path.name}"):
        session = start(str(file.path.absolute()), options)
    return session, read_onnx(target)


def with_sums(file: OnnxFile) -> OnnxFile:
    """Return a file whose norms that are fused with a sum return it: `.../output_0:sum`."""
    if not any(
        node.op_type.startswith("Skip") and node.op_type.endswith("Normalization") for node in file.model.graph.node
    ):
        return file
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    for node in model.graph.node:
        if not (node.op_type.startswith("Skip") and node.op_type.endswith("Normalization")):
            continue
        while len(node.output) <= _SUM:
            node.output.append("")
        node.output[_SUM] = node.output[_SUM] or f"{node.output[0]}:sum"
    return replace(file, model=model)


def site_names(graph: HeldGraph) -> dict[str, str]:
    """Return value -> its name in a recording, where PyTorch's exporters have left a path of modules.

    `/model/norm/Mul_1_output_0`, and a value whose node has the path in its metadata, are `model.norm/Mul.1`. A value
    without a path is `value/NAME`: exporters call values as `torch.export` calls nodes of other graphs.
    """
    names: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    returned = {value.name for value in graph.file.model.graph.output}
    for node in graph.nodes:
        names.update({name: f"value/{name}" for name in node.output if "/" not in name and name not in returned})
        if not node.output or node.output[0] in returned:
            continue
        legacy = _LEGACY.fullmatch(node.output[0])
        if legacy is not None and legacy[2] == node.op_type:
            names[node.output[0]] = f"{legacy[1].replace('/', '.')}/{node.op_type}.{legacy[3] or 0}"
            continue
        scope = _scope(node)
        if scope is not None:
            number = counts[scope, node.op_type]
            counts[scope, node.op_type] += 1
            names[node.output[0]] = f"{scope}/{node.op_type}.{number}"
    return names


def _scope(node: onnx.NodeProto) -> str | None:
    text = metadata_of(node, _SCOPES)
    if not text:
        return None
    parts = re.findall(r"'([^']*)'", text)
    return parts[-2] or "." if len(parts) > 1 else None


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
