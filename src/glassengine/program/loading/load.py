"""Load what a user calls MODEL: a directory or id of transformers, a factory, a stored program, a module.

transformers makes what the configuration describes before it looks for weights: it fills those that are missing, or of
another shape, with random numbers, in memory, and reports them afterwards. One kilobyte may ask for a terabyte, so the
files of the checkpoint say how large a model may be.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from glassengine import asked
from glassengine.asked import FORMS, HUB_ID
from glassengine.errors import CorruptError, GlassError, UsageError, logger, nearest
from glassengine.program.generation import LoadedModel, generation_of
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.loading import adapters
from glassengine.program.loading.checkpoint_files import (
    model_class_of,
    num_tensors,
    require_plain_files,
    without_weights,
)
from glassengine.program.loading.quantized import load_quantized, take_settings
from glassengine.program.loading.stored import is_stored, read_stored
from glassengine.program.user_code.calls import call_factory, described, without_bars
from glassengine.program.user_code.forward import as_written, called_by_name, training_modules
from glassengine.reading.copies import here
from glassengine.reading.documents import objects_within, read_document
from glassengine.reading.files import shown
from glassengine.stores.places import remote

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CONFIG = "config.json"
_HUB_SECONDS = 5.0
_MAX_CONFIG_BYTES = 10_000_000


def from_transformers(
    spec: str, dtype: str, attention: str | None, remote: bool, revision: str | None, weights: bool
) -> tuple[nn.Module, dict[str, Any] | None]:
    """Return the model, and what to say of the quantization of its checkpoint."""
    from transformers import AutoConfig

    path = Path(spec).expanduser()
    options: dict[str, Any] = {"trust_remote_code": remote, "revision": revision or "main"}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{spec} is not a model directory", got="no config.json in it", expected=FORMS)
        _check_config(spec, path)
        require_plain_files(path)
    elif path.is_file():
        raise UsageError(f"a {path.suffix or 'plain'} file cannot be a MODEL", got=spec, expected=FORMS)
    else:
        _require_hub(spec, options["revision"])
    try:
        config = AutoConfig.from_pretrained(spec, **options)
        with bounded_by_checkpoint(path, weights=weights):
            model_class = model_class_of(config, is_sentence_encoder=(path / "modules.json").is_file())
            if attention:
                options["attn_implementation"] = attention
            target = DTYPES.get(dtype) or config.dtype or torch.float32
            quantized, described = take_settings(config), None
            if weights and quantized is not None:
                loaded, report, described = load_quantized(model_class, config, quantized, spec, target, **options)
                _require_all_weights(spec, report["missing_keys"])
            elif weights:
                options["dtype"] = DTYPES.get(dtype, "auto")
                loaded, report = model_class.from_pretrained(spec, output_loading_info=True, **options)
                _require_all_weights(spec, report["missing_keys"])
            else:
                options.pop("revision")
                loaded = without_weights(model_class, config, target, **options)
    except GlassError:
        raise
    except Exception as error:
        raise _loading_error(spec, error) from error
    module: nn.Module = loaded
    return module, described


def _require_all_weights(spec: str, missing: Iterable[str]) -> None:
    """Refuse a checkpoint with holes: transformers fills them with random numbers, other ones in each process."""
    names = sorted(missing)
    if names:
        raise UsageError(
            f"{spec} lacks weights of the model that its configuration describes",
            got=f"{len(names)} missing: {', '.join(names[:3])}",
            expected="a complete checkpoint, or file.py:factory for anything else",
        )


def _loading_error(spec: str, error: Exception) -> UsageError:
    """Return what to tell about an error of transformers, in one line of its own and none of its advice."""
    text = str(error).strip()
    if "trust_remote_code" in text:
        return UsageError(
            f"{spec} comes with its own code, which is not run unless you allow it",
            got="an auto_map in its configuration",
            hint="read that code, then add --trust-remote-code (trust_remote_code=True)",
        )
    if Path(spec).expanduser().is_dir():
        return UsageError(f"{spec} cannot be loaded", got=described(error, installed=False))
    return _unknown(spec, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}")


def _unknown(spec: str, got: str) -> UsageError:
    here = [str(p.parent) for pattern in ("*", "*/*") for p in Path().glob(f"{pattern}/config.json")]
    near = nearest(spec, here)
    return UsageError(
        f"unknown model {spec!r}", got=got, expected=FORMS + (f"; nearest: {', '.join(near)}" if near else "")
    )


def _check_config(spec: str, path: Path) -> None:
    """Refuse what TensorRT-LLM's tools write: it has a config.json, too, that transformers takes for its own.

    Raises:
        UsageError: It is a checkpoint or an engine of theirs.
        CorruptError: It is out of proportion.
    """
    file = path / CONFIG
    try:
        config = read_document(file, dict[str, Any], most=_MAX_CONFIG_BYTES, nonfinite=True)
    except CorruptError:
        return  # which transformers tells about
    require_countable(config, str(file))
    hint = "give the directory of Hugging Face that it was converted from"
    if "pretrained_config" in config and "build_config" in config:
        raise UsageError(
            f"{spec} is an engine of TensorRT-LLM",
            expected=FORMS,
            hint=f"{hint}; what the engine prints with --debug_mode is compared: glass compare",
        )
    if isinstance(config.get("architecture"), str) and "model_type" not in config:
        raise UsageError(
            f"{spec} is a checkpoint of TensorRT-LLM", got=f"architecture {config['architecture']!r}", hint=hint
        )


def _require_hub(spec: str, revision: str) -> None:
    """Refuse an id that is in no cache while the hub cannot be reached: transformers tries for a minute.

    Raises:
        UsageError: It names nothing here, and the hub is not reachable.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError

    if not HUB_ID.fullmatch(spec):
        raise _unknown(spec, "neither a directory nor an id of the hub")
    if hub.constants.HF_HUB_OFFLINE or isinstance(hub.try_to_load_from_cache(spec, CONFIG, revision=revision), str):
        return
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(spec, CONFIG, revision=revision), timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return  # it answers, and transformers tells what
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise _unknown(spec, f"no directory of this name, and the hub cannot be reached: {reason}") from error


# Of modules without weights, as activations are; one takes 6 KB, so that these are 600 MB.
_MODULES = 100_000
_MODULES_PER_TENSOR = 8
# Of tables that are computed, and of parameters that a checkpoint may have in 2 bits and a model in 64.
_BYTES = 1 << 29
_BYTES_PER_BYTE = 32
_MAX_COUNT = 100_000
_COUNTED = ("layer", "num_labels")
"""What of a model configurations make lists of, by a part of the name, before there is a model."""


def require_countable(config: Any, where: str) -> None:
    """Refuse a configuration that counts its layers or labels in millions.

    Raises:
        CorruptError: It does.
    """
    for value in objects_within(config):
        for name, number in value.items():
            if isinstance(number, int) and number > _MAX_COUNT and any(part in name for part in _COUNTED):
                got = f"{shown(where)}: {shown(name)} of {number:,}"
                raise CorruptError("a configuration is out of proportion", got=got, expected=f"{_MAX_COUNT:,}")


@contextlib.contextmanager
def bounded_by_checkpoint(directory: Path, *, weights: bool) -> Iterator[None]:
    """Refuse a model that is made meanwhile and is out of proportion to the files of its checkpoint.

    Args:
        directory: With configuration and weights; for anything else only modules are counted.
        weights: Whether memory is taken for parameters.

    Raises:
        CorruptError: It is; from where the model is made.
    """
    has_bytes, has_tensors = 0, 0
    if directory.is_dir():
        has_bytes = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
        with contextlib.suppress(GlassError):  # which is raised when they are read
            has_tensors = num_tensors(directory)
    most_bytes = _BYTES + _BYTES_PER_BYTE * has_bytes if weights and directory.is_dir() else None
    most_modules = _MODULES + _MODULES_PER_TENSOR * has_tensors
    described = num_modules = 0

    def module_made(*_: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > most_modules:
            raise _refusal(directory, f"more than {num_modules - 1:,} modules", f"{has_tensors:,} tensors")

    def tensor_made(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal described
        # Those that are loaded take the place of those that were described.
        if isinstance(tensor, Tensor) and tensor.is_meta and most_bytes is not None:
            described += tensor.nbytes
            if described > most_bytes:
                raise _refusal(directory, f"{described:,} bytes and more", f"{has_bytes:,} bytes")

    with (
        hooks.register_module_module_registration_hook(module_made),
        hooks.register_module_parameter_registration_hook(tensor_made),
        hooks.register_module_buffer_registration_hook(tensor_made),
    ):
        yield


def _refusal(directory: Path, described: str, there: str) -> CorruptError:
    return CorruptError(
        "a configuration is out of proportion to the weights of its checkpoint",
        got=f"{shown(directory)}: it describes {described}, and its files have {there}",
        expected="the configuration that the weights were saved with",
    )


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
    if not isinstance(spec, str | Path | nn.Module):
        raise UsageError("a model of no known type", got=type(spec).__name__, expected="torch.nn.Module, or a name")
    if not isinstance(spec, nn.Module):
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
