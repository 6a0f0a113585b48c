"""Runs an ONNX decoder step by step and writes down every value of its graph.

As exactly as it can: no optimization. As deployed: all of them; the graph that ONNX Runtime makes of the file is kept,
and observed without being changed again. What is returned then comes from another run, which is not observed at all: of
the loop of onnxruntime-genai where it runs the folder (`generator`), else of a plain session. Runs round differently:
what is returned stands beside the observed values (`returned/logits`), and takes the place of none.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glassengine.errors import UsageError
from glassengine.plugins.serving.onnx.decoder import Feeds, OnnxDecoder
from glassengine.plugins.serving.onnx.facts import facts_of
from glassengine.plugins.serving.onnx.generator import OWN_LOOP, generated
from glassengine.plugins.serving.onnx.held import HeldGraph, whole_tensor
from glassengine.program.onnx.stored.file import OnnxFile, read_onnx
from glassengine.program.onnx.stored.options import SessionSettings
from glassengine.program.onnx.stored.session import errors_of_runtime, open_session, start
from glassengine.program.onnx.translated import metadata_of
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import ServingRun
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
        metadata: dict[str, Any] = {
            "kind": "model",
            "layout": "onnx",
            "target": f"genai:{decoder.place.absolute()}",
            "architecture": architecture,
            "as_deployed": run.as_deployed,
            "dtype": "float32",
            "device": ["cpu"],
            "prompt_lengths": [len(run.prompt)],
            "graph": facts_of(graph, names),
        }
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
