"""The model that an engine says it was built from, loaded again for its weights.

The author of the engine chose what it names. So it may name one thing only: a directory with a configuration and
weights in safetensors, which transformers reads without running anything of it. No factory, no hub id, no code that
comes with a checkpoint; a user who wants more names the model himself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program import load_model
from glassengine.program.loading.adapters import CONFIG as ADAPTER_CONFIG
from glassengine.program.loading.adapters import WEIGHTS as ADAPTER_WEIGHTS
from glassengine.program.loading.load import CONFIG
from glassengine.reading.documents import Size, converted, objects_within, read_document
from glassengine.reading.files import is_regular, shown

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

MAX_CONFIG_BYTES = 10_000_000

_HINT = "name the model yourself: glass run --model MODEL, glass.load(ENGINE, model=MODEL); or build the engine again"


class RecordedModel(msgspec.Struct):
    """What a manifest says of the model, as far as anything is done with it."""

    spec: str | None = None
    directory: str | None = None
    revision: str | None = None
    adapter: str | None = None
    attn_implementation: str | None = None
    dtype: str | None = None
    fingerprint: str | None = None
    model_class: str | None = msgspec.field(default=None, name="class")
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    image_token: Size | None = None
    whole_images: bool | None = None
    without_images: str | None = None


def directory_to_record(source: str | None, revision: str | None) -> str | None:
    """Return the directory of a checkpoint that an engine may name; None where its weights must be stored in it."""
    if source is None:
        return None
    directory = Path(source).expanduser()
    if not directory.is_dir():
        from transformers.utils import cached_file

        found = cached_file(source, CONFIG, revision=revision, _raise_exceptions_for_missing_entries=False)
        if found is None:
            return None
        directory = Path(found).parent
    directory = directory.absolute()
    return None if _refusal_reason(directory) else str(directory)


def load_recorded(
    said: Mapping[str, Any], dtype: str, model: str | Path | None, where: str | Path
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the model of an engine by name.

    Args:
        said: What the manifest says of it.
        dtype: Of the engine.
        model: What the user named in its place; None takes the directory that the manifest names.
        where: The manifest, for errors.

    Raises:
        UsageError: The manifest names something other than a plain checkpoint, or a missing one.
        CorruptError: It is damaged, or not what it was.
    """
    recorded = converted(said, RecordedModel, where)
    attention, adapter = recorded.attn_implementation, recorded.adapter
    named = model if model is not None else recorded.directory
    reason = None if model is not None else "no directory" if named is None else _refusal_reason(Path(named))
    if adapter is not None and reason is None:
        reason = _adapter_refusal_reason(Path(adapter))
    if reason is None and attention is not None and not attention.isidentifier():
        reason = f"a custom attention implementation: {attention}"
    if reason is not None:
        raise UsageError(
            "the weights are not in the engine, and the model that it names is not loaded without trust",
            got=shown(f"{named}: {reason}"),
            expected="a directory with a configuration and weights in safetensors",
            hint=_HINT,
        )
    assert named is not None
    with _offline() if model is None else contextlib.nullcontext():
        loaded = load_model(named, dtype=dtype, attn_implementation=attention, adapter=adapter)
    if loaded.metadata["fingerprint"] != recorded.fingerprint:
        raise CorruptError(
            "the checkpoint was changed since the engine was built",
            got=f"fingerprint {loaded.metadata['fingerprint']} in {named}",
            expected=str(recorded.fingerprint),
            hint="build the engine again with --overwrite",
        )
    module = loaded.module
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def _refusal_reason(directory: Path) -> str | None:
    """Return why a directory is not loaded on the word of a file; None where nothing in it can run."""
    if not directory.is_dir():
        return "no such directory"
    if (directory / ADAPTER_CONFIG).exists():
        return f"it holds {ADAPTER_CONFIG}, which names another model"
    if not any(is_regular(directory / name) for name in WEIGHTS):
        return f"none of {', '.join(WEIGHTS)} in it"
    try:
        # Others write Infinity, too. Files of the hub's cache are links.
        config = read_document(directory / CONFIG, dict[str, Any], most=MAX_CONFIG_BYTES, nonfinite=True)
    except GlassError as error:
        return f"{error.what}: {error.got}"
    return next(_code_references(config), None)


def _adapter_refusal_reason(directory: Path) -> str | None:
    if not directory.is_dir() or not is_regular(directory / ADAPTER_WEIGHTS):
        return f"the adapter {directory} has no {ADAPTER_WEIGHTS}"
    return None


def _code_references(config: dict[str, Any]) -> Iterator[str]:
    """Yield what in a configuration names code: classes of its own, kernels that are fetched, weights of elsewhere."""
    for value in objects_within(config):
        for key, item in value.items():
            if key == "auto_map" and item:
                yield "its configuration names code of its own (auto_map)"
            if key.endswith("_implementation") and isinstance(item, str) and not item.isidentifier():
                yield f"its configuration names remote code ({key}: {item})"
            if key in ("use_pretrained_backbone", "use_kernels") and item:
                yield f"its configuration fetches more ({key})"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from asking the hub for what a configuration may name."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
