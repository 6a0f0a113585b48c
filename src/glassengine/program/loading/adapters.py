"""Merges LoRA adapters into the weights of a model, with peft.

    find      a directory with adapter_config.json: given as --adapter, or as MODEL, where it names its own base
    read      settings and safetensors; an unknown setting is refused, not ignored
    merge     whole tensors are set here; peft merges the LoRA matrices

peft gets the settings that change the result, and nothing else of the file. The tensors state target modules and ranks,
and patterns are bounded before peft matches them. So a file decides neither over code nor over memory or time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from glassengine.asked import is_factory
from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.program.loading.checkpoint_files import read_tensors
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_bytes
from glassengine.reading.patterns import matches

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?:weight|bias))?")

_MEANINGLESS = {
    # Training, the choice of modules (the tensors state it), and descriptions.
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    # The stored matrices have their ranks.
    *("r", "rank_pattern", "velora_config"),
}
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base unchanged. The others need a changed base, which is not stored."""

_MAX_CONFIG_BYTES = 4 << 20


class _Settings(msgspec.Struct):
    """Settings that change the merged weights; the names are peft's."""

    lora_alpha: float = 8
    alpha_pattern: dict[str, float] | None = None
    fan_in_fan_out: bool | int | None = False
    use_dora: bool | int | None = False
    use_rslora: bool | int | None = False
    lora_bias: bool | int | None = False


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        directory: Its directory.
        settings: Settings of peft's `LoraConfig`.
        tensors: Name (without peft's prefix) -> tensor.
    """

    directory: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def is_adapter(spec: object) -> bool:
    """Whether something is the directory of an adapter and of no model; its configuration may be missing."""
    if not isinstance(spec, (str, Path)) or (Path(spec).expanduser() / "config.json").is_file():
        return False
    return any((Path(spec).expanduser() / name).is_file() for name in (CONFIG, WEIGHTS, _PICKLE))


def stated_base(directory: str | Path) -> tuple[str, Path | None]:
    """Return the base model that an adapter directory names, "" for none, and its directory if there is one here.

    Raises:
        CorruptError: Its configuration cannot be read.
    """
    named = _read_config(Path(directory).expanduser()).get("base_model_name_or_path")
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
        UsageError: Two adapters, or a base that is not named, not there, or would run code.
        CorruptError: The configuration of the adapter cannot be read.
    """
    directory = Path(spec).expanduser()
    if not (directory / CONFIG).is_file() or (directory / "config.json").is_file():
        return spec, adapter
    if adapter is not None:
        raise UsageError("two adapters were given", got=f"{spec} and {adapter}", hint="give the base as MODEL")
    named, found = stated_base(directory)
    hint = f"give the base and the adapter: MODEL --adapter {directory}"
    if not named:
        raise UsageError(f"the adapter {directory} names no base model", hint=hint)
    # A name in a file must not run code, as a factory of the user does.
    if is_factory(named) or named.startswith("~"):
        raise UsageError(f"the adapter {directory} names a base that is not a model directory", got=named, hint=hint)
    if found is None and (Path(named).is_absolute() or named.startswith(".")):
        raise UsageError(f"the base of the adapter {directory} is not there", got=named, hint=hint)
    return named if found is None else str(found), spec


def read_adapter(directory: str | Path) -> Adapter:
    """Read an adapter.

    Raises:
        UsageError: No such adapter, an unsupported kind, or peft is not installed.
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
    config = _read_config(path)
    _require_mergeable(path, config)
    if not (path / WEIGHTS).is_file():
        got = _PICKLE if (path / _PICKLE).is_file() else None
        way = "load it with peft, and save it with save_pretrained" if got else None
        raise UsageError(f"the adapter {path} has no weights", got=got, expected=WEIGHTS, hint=way)
    if importlib.util.find_spec("peft") is None:
        raise UsageError(
            "adapters are merged with peft, which is not installed", hint="pip install 'glassengine[lora]'"
        )
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_tensors([path / WEIGHTS]).items()}
    settings = msgspec.structs.asdict(msgspec.convert(config, _Settings))
    return Adapter(path, settings, tensors)


def merge(module: nn.Module, adapter: Adapter) -> None:
    """Merge an adapter into the weights of `module`, in place.

    Args:
        module: The base, any dtype; a weight that is tied to another one is untied before it is changed.
        adapter: From `read_adapter`.

    Raises:
        UsageError: The adapter is for another model.
        CorruptError: A matrix of a module is missing, or a pattern is not a bounded regular expression.
    """
    if not adapter.tensors:
        raise CorruptError(f"the adapter {adapter.directory} is empty")
    lora = {name: found[1] for name in adapter.tensors if (found := _LORA.fullmatch(name))}
    # peft keeps wrappers in some names: of the layer itself, and of copies of whole modules.
    wrappers = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)\.")
    whole = {wrappers.sub(".", name): tensor for name, tensor in adapter.tensors.items() if name not in lora}
    paths = {*lora.values(), *(name.rpartition(".")[0] for name in whole)}
    modules = dict(module.named_modules(remove_duplicate=False))
    missing = sorted(paths - modules.keys())
    if missing:
        raise UnknownNameError(
            "module",
            missing[0],
            filter(None, modules),
            hint=f"{len(missing)} of {len(paths)} modules of the adapter {adapter.directory} are not in this model",
        )
    for name, tensor in whole.items():
        _set(module, name, tensor)
    targets = sorted(set(lora.values()))
    for path in targets:
        if isinstance(weight := getattr(modules[path], "weight", None), Tensor):
            _set(module, f"{path}.weight", weight.detach())
    if targets:
        _merge_lora(module, targets, {name: adapter.tensors[name] for name in lora}, adapter)


def _merge_lora(module: nn.Module, targets: list[str], tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Merge LoRA matrices with peft; `requires_grad` of the parameters stays."""
    import peft

    for pattern in adapter.settings["alpha_pattern"] or ():
        for path in targets:
            matches(pattern, path)  # refuses what may never end
    # peft takes the first pattern that fits the end of a path.
    ranks = {
        re.escape(name.rpartition(".lora_")[0]): tensor.shape[0] if tensor.dim() else 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -len(item[0]))
        if ".lora_A" in name or ".lora_embedding_A" in name
    }
    if absent := [path for path in targets if re.escape(path) not in ranks]:
        raise CorruptError(f"the adapter {adapter.directory} lacks a matrix", expected=f"{absent[0]}.lora_A")
    r = max(ranks.values())
    rank_pattern = {path: rank for path, rank in ranks.items() if rank != r}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    given = {f"{_PREFIX}{name}": tensor.float() for name, tensor in tensors.items()}
    settings = {name: value for name, value in adapter.settings.items() if value is not None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = {"target_modules": "|".join(map(re.escape, targets)), "r": r, "rank_pattern": rank_pattern}
            wrapped = peft.get_peft_model(module, peft.LoraConfig(init_lora_weights=False, **chosen, **settings))
            loaded = peft.set_peft_model_state_dict(wrapped, given)
            if absent := [name for name in loaded.missing_keys if ".lora_" in name]:
                got = absent[0].removeprefix(_PREFIX)
                raise CorruptError(f"the adapter {adapter.directory} lacks a matrix", expected=got)
            if loaded.unexpected_keys:
                got = loaded.unexpected_keys[0].removeprefix(_PREFIX)
                raise UsageError(f"the adapter {adapter.directory} has a matrix that peft does not merge", got=got)
            wrapped.merge_and_unload()
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if not line.endswith(":")), repr(error))
        what = f"the adapter is for another model, or damaged: {adapter.directory}"
        raise UsageError(what, got=f"peft: {reason}") from error
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)


def _read_config(directory: Path) -> dict[str, Any]:
    raw = read_bytes(directory / CONFIG, most=_MAX_CONFIG_BYTES)
    parsed(raw, _Settings, directory / CONFIG, what=CONFIG, nonfinite=True)
    return parsed(raw, dict[str, Any], directory / CONFIG, what=CONFIG, nonfinite=True)


def _require_mergeable(path: Path, config: Mapping[str, Any]) -> None:
    def refuse(what: str, got: Any) -> None:
        hint = "merge it with peft (merge_and_unload), save, and give that"
        raise UsageError(f"the adapter {path} cannot be merged: {what}", got=str(got), hint=hint)

    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        refuse("only LoRA is", kind)
    initialization = config.get("init_lora_weights", True)
    if initialization not in _INITIALIZATIONS:
        refuse("its initialization changed the base, and that base is not stored", initialization)
    for name, value in config.items():
        if value and name not in _MEANINGLESS and name not in _Settings.__struct_fields__:
            refuse(f"the setting {name} is unknown", value)


def _set(root: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter, untied from modules that share it."""
    path, _, own = name.rpartition(".")
    module = root.get_submodule(path)
    old = getattr(module, own, None)
    if not isinstance(old, Tensor):
        raise UsageError(f"the adapter sets {name}, which this model does not have", got=type(module).__name__)
    if old.shape != value.shape:
        what = f"the adapter is for another model: {name}"
        raise UsageError(what, got=str(list(value.shape)), expected=str(list(old.shape)))
    value = value.to(old.dtype).contiguous()
    others = (other for other in root.modules() if other is not module)
    if own in module._parameters and any(p is old for other in others for p in other._parameters.values()):
        module._parameters[own] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
    else:
        old.data = value
