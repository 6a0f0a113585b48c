"""What a build refuses before it begins: dtypes of the back-end, sizes of the model."""

from __future__ import annotations

from collections.abc import Mapping

from glassengine.backends.protocol.backend import Backend, TakingModels
from glassengine.backends.registry import BackendInfo, find_backend, list_backends
from glassengine.errors import BackendError, UsageError
from glassengine.program import LoadedModel

DEFAULT_MAX_SEQ_LEN = 2048
"""For models whose configuration states no limit."""

_MAX_BATCH, _MAX_LENGTH = 1 << 20, 1 << 24
"""Beyond them the number of bytes of a cache is beyond 64 bits."""


def check_dtype(backend: Backend, dtype: str) -> None:
    """Refuse a dtype that the back-end cannot run.

    Raises:
        BackendError: Names those that it can.
    """
    if dtype not in backend.capabilities.dtypes:
        raise BackendError(
            f"back-end {backend.name!r} cannot run {dtype} models",
            expected=backend.capabilities.dtypes,
            hint=f"--dtype {backend.capabilities.dtypes[0]}",
        )


def check_written(
    backend: Backend, model: LoadedModel, quantize: str | None, length: int | None, asked: Mapping[str, object]
) -> None:
    """Refuse what a back-end cannot do that writes models rather than graphs, and types where none are written.

    Args:
        backend: That is to build.
        model: Loaded.
        quantize: Type of matrices.
        length: Most tokens of a sequence.
        asked: Flag of what needs a graph -> what was asked for.

    Raises:
        UsageError: It cannot be written, or not so.
    """
    if not isinstance(backend, TakingModels):
        if quantize is not None:
            able = [info.name for info in list_backends() if isinstance(_found(info), TakingModels)]
            raise UsageError(
                f"back-end {backend.name!r} rounds no matrices", got=f"--quantize {quantize}", expected=able or None
            )
        return
    if given := [flag for flag, value in asked.items() if value]:
        raise UsageError(
            f"back-end {backend.name!r} runs a model that it writes itself, not its graph",
            got=given[0],
            hint="leave it out; glass record shows every tensor of such an engine's file",
        )
    if not model.generation.generates or model.generation.has_encoder or model.stored is not None:
        raise UsageError(
            f"back-end {backend.name!r} writes language models that generate",
            got=model.spec,
            expected="a Hugging Face directory or id",
        )
    backend.require(model.module, quantize, length)


def _found(info: BackendInfo) -> object:
    return find_backend(info.name) if info.available else None


def check_sizes(model: LoadedModel, batch: int, length: int | None) -> int | None:
    """Return the most tokens of a sequence; None for a model that does not generate.

    Raises:
        UsageError: The model does not allow these sizes.
    """
    if not model.generation.generates:
        return None
    limit = model.metadata.get("max_position_embeddings")
    if batch < 1:
        raise UsageError("invalid --max-batch-size", got=str(batch), expected="at least 1")
    if batch > _MAX_BATCH or (length or 0) > _MAX_LENGTH:
        raise UsageError(
            "no cache can be so large",
            got=f"--max-batch-size {_shown(batch)}, --max-seq-len {_shown(length or limit or 0)}",
            expected=f"at most {_MAX_BATCH:,} and {_MAX_LENGTH:,}",
        )
    if length is None:
        return limit or DEFAULT_MAX_SEQ_LEN
    if length < 2 or (limit is not None and length > limit):
        raise UsageError(
            "the model does not allow this sequence length",
            got=f"--max-seq-len {length}",
            expected=f"2 to {limit}, max_position_embeddings of its configuration",
        )
    return length


def _shown(number: int) -> str:
    return f"{number:,}" if number < 1 << 64 else f"about 2^{number.bit_length()}"
