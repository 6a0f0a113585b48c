"""Loads models of transformers, from a directory or the hub, and refuses anything else before it loads.

transformers makes what the configuration describes before it looks for weights: it fills those that are missing, or of
another shape, with random numbers, in memory, and reports them afterwards. One kilobyte may ask for a terabyte, so the
files of the checkpoint say how large a model may be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from glassengine.asked import FORMS, HUB_ID
from glassengine.errors import CorruptError, GlassError, UsageError, nearest
from glassengine.program.loading.checkpoint_files import (
    model_class_of,
    num_tensors,
    require_plain_files,
    without_weights,
)
from glassengine.program.loading.quantized import load_quantized, take_settings
from glassengine.program.user_code.calls import described
from glassengine.reading.documents import objects_within, read_document
from glassengine.reading.files import shown

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
