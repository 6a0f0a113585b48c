"""LoRA adapters as peft saves them, merged into the weights of a model.

    find      a directory with adapter_config.json: given as --adapter, or as MODEL, where it names its own base
    settings  everything that says what the tensors mean; a setting that is not known here is refused, not ignored
    merge     weight += scaling * B A, in float32, per module; whole modules and biases that were trained are put in

    scaling = alpha / r, or alpha / sqrt(r) with use_rslora; r is the rank of the stored matrices
    DoRA:  weight = magnitude * (weight + scaling * B A) / |weight + scaling * B A|, rows of the matrix [out, in]

peft is not used: it allocates by the ranks that a configuration names before it looks at the tensors, and matches its
patterns without a bound; a file must not decide over memory or time. The merged weights compute what peft computes
(`tests/foreign/test_adapters_of_peft.py`). What is refused here can be merged by peft: `merge_and_unload`, then save.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from glassengine.asked import is_factory
from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.program.loading.adapter_patterns import matches
from glassengine.program.loading.checkpoint_files import read_tensors
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_bytes

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."

_MEANINGLESS = {
    # About training, about which modules were chosen (the tensors say it), or only descriptions.
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config"),
    *("lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "velora_config"),
}
_READ = {"alpha_pattern", "init_lora_weights", "lora_alpha", "lora_bias", "rank_pattern", "use_dora", "use_rslora"}
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
"""How the matrices began; all others also changed the base, which is not stored with the adapter."""


_MAX_CONFIG_BYTES = 4 << 20


class _Settings(msgspec.Struct):
    """Those that are used."""

    base_model_name_or_path: str | None = None
    peft_type: str = "LORA"
    init_lora_weights: bool | str | None = True
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, int] | None = None
    # Numbers, too: peft asks only whether they are true. What it divides by, it wants as numbers, as we do.
    use_dora: bool | int | None = False
    use_rslora: bool | int | None = False
    lora_bias: bool | int | None = False


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        directory: Where it is.
        settings: Its configuration.
        tensors: Name (without peft's prefix) -> tensor.
    """

    directory: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def is_adapter(spec: object) -> bool:
    """Whether something is the directory of an adapter and of no model; its configuration may be missing."""
    if not isinstance(spec, (str, Path)) or (Path(spec).expanduser() / "config.json").is_file():
        return False
    return any((Path(spec).expanduser() / name).is_file() for name in (CONFIG, *_FILES))


def stated_base(directory: str | Path) -> tuple[str, Path | None]:
    """Return the base model that an adapter directory names, "" for none, and where it is, if it is here.

    Raises:
        CorruptError: Its configuration cannot be read.
    """
    named = _settings(Path(directory).expanduser()).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return "", None
    places = (Path(named), Path(directory).expanduser() / named)
    return named, next((place for place in places if (place / "config.json").is_file()), None)


def base_and_adapter(spec: str, adapter: str | Path | None) -> tuple[str, str | Path | None]:
    """Return the model to load and the adapter to merge.

    Args:
        spec: Hugging Face directory or id, or the directory of an adapter, which names its base.
        adapter: Directory of an adapter that was given beside it.

    Raises:
        UsageError: Two adapters, or a base that is not there.
        CorruptError: The configuration of the adapter cannot be read.
    """
    directory = Path(spec).expanduser()
    if not (directory / CONFIG).is_file() or (directory / "config.json").is_file():
        return spec, adapter
    if adapter is not None:
        raise UsageError("two adapters were given", got=f"{spec} and {adapter}", hint="give the base as MODEL")
    return _base_of(directory), spec


def _base_of(directory: Path) -> str:
    """Return the base model that an adapter directory names.

    Raises:
        UsageError: It names none, one that is not there, or something that would run code.
        CorruptError: Its configuration cannot be read.
    """
    named, found = stated_base(directory)
    hint = f"give the base and the adapter: MODEL --adapter {directory}"
    if not named:
        raise UsageError(f"the adapter {directory} names no base model", hint=hint)
    # A name that a file gives must not run code, as a factory given by the user does.
    if is_factory(named) or named.startswith("~"):
        raise UsageError(f"the adapter {directory} names a base that is not a model directory", got=named, hint=hint)
    if found is None and (Path(named).is_absolute() or named.startswith(".")):
        raise UsageError(f"the base of the adapter {directory} is not there", got=named, hint=hint)
    return named if found is None else str(found)


def read_adapter(directory: str | Path) -> Adapter:
    """Read an adapter.

    Raises:
        UsageError: No such adapter, or of a kind that is not merged.
        CorruptError: It is damaged.
    """
    path = Path(directory).expanduser()
    if not (path / CONFIG).is_file():
        hint = f"a directory with {CONFIG}, as peft saves it"
        if is_adapter(path):
            raise UsageError(f"the adapter {directory} has no configuration", expected=f"{CONFIG} beside its weights")
        here = [str(p.parent) for p in path.parent.glob(f"*/{CONFIG}")] if path.parent.is_dir() else []
        if not here:
            raise UsageError(f"no adapter {directory}", hint=hint)
        raise UnknownNameError("adapter", str(directory), here, hint=hint)
    settings = _settings(path)
    _require_mergeable(path, settings)
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise UsageError(f"the adapter {path} has no weights", expected=" or ".join(_FILES))
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_tensors([file]).items()}
    return Adapter(path, settings, tensors)


def merge(module: nn.Module, adapter: Adapter) -> int:
    """Merge an adapter into the weights of `module`, in place.

    Args:
        module: The base, any dtype; a weight that is tied to another one is untied before it is changed.
        adapter: From `read_adapter`.

    Returns:
        How many modules were changed.

    Raises:
        UsageError: The adapter is for another model.
        CorruptError: It lacks one of the matrices of a module.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.tensors.items():
        path, part = _split(name)
        parts.setdefault(path, {})[part] = tensor
    modules = dict(module.named_modules(remove_duplicate=False))
    missing = [path for path in parts if path not in modules]
    if missing:
        raise UnknownNameError(
            "module",
            missing[0],
            filter(None, modules),
            hint=f"{len(missing)} of {len(parts)} modules of the adapter {adapter.directory} are not in this model",
        )
    if not parts:
        raise CorruptError(f"the adapter {adapter.directory} is empty")
    with torch.no_grad():
        for path, found in parts.items():
            try:
                _merge_module(module, modules[path], path, found, adapter)
            except RuntimeError as error:
                raise UsageError(
                    f"the adapter {adapter.directory} does not fit {path}", got=str(error).splitlines()[0]
                ) from error
    return len(parts)


def _settings(directory: Path) -> dict[str, Any]:
    raw = read_bytes(directory / CONFIG, most=_MAX_CONFIG_BYTES)
    parsed(raw, _Settings, directory / CONFIG, what=CONFIG, nonfinite=True)
    return parsed(raw, dict[str, Any], directory / CONFIG, what=CONFIG, nonfinite=True)


def _require_mergeable(path: Path, settings: Mapping[str, Any]) -> None:
    def refuse(what: str, got: Any, hint: str = "merge it with peft (merge_and_unload), save, and give that") -> None:
        raise UsageError(f"the adapter {path} cannot be merged: {what}", got=str(got), hint=hint)

    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        refuse("only LoRA is", kind)
    begun = settings.get("init_lora_weights", True)
    if begun not in _INITIALIZATIONS:
        refuse("it changed its base when it began, and the base that it needs is not stored", begun)
    for name, value in settings.items():
        if value and name not in _MEANINGLESS | _READ:
            refuse(f"the setting {name} is not known here", value)


def _split(name: str) -> tuple[str, str]:
    """Return (module, part) of the name of a tensor: part is "lora_A", ..., or the name of a parameter."""
    # peft keeps wrappers in some names: the layer itself, copies of whole modules, the name of the adapter.
    name = re.sub(r"\.(base_layer|original_module|modules_to_save(\.default)?)\.", ".", name)
    name = name.removesuffix(".default")
    kinds = "A|B|embedding_A|embedding_B|magnitude_vector"
    found = re.fullmatch(rf"(.*)\.(lora_(?:{kinds}))(\.default)?(\.weight|\.bias)?", name)
    if found is None:
        path, _, parameter = name.rpartition(".")
        return path, parameter
    return found[1], found[2] + (".bias" if found[4] == ".bias" else "")


def _merge_module(root: nn.Module, module: nn.Module, path: str, parts: dict[str, Tensor], adapter: Adapter) -> None:
    lora = {name: parts.pop(name) for name in list(parts) if name.startswith("lora_")}
    for name, tensor in parts.items():
        _put(root, module, path, name, tensor)
    if not lora:
        return
    is_embedding = "lora_embedding_A" in lora
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if any(name not in lora for name in names):
        raise CorruptError(f"the adapter lacks a matrix of {path}", got=", ".join(lora), expected=", ".join(names))
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise UsageError(f"the adapter changes {path}, which has no weight", got=type(module).__name__)
    a, b = (lora[name].float() for name in names)
    scaling = _scaling(path, a.shape[0], adapter.settings)
    is_transposed = is_embedding or type(module).__name__ == "Conv1D"  # both keep [in, out]
    if a.dim() > 2 and getattr(module, "groups", 1) != 1:
        raise UsageError(f"the adapter changes {path}, a convolution with groups", got=type(module).__name__)
    # Convolutions: A has the kernel, B is one of size 1.
    delta = scaling * (b.flatten(1) @ a.flatten(1)).reshape(b.shape[0], *a.shape[1:])
    rows = weight.float().T if is_transposed else weight.float()
    if rows.shape != delta.shape:
        raise UsageError(
            f"the adapter is for another model: {path}", got=f"changes of {list(delta.shape)}", expected=list_of(rows)
        )
    merged = rows + delta
    magnitude = lora.get("lora_magnitude_vector")
    if adapter.settings.get("use_dora"):
        if magnitude is None:
            raise CorruptError(f"the adapter lacks the magnitudes of {path}", expected="lora_magnitude_vector")
        sizes = merged.flatten(1).norm(dim=1)
        merged = merged * (magnitude.float().flatten() / sizes).reshape(-1, *(1,) * (merged.dim() - 1))
    _put(root, module, path, "weight", merged.T if is_transposed else merged)
    if "lora_B.bias" in lora:
        bias = getattr(module, "bias", None)
        if bias is None:
            raise UsageError(f"the adapter changes the bias of {path}, which has none")
        _put(root, module, path, "bias", bias.float() + scaling * lora["lora_B.bias"].float())


def list_of(tensor: Tensor) -> str:
    """Return the shape of a tensor as a list."""
    return str(list(tensor.shape))


def _scaling(path: str, rank: int, settings: Mapping[str, Any]) -> float:
    alpha = settings.get("lora_alpha", 8)
    patterns: Mapping[str, Any] = settings.get("alpha_pattern") or {}
    alpha = next((value for pattern, value in patterns.items() if matches(pattern, path)), alpha)
    if not isinstance(alpha, (int, float)) or rank < 1:
        raise CorruptError("the scaling of the adapter cannot be computed", got=f"alpha {alpha}, rank {rank}")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _put(root: nn.Module, module: nn.Module, path: str, name: str, value: Tensor) -> None:
    """Give one parameter of one module its value; who shares it keeps what it was."""
    old = getattr(module, name, None)
    if not isinstance(old, Tensor):
        raise UsageError(f"the adapter sets {path}.{name}, which this model does not have", got=type(module).__name__)
    if old.shape != value.shape:
        raise UsageError(f"the adapter is for another model: {path}.{name}", got=list_of(value), expected=list_of(old))
    value = value.to(old.dtype).contiguous()
    if name in module._parameters and _is_shared(root, module, old):
        module._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        old.data = value


def _is_shared(root: nn.Module, module: nn.Module, tensor: Tensor) -> bool:
    others: Iterable[nn.Module] = (other for other in root.modules() if other is not module)
    return any(parameter is tensor for other in others for parameter in other._parameters.values())
