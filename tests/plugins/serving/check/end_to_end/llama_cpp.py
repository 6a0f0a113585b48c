"""llama.cpp by ctypes and nothing of this package: logits of a file as it runs by default, and its own quantizer."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xllamacpp

_P = c.c_void_p
# The library keeps a pointer to it for as long as the process lives.
_QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, _P)(lambda *_: None)


class Parameters(c.Structure):
    """Longer than the structs of parameters are; only what fills them reads them."""

    _fields_ = [("bytes", c.c_byte * 512)]


class Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", _P),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


def library() -> Any:
    found = c.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    for name, result, arguments in (
        ("llama_model_default_params", Parameters, []),
        ("llama_context_default_params", Parameters, []),
        ("llama_model_load_from_file", _P, [c.c_char_p, Parameters]),
        ("llama_init_from_model", _P, [_P, Parameters]),
        ("llama_batch_init", Batch, [c.c_int32] * 3),
        ("llama_decode", c.c_int32, [_P, Batch]),
        ("llama_get_logits_ith", c.POINTER(c.c_float), [_P, c.c_int32]),
        ("llama_set_n_threads", None, [_P, c.c_int32, c.c_int32]),
        ("llama_free", None, [_P]),
        ("llama_model_free", None, [_P]),
        ("llama_log_set", None, [_P, _P]),
        ("ggml_quantize_chunk", c.c_size_t, [c.c_int, _P, _P, c.c_int64, c.c_int64, c.c_int64, _P]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def logits_of(file: Path, prompt: Sequence[int], steps: int, vocabulary: int) -> tuple[torch.Tensor, list[int]]:
    """Return the logits [tokens, V] of a prompt and of what llama.cpp picks after it, and these tokens."""
    lib = library()
    lib.llama_log_set(c.cast(_QUIET, _P), None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    context = lib.llama_init_from_model(model, lib.llama_context_default_params())
    lib.llama_set_n_threads(context, 1, 1)
    rows: list[np.ndarray[Any, Any]] = []
    given, past, picked = list(prompt), 0, []
    for _ in range(steps + 1):
        batch = lib.llama_batch_init(len(given), 0, 1)
        for at, token in enumerate(given):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, past + at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, 1
        batch.n_tokens = len(given)
        assert lib.llama_decode(context, batch) == 0
        for at in range(len(given)):
            rows.append(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), (vocabulary,)).copy())
        past += len(given)
        given = [int(rows[-1].argmax())]
        picked += given
    lib.llama_free(context)
    lib.llama_model_free(model)
    return torch.from_numpy(np.stack(rows)), picked[:steps]


def quantized(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what llama.cpp's own quantizer makes of a matrix."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    weight = np.ascontiguousarray(values.numpy(), np.float32)
    rows, columns = weight.shape
    made = np.zeros((rows, columns // block * size), np.uint8)
    library().ggml_quantize_chunk(int(number), weight.ctypes.data, made.ctypes.data, 0, rows, columns, None)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(made, number), np.float32))
