"""Steps of a session, run by llama.cpp in a process of its own, which keeps the caches.

Shape legend: B batch, S new tokens, T slots of a sequence, V vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from glassengine import starting
from glassengine.backends.protocol.backend import Run
from glassengine.errors import UsageError
from glassengine.plugins.serving.ggml.child import failure, find_library
from glassengine.plugins.serving.ggml.file import GgufFile

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
