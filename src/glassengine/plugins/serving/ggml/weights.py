"""The tensors of a GGUF file by the parameters of a checkpoint: gguf's own table of names, and layouts as rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from torch import Tensor, nn

from glassengine.compare.matching.globs import captures, substitute
from glassengine.compare.matching.maps import MapRule
from glassengine.errors import CorruptError, UsageError
from glassengine.plugins.serving.alignment import AlignmentTable
from glassengine.plugins.serving.ggml.file import GgufFile, GgufTensor
from glassengine.plugins.serving.ggml.types import dequantized, step_of
from glassengine.plugins.serving.parameters import Unread, as_parameter
from glassengine.reading.files import open_regular, read_at, shown
from glassengine.serving.protocol import ServedWeight

_TIED = {"output.weight": "token_embd.weight"}
"""What llama.cpp reads instead of a tensor that the file has not."""


def served_weights(
    file: GgufFile, module: nn.Module, table: AlignmentTable
) -> tuple[Mapping[str, ServedWeight], list[str]]:
    """Return what the file has for each parameter of a module, and its tensors that stand for none of them.

    Args:
        file: Checked.
        module: The checkpoint's.
        table: Of its architecture.
    """
    layers = int(file.number("block_count") or 0)
    weights: dict[str, Callable[[], ServedWeight]] = {}
    used: set[str] = set()
    for name, parameter in _parameters(module):
        rule, stored = stored_names(name, table, file.architecture, layers)
        missing = [one for one in stored if one not in file.tensors]
        tied = bool(missing) and len(stored) == 1 and _TIED.get(stored[0], "") in file.tensors
        if tied:
            stored, missing = (_TIED[stored[0]],), []
        used.update(stored)
        if missing or not stored:
            reason = f"the file has no {' and '.join(missing)}" if missing else "gguf has no name for it"
            weights[name] = partial(ServedWeight, stored, None, reason=reason)
        else:
            weights[name] = partial(_weight, file, stored, rule, parameter, tied=tied)
    return Unread(weights), [name for name in file.tensors if name not in used]


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, those that are tied by each of their names."""
    yield from module.named_parameters(remove_duplicate=False)


@functools.lru_cache(maxsize=8)
def _names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """Return gguf's own table: name of a parameter -> name of a tensor."""
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            "GGUF files are read with the package gguf", got=str(error), hint="pip install 'glassengine[gguf]'"
        ) from error
    by_name = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}
    kind = by_name.get(architecture)
    if kind is None:
        raise UsageError("gguf does not know the architecture", got=architecture, expected=sorted(by_name)[:8])
    table = gguf.get_tensor_name_map(kind, layers)

    def name_of(parameter: str) -> str | None:
        found: str | None = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        return found

    return name_of


def stored_names(
    name: str, table: AlignmentTable, architecture: str, layers: int
) -> tuple[MapRule | None, tuple[str, ...]]:
    """Return the rule of a parameter, and the tensors of a file that it is made of."""
    for rule in reversed(table.weights):
        captured = next(captures(rule.baseline, name), None)
        if captured is not None:
            return rule, tuple(substitute(one, captured) for one in rule.candidates)
    found = _names(architecture, layers)(name)
    return None, (found,) if found is not None else ()


def _weight(
    file: GgufFile, stored: tuple[str, ...], rule: MapRule | None, parameter: Tensor, *, tied: bool
) -> ServedWeight:
    tensors = [file.tensors[name] for name in stored]
    types = tuple(tensor.type.name for tensor in tensors)
    try:
        values = [read_values(file, tensor) for tensor in tensors]
    except UsageError as error:
        return ServedWeight(stored, None, types=types, reason=error.what, tied=tied)
    steps = [
        step_of(value, tensor.type) if tensor.type.is_quantized else None
        for value, tensor in zip(values, tensors, strict=True)
    ]
    return as_parameter(stored, rule, values, steps, types, parameter, tied=tied)


def read_values(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """Return the numbers of a tensor in float32.

    Args:
        file: Checked.
        tensor: Of it.

    Raises:
        CorruptError: The file is shorter than when it was checked, or cannot be read any more.
    """
    try:
        with open_regular(file.path) as opened:
            data = read_at(opened.fileno(), tensor.num_bytes, tensor.offset)
    except (OSError, UsageError) as error:  # not of this tensor alone
        raise CorruptError("a file cannot be read any more", got=f"{shown(file.path)}: {error}") from error
    if len(data) != tensor.num_bytes:
        got = f"{shown(file.path)}: {len(data):,} bytes of a tensor at {tensor.offset:,}"
        raise CorruptError("a file has changed while it was read", got=got, expected=f"{tensor.num_bytes:,} bytes")
    return dequantized(np.frombuffer(data, np.uint8), tensor.shape, tensor.type).float()
