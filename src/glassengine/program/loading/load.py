"""Load what a user calls MODEL: a Hugging Face directory or id, a factory, a stored program, a module."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from glassengine import asked
from glassengine.errors import UsageError
from glassengine.program.generation import LoadedModel, generation_of
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.loading import adapters
from glassengine.program.loading.from_transformers import DTYPES, from_transformers
from glassengine.program.loading.stored import is_stored, read_stored
from glassengine.program.user_code.calls import call_factory, without_bars
from glassengine.program.user_code.forward import as_written, called_by_name, training_modules
from glassengine.reading.copies import here
from glassengine.stores.places import remote

logger = logging.getLogger("glassengine")

_LIMITS = {
    "max_position_embeddings": ("max_position_embeddings", "max_target_positions"),
    "vocab_size": ("vocab_size",),
}
"""Key of the metadata -> where configurations state it."""


def load_model(
    spec: str | Path | nn.Module,
    *,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    weights: bool = True,
    adapter: str | Path | None = None,
) -> LoadedModel:
    """Load a model. A quantized checkpoint is dequantized.

    Args:
        spec: Hugging Face directory or id, `file.py:factory`, `package.module:factory`, an ONNX file, a .pt2 file of
            `torch.export.save`, or a module object, which is put into evaluation mode. A directory with an adapter of
            peft stands for its base with it merged.
        dtype: "auto" (that of the checkpoint or factory), or a name in `DTYPES`.
        attn_implementation: As in transformers; None for its default.
        trust_remote_code: Allow code that comes with the checkpoint to run.
        revision: Of a hub id.
        weights: False builds the model on the meta device: names and shapes only, in seconds for any size.
        adapter: Directory of a LoRA adapter, as peft saves it, to merge.

    Raises:
        CorruptError: A quantized weight or an adapter is damaged.
        UsageError: No such model, one that cannot be loaded or lacks weights, a factory that does not return a module,
            or an unknown dtype.
    """
    dtype = str(asked.dtype(dtype))
    if isinstance(spec, str | Path):
        spec = here(spec) if remote(spec) is not None else str(asked.model(str(spec)))
    name = type(spec).__name__ if isinstance(spec, nn.Module) else str(spec)
    if is_stored(spec):
        return _load_stored(name, dtype, attn_implementation, adapter)
    directory: str | None = None
    module: nn.Module | None = None
    quantization: dict[str, Any] | None = None
    if isinstance(spec, nn.Module):
        # The caller's own module is left as it is.
        is_changed = adapter is not None or (dtype != "auto" and _needs_cast(spec, DTYPES[dtype]))
        module = copy.deepcopy(spec) if is_changed else spec
    elif asked.is_factory(str(spec)):
        module = call_factory(name)
        if not isinstance(module, nn.Module):
            raise UsageError(f"{name} did not return a module", got=type(module).__name__, expected="torch.nn.Module")
    if module is not None:
        module = called_by_name(module)
        if attn_implementation is not None:
            raise UsageError(
                "an attention implementation can be chosen for Hugging Face directories and ids only",
                got=f"{attn_implementation} for {name}",
                hint="choose it where the model is made",
            )
        if dtype != "auto":
            _cast(module, DTYPES[dtype])
    else:
        directory, adapter = adapters.base_and_adapter(name, adapter)
        with without_bars():
            module, quantization = from_transformers(
                directory, dtype, attn_implementation, trust_remote_code, revision, weights
            )
    if adapter is not None:
        read = adapters.read_adapter(adapter)
        if weights:
            adapters.merge(module, read)
    training = training_modules(module)
    with contextlib.suppress(NotImplementedError):  # what torch.export made has no other mode than that of its export
        module.eval()
    floating = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    written = as_written(module)
    config: Any = getattr(written, "config", None)
    metadata: dict[str, Any] = {
        "model": name,
        "class": f"{type(written).__module__}.{type(written).__qualname__}",
        "dtype": str(floating).removeprefix("torch."),
        "fingerprint": fingerprint(written) if weights else None,
        "attn_implementation": getattr(config, "_attn_implementation", None),
    }
    metadata |= {} if adapter is None else {"adapter": str(adapter)}
    metadata |= {} if quantization is None else {"quantization": quantization}
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    for key, names in _LIMITS.items():
        # XLNet has -1 for no limit.
        found = (getattr(text, name, None) for name in names)
        value = next((value for value in found if isinstance(value, int) and value > 0), None)
        metadata |= {} if value is None else {key: value}
    generation = generation_of(written)
    metadata |= generation.describes(written)
    return LoadedModel(module, name, metadata["dtype"], directory, metadata, generation, training=training)


def load_candidate(candidate: str | Path | nn.Module, baseline: str | Path | nn.Module, **options: Any) -> LoadedModel:
    """Load what is judged beside `baseline`: a model, or an adapter, which stands for the baseline with it merged.

    Arguments are those of `load_model`.

    Raises:
        UsageError: As `load_model`, or the adapter names another base, which is here.
    """
    if not adapters.is_adapter(candidate) or adapters.is_adapter(baseline):
        return load_model(candidate, **options)
    merged = load_model(baseline, adapter=str(candidate), **options)
    named, found = adapters.stated_base(str(candidate))
    given = merged.spec
    if found is not None and not (Path(given).exists() and found.samefile(given)):
        held = [load_model(spec, **options).metadata["fingerprint"] for spec in (str(found), baseline)]
        if held[0] != held[1]:
            what = f"the adapter {candidate} is for another base"
            raise UsageError(what, got=given, expected=named, hint=f"glass check {found} --candidate {candidate}")
    elif found is None and named and Path(named).name != Path(given).name:
        logger.warning("the adapter %s names the base %s; it is merged into %s", candidate, named, given)
    return merged


def _load_stored(spec: str, dtype: str, attention: str | None, adapter: str | Path | None) -> LoadedModel:
    if adapter is not None:
        raise UsageError("an adapter is merged into a model, not into a stored program", got=f"--adapter {adapter}")
    module, program = read_stored(Path(spec), dtype=dtype, attn_implementation=attention)
    module.eval()
    program.metadata["fingerprint"] = fingerprint(module)
    metadata = dict(program.metadata)
    return LoadedModel(module, spec, metadata["dtype"], None, metadata, stored=program)


def _needs_cast(module: nn.Module, dtype: torch.dtype) -> bool:
    return any(tensor.is_floating_point() and tensor.dtype is not dtype for tensor in module.state_dict().values())


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and persistent buffers; others (rotary frequencies) keep their precision, as when loading."""
    persistent = module.state_dict().keys()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in persistent and tensor.is_floating_point() and tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)
    if is_pretrained(module):
        config: Any = module.config
        config.dtype = dtype


def fingerprint(module: nn.Module) -> str:
    """Return a hash of the names, dtypes, shapes and values of all parameters and persistent buffers.

    A quantized weight counts by what it is made of: codes, scales, zero points.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        for leaf in pytree.tree_leaves(value):
            for part in _parts_of(leaf):
                if not isinstance(part, torch.Tensor):
                    digest.update(f"{name} {part!r}\n".encode())
                    continue
                digest.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
                raw: Any = part.detach().cpu().contiguous().flatten()
                if raw.numel():
                    digest.update(raw.view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _parts_of(leaf: Any) -> Iterator[Any]:
    """Yield the plain tensors and values that something in a state_dict is made of."""
    if isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf):
        names, context = leaf.__tensor_flatten__()
        yield type(leaf).__qualname__
        for name in names:
            yield from _parts_of(getattr(leaf, name))
        yield {key: value for key, value in dict(context or {}).items() if isinstance(value, (bool, int, float, str))}
    elif isinstance(leaf, torch.Tensor) and leaf.is_quantized:
        per_channel = leaf.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        yield leaf.int_repr()
        yield from (
            (leaf.q_per_channel_scales(), leaf.q_per_channel_zero_points(), leaf.q_per_channel_axis())
            if per_channel
            else (leaf.q_scale(), leaf.q_zero_point())
        )
    elif isinstance(leaf, (torch.Tensor, bool, int, float, str, bytes, torch.dtype)):
        yield leaf
    elif leaf is not None:
        yield type(leaf).__qualname__
