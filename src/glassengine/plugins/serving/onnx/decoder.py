"""An ONNX file that decodes tokens: what each step is given, and which results are inputs of the next one.

genai:FOLDER       what the builder of onnxruntime-genai wrote: genai_config.json says how inputs are called
decoder.onnx       any file with `past_key_values.*` inputs and `present.*` results, as optimum exports them

The generation loop of onnxruntime-genai itself: what people run who are given its folder.

Its scores are taken as those of the decoder as deployed, so that what its own loop does with caches, masks and
positions is judged too, and not only the file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from glassengine.errors import UsageError, first_line
from glassengine.program.onnx.file import OnnxFile, read_onnx
from glassengine.reading.documents import read_document
from glassengine.serving.protocol import ServingRun, results_of_cache

CONFIG = "genai_config.json"
_MOST_BYTES = 1 << 24
_NAMES = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_CACHE_DIMS, _PAST = 4, 2


class DecoderConfig(msgspec.Struct):
    """The decoder in genai_config.json."""

    filename: str = "model.onnx"
    head_size: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    num_key_value_heads: int | None = None
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    sliding_window: dict[str, Any] | None = None
    pipeline: list[Any] | None = None


class ModelConfig(msgspec.Struct):
    """The model in genai_config.json."""

    type: str = ""
    vocab_size: int | None = None
    context_length: int | None = None
    decoder: DecoderConfig = msgspec.field(default_factory=DecoderConfig)


class GenaiConfig(msgspec.Struct):
    """The part of genai_config.json that is read here."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)


@dataclass(frozen=True)
class OnnxDecoder:
    """A decoder on disk.

    Attributes:
        place: Its folder or file.
        file: Its graph, checked.
        config: Of its folder; None for a file alone.
        pasts: Input of the cache -> the result that it is in the next step.
        logits: Result with the scores of the next token.
        buffers: Inputs of the cache that are buffers with room for tokens to come -> window of their layer.
    """

    place: Path
    file: OnnxFile
    config: ModelConfig | None
    pasts: Mapping[str, str]
    logits: str
    buffers: Mapping[str, int] = field(default_factory=dict)


def open_decoder(place: str | Path) -> OnnxDecoder:
    """Return the decoder of a folder or file.

    Raises:
        UsageError: There is none, or it is not a decoder with a cache of keys and values.
        CorruptError: It is damaged.
    """
    path = given = Path(place).expanduser()
    config: ModelConfig | None = None
    if path.is_dir():
        if (path / CONFIG).is_file():
            config = read_document(path / CONFIG, GenaiConfig, most=_MOST_BYTES).model
            if config.decoder.pipeline:
                raise UsageError("a model in several ONNX files is not judged", got=f"{path}: a pipeline of stages")
            path = _inside(path, config.decoder.filename)
        else:
            path = next((path / name for name in _NAMES if (path / name).is_file()), path / _NAMES[0])
    file = read_onnx(path)
    pasts = _pasts(file, config)
    if not pasts:
        raise UsageError(
            f"{path.name} is no decoder with a cache",
            got=", ".join(value.name for value in file.model.graph.input)[:200],
            expected="inputs past_key_values.* and results present.*",
            hint="a model of one forward pass is judged without a kind: --candidate model.onnx",
        )
    results = [value.name for value in file.model.graph.output]
    logits = str(config.decoder.outputs.get("logits", "logits")) if config is not None else "logits"
    if logits not in results:
        raise UsageError(f"{path.name} returns no logits", got=", ".join(results)[:200], expected=logits)
    return OnnxDecoder(given, file, config, pasts, logits, _buffers(file))


def _buffers(file: OnnxFile) -> dict[str, int]:
    """Return the inputs of attention that shifts its cache as its window moves, which it can only in a buffer."""
    buffers = {}
    for node in file.model.graph.node:
        numbers = {entry.name: int(entry.i) for entry in node.attribute}
        if numbers.get("sliding_window_cache"):
            buffers.update(dict.fromkeys(node.input[3:5], numbers.get("local_window_size", 0)))
    return buffers


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"{CONFIG} names a file outside of its folder", got=name, expected="the name of an ONNX file")
    return folder / name


def _pasts(file: OnnxFile, config: ModelConfig | None) -> dict[str, str]:
    graph = file.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in weights]
    results = {value.name for value in graph.output}
    renames = _declared_names(config) if config is not None else []
    pasts = {}
    for name in inputs:
        present = next((made for made in (*_renamed(name, renames), *results_of_cache(name)) if made in results), None)
        if present is not None:
            pasts[name] = present
    return pasts


def _declared_names(config: ModelConfig) -> list[tuple[str, str]]:
    """Return the pairs of names that the configuration has, with %d for the layer."""
    inputs, outputs = config.decoder.inputs, config.decoder.outputs
    pairs = [(inputs.get(f"past_{kind}_names"), outputs.get(f"present_{kind}_names")) for kind in ("key", "value")]
    return [(past, now) for past, now in pairs if isinstance(past, str) and isinstance(now, str)]


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> list[str]:
    found = []
    for past, now in renames:
        layer = re.fullmatch(re.escape(past).replace("%d", r"(\d+)"), name)
        if layer is not None:
            found.append(now.replace("%d", layer[1]) if layer.groups() else now)
    return found


class Feeds:
    """What a session is given in each step.

    Args:
        decoder: Whose session it is.
        inputs: Of the session.
        numbers: Of the checkpoint, for sizes that the file does not say.
        room: Tokens of all steps.

    Raises:
        UsageError: It takes something that is not known.
    """

    def __init__(
        self, decoder: OnnxDecoder, inputs: Sequence[Any], numbers: Mapping[str, int | None], room: int
    ) -> None:
        self._pasts = decoder.pasts
        self._types = {one.name: _NUMPY.get(one.type) for one in inputs}
        self._shapes = {one.name: list(one.shape) for one in inputs}
        declared = decoder.config.decoder if decoder.config is not None else DecoderConfig()
        self._heads = declared.num_key_value_heads or numbers.get("kv_heads")
        self._width = declared.head_size or numbers.get("head_dim")
        # With room for all tokens nothing is shifted out, and places are those of the tokens.
        self._room = {name: max(room, window) for name, window in decoder.buffers.items()}
        names = declared.inputs
        self._roles = {str(names.get(role, role)): role for role in _ROLES}
        unknown = [name for name in self._types if name not in decoder.pasts and name not in self._roles]
        if unknown or None in self._types.values():
            bad = unknown or [name for name, kind in self._types.items() if kind is None]
            raise UsageError(
                f"{decoder.file.path.name} takes what a decoder of tokens does not",
                got=", ".join(bad)[:200],
                expected=", ".join([*_ROLES, "past_key_values.*"]),
            )
        self._caches: dict[str, np.ndarray[Any, Any]] = {name: self._empty(name) for name in decoder.pasts}
        self._past = 0

    def _empty(self, name: str) -> np.ndarray[Any, Any]:
        shape = self._shapes[name]
        known: list[int | None] = [1, self._heads, self._room.get(name, 0), self._width]
        if len(shape) != _CACHE_DIMS or isinstance(shape[_PAST], int):
            raise UsageError(
                "the decoder keeps a cache of a fixed size, which is not fed here",
                got=f"{name}: {shape}",
                expected="[batch, heads, past length, width of a head] with a free length",
            )
        sizes = [size if isinstance(size, int) else other for size, other in zip(shape, known, strict=True)]
        if None in sizes:
            raise UsageError("the sizes of the decoder's cache are not known", got=f"{name}: {shape}")
        return np.zeros([size or 0 for size in sizes], self._types[name])

    def of(self, tokens: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs of the next step, which is given `tokens`."""
        total = self._past + len(tokens)
        made: dict[str, Any] = {
            "input_ids": [list(tokens)],
            "attention_mask": [[1] * total],
            "position_ids": [list(range(self._past, total))],
            "cache_position": list(range(self._past, total)),
            "use_cache_branch": [self._past > 0],
            "num_logits_to_keep": 0,
        }
        feeds = {
            name: np.array(made[role], self._types[name]) for name, role in self._roles.items() if name in self._types
        }
        return feeds | self._caches

    def cleared(self, tokens: Sequence[int], results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of a step with zeros in slots of buffers that hold no token yet: memory of no meaning."""
        used = self._past + len(tokens)
        cleared = dict(results)
        for name in self._room:
            present = self._pasts[name]
            if present in cleared and cleared[present].shape[_PAST] > used:
                cleared[present] = cleared[present].copy()
                cleared[present][:, :, used:] = 0
        return cleared

    def take(self, tokens: Sequence[int], results: Mapping[str, Any]) -> None:
        """Keep the cache that a step returned."""
        self._past += len(tokens)
        self._caches = {past: results[present] for past, present in self._pasts.items()}


_ROLES = ("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache_branch", "num_logits_to_keep")


OWN_LOOP = "the scores are of its own loop"
"""What a recording says of a loop that ran as it should."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Generated:
    """What the loop made.

    Attributes:
        logits: Of each step, [1, tokens, vocabulary]; of fewer than were asked for where it took another token.
        note: What it did otherwise, or why it did not run; "" for nothing.
    """

    logits: Sequence[Array]
    note: str = ""


def generated(decoder: OnnxDecoder, run: ServingRun) -> Generated | None:
    """Run the loop of onnxruntime-genai greedily; None for a file without a folder, or where it is not installed."""
    if decoder.config is None or not decoder.place.is_dir():
        return None
    try:
        genai = importlib.import_module("onnxruntime_genai")
    except ImportError:
        return None
    logits: list[Array] = []
    try:
        return _steps(genai, decoder, run, logits)
    except Exception as error:  # whatever its C++ raises: it is said, and the file is judged
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Generated(logits, f"onnxruntime-genai fails after {len(logits)} steps: {reason}")


def _steps(genai: Any, decoder: OnnxDecoder, run: ServingRun, logits: list[Array]) -> Generated:
    model = genai.Model(str(decoder.place))
    options = genai.GeneratorParams(model)
    options.set_search_options(do_sample=False, max_length=len(run.prompt) + run.steps + 1)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array([list(run.prompt)], np.int32))
    logits.append(np.array(generator.get_output(decoder.logits), np.float32))
    for step in range(run.steps):
        if generator.is_done():
            return Generated(logits, f"onnxruntime-genai ends after {step} tokens")
        generator.generate_next_token()
        picked = int(generator.get_next_tokens()[0])
        wanted = run.following[step] if run.following is not None and step < len(run.following) else picked
        if picked != wanted:
            note = f"onnxruntime-genai picks token {picked} in step {step}, the file by itself {wanted}"
            return Generated(logits, note)
        # Asked for its scores it runs the token that it has picked; until then a result is that of the step before.
        logits.append(np.array(generator.get_logits(), np.float32))
    return Generated(logits)
