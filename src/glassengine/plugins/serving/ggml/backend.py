"""Back-end "gguf": the checkpoint as a GGUF file, run by llama.cpp in a process of its own, which keeps the caches.

A model that llama.cpp would compute in another way, by settings that a file does not hold, is refused.

Shape legend: B batch, S new tokens, T slots of a sequence, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine import starting
from glassengine.backends.protocol.backend import Availability, Capabilities, Run, Weights
from glassengine.errors import BackendError, UnknownNameError, UsageError, logger
from glassengine.plugins.serving.alignment import numbers_of
from glassengine.plugins.serving.ggml.child import failure, find_library
from glassengine.plugins.serving.ggml.file import GgufFile
from glassengine.plugins.serving.ggml.write import ARCHITECTURES, WRITTEN, vocabulary_of, write_gguf
from glassengine.program.representation.program import Program

_MODULE = "glassengine.plugins.serving.ggml.steps"
_PATIENCE = 5.0
"""Seconds that a process is given to end by itself."""


class LlamaRun:
    """A GGUF file, to be run in sessions.

    Args:
        path: Of the file, which is checked.

    Raises:
        UsageError: No library of llama.cpp is installed.
        CorruptError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._library = find_library(None)
        self._is_exact = all(tensor.type.name == "F32" for tensor in self._file.tensors.values())

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Refuse: llama.cpp keeps the caches, so steps belong to sessions."""
        raise UsageError(
            "an engine of llama.cpp runs in sessions", hint="engine.generate(PROMPT) or engine.session(...)"
        )

    def open(self, batch_size: int, length: int) -> tuple[Run, Callable[[], None]]:
        """Start a process for a session of so many sequences and slots of each."""
        started = _Session(self._file.path, self._library, batch_size, length, exact=self._is_exact)
        return started.step, started.end


class _Session:
    """A process and its pipes; F32 files are computed as exactly as llama.cpp can, others as by default."""

    def __init__(self, path: Path, library: Path, batch_size: int, length: int, *, exact: bool) -> None:
        self._path = path
        self._folder = tempfile.mkdtemp(prefix="glassengine-ggml-")  # empty: libraries look for others where they run
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = starting.start(
            starting.python(_MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=self._folder,
        )
        request = {
            "library": str(library),
            "file": str(path.resolve()),
            "sequences": batch_size,
            "length": length,
            "exact": exact,
            "threads": torch.get_num_threads(),
        }
        self._vocabulary = int(self._ask(request)["vocabulary"])

    def _ask(self, line: Any) -> dict[str, Any]:
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None and sink is not None
        try:
            source.write(json.dumps(line).encode() + b"\n")
            source.flush()
            answer: dict[str, Any] = json.loads(sink.readline() or b"{}")
        except (OSError, ValueError):
            answer = {}
        if not answer:
            self._fail()
        return answer

    def _fail(self) -> None:
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read()
        self.end()
        raise failure(self._path, status, said)

    def step(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run a step.

        Args:
            inputs: input_ids [B, S], attention_mask [B, T], position_ids [B, S] and cache_position [S].

        Returns:
            Logits [B, S, V] in float32; 0 where there is padding.
        """
        ids, slots = inputs["input_ids"], inputs["cache_position"]
        holds = inputs["attention_mask"][:, slots].bool()
        rows = [
            (row, int(places[held][0]), tokens[held].tolist())
            for row, (tokens, places, held) in enumerate(zip(ids, inputs["position_ids"], holds, strict=True))
            if bool(held.any())
        ]
        logits = torch.zeros((*ids.shape, self._vocabulary))
        if not rows:
            return {"logits": logits}
        total = int(self._ask(rows)["tokens"])
        sink = self._process.stdout
        assert sink is not None
        raw = bytearray(sink.read(4 * total * self._vocabulary))
        if total != int(holds.sum()) or len(raw) != 4 * total * self._vocabulary:
            self._fail()
        logits[holds] = torch.frombuffer(raw, dtype=torch.float32).reshape(total, self._vocabulary)
        return {"logits": logits}

    def end(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:  # what was not sent any more
                    continue
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._said.closed:
            self._said.close()
        Path(self._folder).rmdir() if Path(self._folder).is_dir() else None


FILE = "model.gguf"
_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_GENERATE = [kind for kind, architecture in ARCHITECTURES.items() if architecture != "bert"]
_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
_ACTIVATIONS = {"gemma2": _GELU, "gemma3": _GELU, "gpt2": _GELU, "starcoder2": _GELU, "bert": ("gelu",)}
_WINDOWS = frozenset({"gemma2", "gemma3", "phi3"})
"""Architectures whose windows of attention llama.cpp knows."""
_LARGEST_GEMMA = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of those whose attention is scaled by the width of all heads."""
_ROTATED_BUT = 4
"""Of so many layers of SmolLM3 llama.cpp rotates all but the last."""
_RENORMALIZED = {"qwen2moe": False, "qwen3moe": True}


class GgufBackend:
    """Writes the model, not its graph; steps run in sessions, whose caches llama.cpp keeps."""

    name = "gguf"
    quantizations = tuple(kind for kind in WRITTEN if kind not in _PLAIN.values())
    capabilities = Capabilities(dtypes=tuple(_PLAIN), kv="own", portable=True, native_code=False)

    def available(self) -> Availability:
        """Needs what writes the file and what runs it, both of the extra `gguf`."""
        install = "pip install 'glassengine[gguf]'"
        if importlib.util.find_spec("gguf") is None:
            return Availability(False, "the package gguf is not installed", install)
        try:
            find_library(None)
        except UsageError as error:
            return Availability(False, error.what, install)
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """They are in the file."""
        return True

    def require(self, module: nn.Module, quantize: str | None, length: int | None) -> None:
        """Refuse a model that llama.cpp does not know, or would compute in another way.

        Raises:
            UnknownNameError: No table is of its kind, or there is no such type.
            UsageError: It has a setting that llama.cpp has not.
        """
        if quantize is not None and quantize.upper() not in self.quantizations:
            raise UnknownNameError("type of a GGUF file", quantize, self.quantizations)
        config = getattr(module, "config", None)
        kind = getattr(config, "model_type", None)
        if not isinstance(kind, str):
            raise UsageError(
                "GGUF files are written of models of transformers", got=type(module).__name__, expected=_GENERATE
            )
        if kind not in _GENERATE:
            raise UnknownNameError("kind of model that is written as GGUF", kind, _GENERATE)
        architecture = ARCHITECTURES[kind]
        for name, found, expected, hint in _implicit_settings(config, architecture, length):
            raise UsageError(
                f"llama.cpp has no such setting for the architecture {architecture!r}",
                got=f"{name} {found}",
                expected=expected,
                hint=hint,
            )

    def build_model(self, module: nn.Module, directory: Path, quantize: str | None, tokenizer: str | None) -> None:
        """Write `model.gguf`, with the tokenizer where llama.cpp has its kind."""
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        kind = _PLAIN[dtype] if quantize is None else quantize.upper()
        left = write_gguf(module, directory / FILE, kind=kind, vocabulary=vocabulary_of(module, tokenizer))
        if left:
            logger.warning(
                "%d matrices are F16 instead of %s: their rows are no whole blocks (%s)", len(left), kind, left[0]
            )

    def build(self, program: Program, directory: Path) -> None:
        """Refuse: a graph does not say which model it is of.

        Raises:
            BackendError: Always.
        """
        raise BackendError(
            "back-end 'gguf' writes models, not graphs", hint="glass build MODEL --backend gguf, without passes"
        )

    def load(self, directory: Path, weights: Weights | None) -> LlamaRun:
        """Return what runs the file in sessions.

        Raises:
            UsageError: No library of llama.cpp is installed.
        """
        return LlamaRun(directory / FILE)

    def served(self, directory: Path) -> str:
        """Return the file as a candidate."""
        return f"gguf:{directory / FILE}"


def _implicit_settings(
    config: Any, architecture: str, length: int | None
) -> Iterator[tuple[str, Any, str, str | None]]:
    numbers = numbers_of(config)
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        found = getattr(config, name, None)
        known = _ACTIVATIONS.get(architecture, _SILU)
        if found is not None and found not in known:
            yield name, found, " or ".join(known), None
            break
        if found is not None:
            break
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope if all(isinstance(one, dict) for one in rope.values()) else {"": rope}
    for kind, one in kinds.items():
        found = one.get("rope_type", "default")
        if found not in ("default", "linear"):
            yield f"rope_type of {kind or 'all layers'}", found, "default or linear", None
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and architecture not in _WINDOWS and (length is None or length > window):
        yield "sliding_window", window, "none", f"--max-seq-len {window}"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    heads, hidden, layers = numbers["heads"], numbers["hidden"], numbers["layers"]
    assert heads is not None and hidden is not None
    width = hidden // heads if (architecture, layers) in _LARGEST_GEMMA else numbers["head_dim"]
    if scalar is not None and scalar != width:
        yield "query_pre_attn_scalar", scalar, f"{width}, the width of a head", None
    rotated = getattr(config, "no_rope_layers", None) if architecture == "smollm3" else None
    if rotated is not None and [*map(bool, rotated)] != [(at + 1) % _ROTATED_BUT != 0 for at in range(len(rotated))]:
        yield "no_rope_layers", rotated, f"0 for each {_ROTATED_BUT}th layer, 1 for others", None
    renormalized = _RENORMALIZED.get(architecture)
    if renormalized is not None and bool(getattr(config, "norm_topk_prob", renormalized)) is not renormalized:
        yield "norm_topk_prob", config.norm_topk_prob, str(renormalized), None
    if getattr(config, "mlp_only_layers", None) or (getattr(config, "decoder_sparse_step", None) or 1) != 1:
        yield "mlp_only_layers", config.mlp_only_layers, "experts in each layer", None
