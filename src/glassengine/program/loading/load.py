"""Load what a user calls MODEL: a Hugging Face directory or id, a factory, a stored program, a module."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError, nearest
from glassengine.program.generation.generation import PLAIN, Generation
from glassengine.program.generation.kinds import generation_of
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.loading import adapters
from glassengine.program.loading.checkpoint_files import require_plain_files
from glassengine.program.loading.model_class import model_class_of, without_weights
from glassengine.program.loading.proportion import in_proportion, require_countable
from glassengine.program.loading.stored import is_stored, read_stored
from glassengine.program.quantized import load_quantized, take_settings
from glassengine.program.representation.program import Program
from glassengine.program.user_code.factory import call_factory, is_factory, without_bars
from glassengine.program.user_code.module_state import ModuleState
from glassengine.program.user_code.raised import described
from glassengine.program.user_code.written_modules import as_written, called_by_name
from glassengine.reading.documents import read_document

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FORMS = "a Hugging Face directory or id, file.py:factory, package.module:factory, an ONNX file, a .pt2 program"

_LIMITS = {
    "max_position_embeddings": ("max_position_embeddings", "max_target_positions"),
    "vocab_size": ("vocab_size",),
}
"""Key of the metadata -> where configurations state it."""

CONFIG = "config.json"
_HUB_SECONDS = 5.0
_MAX_CONFIG_BYTES = 10_000_000
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class LoadedModel:
    """A model as the user wrote it, in evaluation mode.

    Attributes:
        module: The model.
        spec: What was loaded, as given.
        dtype: torch dtype name of its floating parameters.
        directory: Hugging Face directory or id with configuration and tokenizer, if it came from one.
        metadata: JSON values for engines and recordings.
        generation: How it generates, if it does.
        stored: The program that it is already, of an ONNX file or a .pt2 file: nothing is exported.
        state: What it remembers when it is exported and run, where a forward changes that.
    """

    module: nn.Module
    spec: str
    dtype: str
    directory: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    generation: Generation = PLAIN
    stored: Program | None = None
    state: ModuleState | None = None

    @property
    def kind(self) -> str:
        """What manifests call it: "causal_lm" where any forward takes tokens, else "module"."""
        return "causal_lm" if self.generation.takes_tokens else "module"

    def judged_as(self, generation: Generation) -> LoadedModel:
        """Return the same model, to be exported and run as another kind is."""
        return replace(self, generation=generation)


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
    if dtype != "auto" and dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, ["auto", *DTYPES])
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
    elif is_factory(str(spec)):
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
            module, quantization = _from_transformers(
                directory, dtype, attn_implementation, trust_remote_code, revision, weights
            )
    if adapter is not None:
        read = adapters.read_adapter(adapter)
        if weights:
            adapters.merge(module, read)
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
    return LoadedModel(module, name, metadata["dtype"], directory, metadata, generation)


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


def _load_stored(spec: str, dtype: str, attention: str | None, adapter: str | Path | None) -> LoadedModel:
    if adapter is not None:
        raise UsageError("an adapter is merged into a model, not into a stored program", got=f"--adapter {adapter}")
    module, program = read_stored(Path(spec), dtype=dtype, attn_implementation=attention)
    module.eval()
    program.metadata["fingerprint"] = fingerprint(module)
    metadata = dict(program.metadata)
    return LoadedModel(module, spec, metadata["dtype"], None, metadata, stored=program)


def _from_transformers(
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
    elif not _HUB_ID.fullmatch(spec) or ("/" in spec and path.parent.is_dir()):
        here = [str(p) for p in path.parent.glob("*") if p.is_dir()] if path.parent.is_dir() else []
        raise UnknownNameError("model directory", spec, here, hint=f"MODEL is {FORMS}")
    else:
        _require_hub(spec, options["revision"])
    try:
        config = AutoConfig.from_pretrained(spec, **options)
        with in_proportion(path, weights=weights):
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


def _needs_cast(module: nn.Module, dtype: torch.dtype) -> bool:
    return any(tensor.is_floating_point() and tensor.dtype is not dtype for tensor in module.state_dict().values())


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

    if hub.constants.HF_HUB_OFFLINE or isinstance(hub.try_to_load_from_cache(spec, CONFIG, revision=revision), str):
        return
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(spec, CONFIG, revision=revision), timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return  # it answers, and transformers tells what
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise _unknown(spec, f"no directory of this name, and the hub cannot be reached: {reason}") from error


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and persistent buffers; others (rotary frequencies) keep their precision, as when loading."""
    persistent = module.state_dict().keys()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in persistent and tensor.is_floating_point() and tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)
    if is_pretrained(module):
        config: Any = module.config
        config.dtype = dtype
