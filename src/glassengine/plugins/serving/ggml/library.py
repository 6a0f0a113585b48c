"""llama.cpp's C functions by ctypes, from any library that exports them, and a model that they have opened.

Structs change from build to build, and a library does not say how its own look. So layouts are found: fields of
`ggml_tensor` by making tensors whose numbers are known, fields of the parameters by their default values. What is
found is checked by the library's own functions before anything relies on it. Runs in a child process, and imports
nothing heavy.
"""

from __future__ import annotations

import ctypes as c
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Pointer = c.c_void_p

_PARAMETERS = 512
"""Bytes that are passed for a struct of parameters: a larger one than the library's does no harm, as it is copied."""
_PROBED = 512


class Opaque(c.Structure):
    """Parameters of a layout that is not known."""

    _fields_ = [("raw", c.c_uint64 * (_PARAMETERS // 8))]


class Batch(c.Structure):
    """llama_batch, whose layout `Library.batch` checks."""

    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", Pointer),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


class _InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", Pointer), ("no_alloc", c.c_bool)]


CALLBACK = c.CFUNCTYPE(c.c_bool, Pointer, c.c_bool, Pointer)


class LayoutError(Exception):
    """The library's structs are not what is known of llama.cpp."""


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (Opaque, []),
    "llama_context_default_params": (Opaque, []),
    "llama_model_load_from_file": (Pointer, [c.c_char_p, Opaque]),
    "llama_init_from_model": (Pointer, [Pointer, Opaque]),
    "llama_model_get_vocab": (Pointer, [Pointer]),
    "llama_vocab_n_tokens": (c.c_int32, [Pointer]),
    "llama_model_rope_type": (c.c_int, [Pointer]),
    "llama_batch_init": (Batch, [c.c_int32, c.c_int32, c.c_int32]),
    "llama_decode": (c.c_int32, [Pointer, Batch]),
    "llama_batch_free": (None, [Batch]),
    "llama_free": (None, [Pointer]),
    "llama_get_logits_ith": (c.POINTER(c.c_float), [Pointer, c.c_int32]),
    "llama_n_ctx": (c.c_uint32, [Pointer]),
    "llama_n_batch": (c.c_uint32, [Pointer]),
    "llama_set_n_threads": (None, [Pointer, c.c_int32, c.c_int32]),
    "ggml_init": (Pointer, [_InitParams]),
    "ggml_free": (None, [Pointer]),
    "ggml_new_tensor_2d": (Pointer, [Pointer, c.c_int, c.c_int64, c.c_int64]),
    "ggml_scale": (Pointer, [Pointer, Pointer, c.c_float]),
    "ggml_add": (Pointer, [Pointer, Pointer, Pointer]),
    "ggml_view_1d": (Pointer, [Pointer, Pointer, c.c_int64, c.c_size_t]),
    "ggml_set_name": (Pointer, [Pointer, c.c_char_p]),
    "ggml_get_name": (c.c_char_p, [Pointer]),
    "ggml_get_data": (Pointer, [Pointer]),
    "ggml_op_desc": (c.c_char_p, [Pointer]),
    "ggml_type_name": (c.c_char_p, [c.c_int]),
    "ggml_nbytes": (c.c_size_t, [Pointer]),
    "ggml_backend_tensor_get": (None, [Pointer, Pointer, c.c_size_t, c.c_size_t]),
}


_OPTIONAL: dict[str, tuple[Any, list[Any]]] = {
    "llama_set_embeddings": (None, [Pointer, c.c_bool]),
    "llama_get_memory": (Pointer, [Pointer]),
    "llama_memory_seq_rm": (c.c_bool, [Pointer, c.c_int32, c.c_int32, c.c_int32]),
    "llama_kv_self_seq_rm": (c.c_bool, [Pointer, c.c_int32, c.c_int32, c.c_int32]),
}
"""What some builds have under another name."""


@dataclass(frozen=True)
class TensorLayout:
    """Where the fields of `ggml_tensor` are, in bytes."""

    kind: int
    buffer: int
    sizes: int
    strides: int
    op_params: int
    sources: int
    num_sources: int
    view_source: int
    data: int


class Library:
    """A library that exports llama.cpp's and ggml's functions.

    Raises:
        OSError: It cannot be loaded.
        LayoutError: It lacks functions, or its structs are not what is known.
    """

    def __init__(self, path: str) -> None:
        self._dll = c.CDLL(path)
        missing = []
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._dll, name)
            except AttributeError:
                missing.append(name)
                continue
            function.restype, function.argtypes = result, arguments
        for name, (result, arguments) in _OPTIONAL.items():
            if self.has(name):
                function = getattr(self._dll, name)
                function.restype, function.argtypes = result, arguments
        if missing:
            raise LayoutError(f"the library does not export {', '.join(missing[:4])}")
        self.tensor = self._tensor_layout()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._dll, name)
        return function

    def has(self, name: str) -> bool:
        """Whether it exports a function."""
        return hasattr(self._dll, name)

    def _tensor_layout(self) -> TensorLayout:
        context = self.ggml_init(_InitParams(1 << 20, None, False))
        if not context:
            raise LayoutError("ggml_init returns nothing")
        try:
            a = self.ggml_new_tensor_2d(context, 1, 37, 11)
            b = self.ggml_new_tensor_2d(context, 1, 37, 11)
            added = c.string_at(self.ggml_add(context, a, b), _PROBED)
            scaled = c.string_at(self.ggml_scale(context, a, 0.1235), _PROBED)
            view = c.string_at(self.ggml_view_1d(context, a, 5, 14), _PROBED)
            plain = c.string_at(a, _PROBED)
            data = struct.pack("<Q", self.ggml_get_data(a))
            sizes = _only(plain, struct.pack("<4q", 37, 11, 1, 1), "sizes")
            strides = _only(plain, struct.pack("<4Q", 2, 74, 814, 814), "strides")
            params = _only(scaled, struct.pack("<f", 0.1235), "op_params")
            sources = _only(added, struct.pack("<QQ", a, b), "sources")
            offset = _only(view[: _PROBED // 2 + 128], struct.pack("<QQ", a, 14), "view_src")
            at = _only(plain, data, "data")
        finally:
            self.ggml_free(context)
        number = (offset - sources) // 8
        if plain[:4] != struct.pack("<i", 1) or not 2 <= number <= 64 or sizes != 16 or strides <= sizes:
            raise LayoutError("struct ggml_tensor has another order")
        return TensorLayout(0, 8, sizes, strides, params, sources, number, offset, at)

    def context_parameters(
        self, tokens: int, callback: Any, *, deployed: bool, sequences: int = 1
    ) -> tuple[Opaque, tuple[Any, ...]]:
        """Return parameters of a context for so many tokens, with a callback for each node, and what must stay alive.

        Args:
            tokens: Of all steps of a sequence.
            callback: A `CALLBACK`; None for none.
            deployed: Take the defaults for cache and attention: else a float32 cache without flash attention.
            sequences: Most sequences of a step.
        """
        parameters = self.llama_context_default_params()
        ints = (c.c_int32 * (_PARAMETERS // 4)).from_buffer(parameters)
        if ints[1] < ints[2] or not 0 < ints[2] <= 1 << 16:
            raise LayoutError("llama_context_params does not begin with n_ctx, n_batch, n_ubatch")
        # The enumerations of rope scaling, pooling, attention and (since 2025) flash attention: -1 by default.
        run = next((at for at in range(64) if list(ints[at : at + 3]) == [-1, -1, -1]), None)
        # cb_eval and its data are null, before the types of K and V: F16, F16.
        evaluate = next((at for at in range(8, 64, 2) if list(ints[at : at + 6]) == [0, 0, 0, 0, 1, 1]), None)
        if run is None or evaluate is None or run >= evaluate:
            raise LayoutError("cb_eval, type_k and type_v are not found in llama_context_params")
        if sequences > 1 and ints[3] != 1:
            raise LayoutError("n_seq_max is not found in llama_context_params")
        number = -(-tokens // 256) * 256 * sequences
        ints[0] = number
        ints[1] = max(ints[1], number)
        if callback is not None:  # the nodes of a step are those of one graph
            ints[2] = max(ints[2], number)
        ints[3] = max(ints[3], sequences)
        has_flash = ints[run + 3] == -1
        if not deployed:
            ints[evaluate + 4] = ints[evaluate + 5] = 0
            if has_flash:
                ints[run + 3] = 0
        if callback is None:
            return parameters, (ints,)
        address = c.cast(callback, Pointer).value or 0
        ints[evaluate], ints[evaluate + 1] = (
            c.c_int32(address & 0xFFFFFFFF).value,
            c.c_int32(address >> 32).value,
        )
        return parameters, (callback, ints)

    def batch(self, number: int) -> Batch:
        """Return room for so many tokens."""
        found: Batch = self.llama_batch_init(number, 0, 1)
        if not all((found.token, found.pos, found.n_seq_id, found.seq_id, found.logits)) or found.embd:
            raise LayoutError("llama_batch has another layout")
        return found


def _only(raw: bytes, wanted: bytes, name: str) -> int:
    at = raw.find(wanted)
    if at < 0:
        raise LayoutError(f"{name} is not found in ggml_tensor")
    return at


_ERRORS_FROM = 3
LOGGED: list[str] = []


def _log(level: int, text: bytes | None, _: object) -> None:
    if level >= _ERRORS_FROM and text:
        LOGGED.append(text.decode("utf-8", "replace").strip()[:400])
        del LOGGED[:-20]


# Of the process, as the library's own pointer to it is: models come and go.
LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, Pointer)(_log)


def logged() -> str:
    """Return the last lines that the library wrote about errors."""
    return " ".join(LOGGED[-3:])


class GgufModel:
    """A model in memory.

    Raises:
        RuntimeError: llama.cpp does not load it.
    """

    def __init__(self, library: str, file: str, *, verbose: bool = False) -> None:
        self.library = Library(library)
        self._alive: list[Any] = []
        if not verbose:
            self.library.llama_log_set(LOG, None)
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
