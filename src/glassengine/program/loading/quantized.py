"""Quantized checkpoints, read without the packages that made them and dequantized.

    files       safetensors or weights-only PyTorch files of a checkpoint, sharded or not
    read        the format's own module: name -> tensor, or a `Grid` for a quantized weight
    load        the unquantized class of transformers takes the dequantized weights by their names

transformers needs a package of each format, most of which want a GPU; the formats themselves are a few lines each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.errors import GlassError, UsageError, logger
from glassengine.program.loading import quantized_formats
from glassengine.program.loading.checkpoint_files import (
    model_class_of,
    read_headers,
    read_tensors,
    weight_files,
    without_weights,
)
from glassengine.program.loading.quantized_grid import ELSEWHERE, Grid, Parts, Read, damaged
from glassengine.program.user_code.calls import without_bars
from glassengine.reading.documents import read_document

METHODS: dict[str, Callable[[Parts], Read]] = {
    "gptq": quantized_formats.read_gptq,
    "awq": quantized_formats.read_awq,
    "compressed-tensors": quantized_formats.read_compressed_tensors,
    "torchao": quantized_formats.read_torchao,
    "fp8": quantized_formats.read_fp8,
    "bitsandbytes": quantized_formats.read_bitsandbytes,
}
"""`quant_method` of config.json -> what reads such a checkpoint."""

MAX_CONFIG_BYTES = 10_000_000
_QUANTIZES_INPUTS = ("input_activations", "activation_scheme", "act_quant_kwargs", "activation_quantization")


def take_settings(config: Any) -> dict[str, Any] | None:
    """Remove and return the settings of the quantization from a configuration; None where there are none.

    Args:
        config: Of transformers, which describes the unquantized model afterwards.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    del config.quantization_config
    taken: dict[str, Any] = dict(settings if isinstance(settings, Mapping) else settings.to_dict())
    return taken


def load_quantized(
    model_class: Any, config: Any, settings: Mapping[str, Any], spec: str, dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Load a quantized checkpoint as the unquantized model that it stands for.

    Args:
        model_class: Class of transformers, automatic or plain.
        config: Configuration without the settings of the quantization.
        settings: What `take_settings` returned.
        spec: Directory or hub id.
        dtype: Of the model.
        options: As for `from_pretrained`, "revision" among them.

    Returns:
        The model, transformers' report on loading it, and JSON values that describe the quantization.

    Raises:
        UsageError: A format, or a variant of one, that is not read.
        CorruptError: A quantized weight does not have the shape its format says.
    """
    from transformers import GenerationConfig

    revision = options.pop("revision", "main")
    target = _Target.of(model_class, config, dtype, **options)
    weights: dict[str, Tensor] = {}
    number = 0
    for name, value in _reader(settings, spec, revision):
        weights[name] = target.placed(name, value.weight()).to(dtype) if isinstance(value, Grid) else value
        number += isinstance(value, Grid)
    described = {"method": settings.get("quant_method"), "num_weights": number}
    if not described["num_weights"]:
        raise UsageError(
            f"{spec} says it is quantized by {described['method']}, and holds no quantized weight",
            hint="remove quantization_config from its config.json, if it is not quantized",
        )
    logger.info("%s: %d weights are dequantized (%s)", spec, described["num_weights"], described["method"])
    if _quantizes_inputs(settings):
        logger.warning("%s also quantizes activations, which are not quantized here", spec)
    module, report = target.load(weights, dtype, **options)
    # Some packages give every matrix a bias of zeros; one that is none would be lost.
    biases = {f"{name.removesuffix('weight')}bias" for name in target.shapes if name.endswith(".weight")}
    lost = [name for name in report["unexpected_keys"] if name in biases and weights[name].any()]
    if lost:
        raise UsageError(f"{spec} has biases that its model has no place for", got=", ".join(lost[:3]))
    if hasattr(module, "generation_config"):
        # transformers reads it beside weights in files, not beside weights in a dict.
        with contextlib.suppress(OSError):
            module.generation_config = GenerationConfig.from_pretrained(spec, revision=revision)
    return module, report, described


def is_quantized(spec: Any) -> bool:
    """Whether `spec` is the directory of a quantized checkpoint."""
    if not isinstance(spec, (str, Path)) or not (path := Path(spec).expanduser() / "config.json").is_file():
        return False
    try:
        config = read_document(path, dict[str, Any], most=MAX_CONFIG_BYTES, nonfinite=True)
    except GlassError:
        return False
    return isinstance(config.get("quantization_config"), dict)


def quantization_steps(
    spec: str | Path, *, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> dict[str, Tensor]:
    """Return the step of every element of every quantized weight, by the name of the parameter of the model.

    They take the way that the weights take: experts of separate weights are stacked, names are changed.

    Args:
        spec: Directory of a quantized checkpoint.
        trust_remote_code: As for `load_model`.
        revision: As for `load_model`.
        options: As for `load_model`; they change no step.

    Returns:
        Name -> steps, bfloat16, of the shape of the parameter; negative at an end of the range, see `Grid.step`.

    Raises:
        UsageError: The checkpoint is not quantized.
    """
    from transformers import AutoConfig

    name, revision = str(spec), revision or "main"
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision)
    settings = take_settings(config)
    if settings is None:
        raise UsageError(f"{spec} is not quantized", expected="quantization_config in its config.json")
    target = _Target.of(model_class_of(config), config, torch.bfloat16, trust_remote_code=trust_remote_code)
    steps = {}
    for weight, value in _reader(settings, name, revision):
        step = target.placed(weight, value.step()) if isinstance(value, Grid) else torch.zeros(value.shape)
        steps[weight] = step.bfloat16()
    with without_bars():
        module, _ = target.load(steps, torch.bfloat16)
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.detach().any()}


def _reader(settings: Mapping[str, Any], spec: str, revision: str) -> Read:
    method = str(settings.get("quant_method"))
    if method not in METHODS:
        raise UsageError(
            f"{spec} is quantized in a format that is not read", got=method, expected=", ".join(METHODS), hint=ELSEWHERE
        )
    files = weight_files(spec, revision)
    if method == "torchao" and files[0].suffix != ".safetensors":
        raise UsageError(
            f"{spec} holds objects of torchao, which only its code can read",
            got=files[0].name,
            expected="safetensors",
            hint="save it again with torchao 0.15 or newer and safe_serialization",
        )
    return METHODS[method](Parts(read_tensors(files), settings, read_headers(files)))


@dataclass(frozen=True)
class _Target:
    """The class that takes the weights.

    Attributes:
        plain: The class.
        config: Its configuration.
        shapes: Name -> shape of what it has.
        transposed: Names of matrices that it keeps as [I, O]: GPT-2's Conv1D.
    """

    plain: Any
    config: Any
    shapes: Mapping[str, torch.Size]
    transposed: frozenset[str]

    @classmethod
    def of(cls, model_class: Any, config: Any, dtype: torch.dtype, **options: Any) -> _Target:
        # The automatic classes take weights from files only; what they would make is made once, without memory.
        empty = without_weights(model_class, config, dtype, **options)
        paths = [path for path, module in empty.named_modules() if type(module).__name__ == "Conv1D"]
        # A checkpoint of the model without its head has names without the prefix.
        names = [f"{path}.weight" for path in (*paths, *(path.partition(".")[2] for path in paths))]
        shapes = {name: parameter.shape for name, parameter in empty.named_parameters()}
        return cls(type(empty), config, shapes, frozenset(names))

    def placed(self, name: str, value: Tensor) -> Tensor:
        """Return a matrix [O, I] as the module of this name keeps it.

        Raises:
            CorruptError: It has another shape there.
        """
        value = value.T if name in self.transposed else value
        if name in self.shapes and self.shapes[name] != value.shape:
            raise damaged(f"{name} does not fit its model", value, str(list(self.shapes[name])))
        return value

    def load(self, weights: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model with these weights, and transformers' report on it."""
        options.pop("trust_remote_code", None)
        module, report = self.plain.from_pretrained(
            None, config=self.config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
        )
        return module, report


def _quantizes_inputs(settings: Any) -> bool:
    """Whether settings, at any depth, say that something else than weights is quantized as well."""
    if isinstance(settings, Mapping):
        return any(
            (key in _QUANTIZES_INPUTS and bool(value)) or _quantizes_inputs(value) for key, value in settings.items()
        )
    return isinstance(settings, (list, tuple)) and any(map(_quantizes_inputs, settings))
