"""A model and a context of llama.cpp, in the child process that has them, and what the library logged last."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.plugins.serving.ggml.library import Library, Opaque, Pointer

_ERRORS_FROM = 3
_LOGGED: list[str] = []


def _log(level: int, text: bytes | None, _: object) -> None:
    if level >= _ERRORS_FROM and text:
        _LOGGED.append(text.decode("utf-8", "replace").strip()[:400])
        del _LOGGED[:-20]


# Of the process, as the library's own pointer to it is: models come and go.
_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, Pointer)(_log)


def logged() -> str:
    """Return the last lines that the library wrote about errors."""
    return " ".join(_LOGGED[-3:])


class Opened:
    """A model in memory.

    Args:
        library: Path of llama.cpp's.
        file: A GGUF file.

    Raises:
        RuntimeError: llama.cpp does not load it.
    """

    def __init__(self, library: str, file: str, *, verbose: bool = False) -> None:
        self.library = Library(library)
        self._alive: list[Any] = []
        if not verbose:
            self.library.llama_log_set(_LOG, None)
        self.library.llama_backend_init()
        if self.library.has("ggml_backend_load_all_from_path"):
            self.library.ggml_backend_load_all_from_path(str(Path(library).parent).encode())
        self.model = self.library.llama_model_load_from_file(file.encode(), self.library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load it: {logged()}")
        self.vocabulary: int = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    def context(self, parameters: Opaque, alive: object, tokens: int, threads: int) -> Any:
        """Return a context with room for so many tokens of a sequence.

        Args:
            parameters: As `Library.context_parameters` gives them.
            alive: What must live as long as the context.
            tokens: Of one sequence.
            threads: To compute with.

        Raises:
            RuntimeError: llama.cpp makes none, or a smaller one.
        """
        self._alive.append(alive)
        context = self.library.llama_init_from_model(self.model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context: {logged()}")
        if self.library.llama_n_ctx(context) < tokens:
            raise RuntimeError("llama.cpp takes another field for n_ctx")
        self.library.llama_set_n_threads(context, threads, threads)
        return context

    def decode(self, context: Any, rows: Sequence[tuple[int, int, Sequence[int]]]) -> int:
        """Run tokens of several sequences in one step; return how many there are.

        Args:
            context: With room for them.
            rows: Number of a sequence, position of its first token here, its tokens.

        Raises:
            RuntimeError: llama.cpp fails.
        """
        total = sum(len(tokens) for _, _, tokens in rows)
        batch = self.library.batch(total)
        at = 0
        for sequence, past, tokens in rows:
            for index, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, past + index
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, 1
                at += 1
        batch.n_tokens = total
        code = self.library.llama_decode(context, batch)
        self.library.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returns {code}: {logged()}")
        return total
