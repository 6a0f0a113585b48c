"""Quantized weights, in a checkpoint or in a module in memory: the parts of each, and the steps of its grid.

    weight = (codes - zero) * scale

The step of an element is the distance between the values next to it: what rounding to the grid may do to a weight is
half a step, except at the two ends, where it may be any amount.

Shape legend: O output features, I input features of a matrix [O, I], as in `torch.nn.Linear`.

    a tensor of a class of its own    torchao, quanto: `dequantize()`, codes and scales as its inner tensors
    a quantized tensor of torch       per tensor or per channel
    a module with packed parameters   torch.ao.nn.quantized: `weight()` and `bias()` are methods

The codes are those that values and scales say, so that a packed layout need not be known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from glassengine.errors import CorruptError, UsageError


@dataclass(frozen=True)
class Grid:
    """One quantized weight.

    Attributes:
        codes: Values in units of `scale`, as integers or floating numbers; of the shape of the weight.
        scale: Of each element, broadcastable to `codes`.
        zero: Code (in units of `scale`) of the weight 0, broadcastable to `codes`.
        low: The smallest code that there is.
        high: The largest.
        spacing: Distance of neighboring codes, broadcastable to `codes`.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    low: float
    high: float
    spacing: Tensor

    def weight(self) -> Tensor:
        """Return the weight, float32: exact for the codes and scales of every format that is read."""
        return (self.codes.float() - self.zero.float()) * self.scale.float()

    def step(self) -> Tensor:
        """Return the step of each element, float32; negative for elements at an end of the range."""
        step = (self.spacing.float() * self.scale.float().abs()).expand(self.codes.shape)
        codes = self.codes.float()
        return torch.where((codes <= self.low) | (codes >= self.high), -step, step)


def integer_grid(codes: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int) -> Grid:
    """Return the grid of equally spaced integers.

    Args:
        codes: Integers.
        scale: Broadcastable to `codes`.
        zero: Broadcastable to `codes`; None for 0.
        low: The smallest code.
        high: The largest.
    """
    none = torch.zeros((), dtype=torch.float32)
    return Grid(codes, scale, none if zero is None else zero, low, high, torch.ones(()))


def float8_grid(codes: Tensor, scale: Tensor) -> Grid:
    """Return the grid of 8 bit floating numbers, whose spacing grows with the number.

    Args:
        codes: float8_e4m3fn or float8_e5m2.
        scale: Broadcastable to `codes`.
    """
    info = torch.finfo(codes.dtype)
    values = codes.float()
    # Below the smallest normal number the spacing is constant.
    exponent = values.abs().clamp(min=info.smallest_normal).log2().floor()
    return Grid(values, scale, torch.zeros(()), -info.max, info.max, torch.exp2(exponent) * info.eps)


def table_grid(indices: Tensor, table: Tensor, scale: Tensor) -> Grid:
    """Return the grid of a table of values: NF4, FP4.

    Args:
        indices: Of the values, integers.
        table: Values in any order.
        scale: Broadcastable to `indices`.
    """
    values, order = table.float().sort()
    gaps = values.diff()
    # The larger of the gaps on the two sides of a value.
    widest = torch.maximum(torch.cat([gaps[:1], gaps]), torch.cat([gaps, gaps[-1:]]))
    spacing = torch.empty_like(widest)
    spacing[order] = widest
    low, high = float(values[0]), float(values[-1])
    return Grid(table.float()[indices], scale, torch.zeros(()), low, high, spacing[indices])


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned integers of `bits` bits that are packed along the last axis, least significant first.

    Integers may cross from one word into the next, as those of 3 bits do.

    Args:
        words: int32 [..., W].
        bits: 1 to 8.
        count: How many integers there are in a row; they must take all words.

    Returns:
        int32 [..., count].
    """
    if words.dtype is not torch.int32 or words.shape[-1] != -(-count * bits // 32):
        raise damaged(f"{count} integers of {bits} bits", words, f"int32 [..., {-(-count * bits // 32)}]")
    wide = words.to(torch.int64) & 0xFFFFFFFF
    start = torch.arange(count) * bits
    word, shift = start // 32, start % 32
    low = wide[..., word] >> shift
    following = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)]
    crosses = shift + bits > 32
    low = torch.where(crosses, low | (following << (32 - shift).clamp(max=31)), low)
    return (low & ((1 << bits) - 1)).to(torch.int32)


def expand(values: Tensor, shape: tuple[int, ...], block: tuple[int, ...] | None = None) -> Tensor:
    """Return `values`, one per block, repeated to `shape`.

    Args:
        values: One per block: along each axis as many as there are blocks, the last one may be cut off.
        shape: Of the weight.
        block: Sizes of a block; None takes what divides `shape` evenly.
    """
    values = values.reshape((*values.shape, *(1,) * (len(shape) - values.dim()))) if values.dim() <= 1 else values
    if values.dim() != len(shape):
        raise damaged("a scale per block", values, f"{len(shape)} dimensions")
    for axis, size in enumerate(shape):
        number = values.shape[axis]
        if number in (1, size):
            continue
        length = block[axis] if block is not None else size // max(number, 1)
        if length < 1 or -(-size // length) != number:
            raise damaged("a scale per block", values, f"blocks that divide {list(shape)}")
        values = values.repeat_interleave(length, dim=axis).narrow(axis, 0, size)
    return values


def damaged(what: str, tensor: Tensor, expected: str) -> CorruptError:
    """Return the error of a tensor that does not have the shape or dtype its format says."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return CorruptError(f"a quantized weight is damaged: {what}", got=f"{dtype}{list(tensor.shape)}", expected=expected)


Read = Iterator[tuple[str, Tensor | Grid]]


@dataclass(frozen=True)
class Parts:
    """What a format is given to read.

    Attributes:
        tensors: Name -> tensor of all files.
        settings: `quantization_config` of config.json.
        metadata: Strings of the headers of the safetensors files.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    metadata: Mapping[str, str]

    def of(self, module: str, *names: str) -> tuple[Tensor, ...]:
        """Return tensors of one module by their own names.

        Raises:
            CorruptError: One is missing.
        """
        missing = [name for name in names if f"{module}.{name}" not in self.tensors]
        if missing:
            raise CorruptError(f"the quantized weight of {module} lacks {', '.join(missing)}")
        return tuple(self.tensors[f"{module}.{name}"] for name in names)

    def maybe(self, module: str, name: str) -> Tensor | None:
        """Return a tensor of one module, or None."""
        return self.tensors.get(f"{module}.{name}")


def modules_with(parts: Parts, suffix: str) -> list[str]:
    """Return the modules that have a tensor of this name."""
    return [name.removesuffix(f".{suffix}") for name in parts.tensors if name.endswith(f".{suffix}")]


def rest(parts: Parts, used: set[str]) -> Read:
    """Yield the tensors that no quantized weight is made of."""
    for name, tensor in parts.tensors.items():
        if name not in used:
            yield name, tensor


def require(condition: bool, what: str, got: Any, expected: str) -> None:
    """Refuse a variant of a format that is not read.

    Raises:
        UsageError: `condition` does not hold.
    """
    if not condition:
        raise UsageError(f"{what} is not read", got=str(got), expected=expected, hint=ELSEWHERE)


def check_indices(indices: Tensor, number: int, what: str) -> Tensor:
    """Return `indices` as int64.

    Raises:
        CorruptError: One is outside of 0 to `number` - 1.
    """
    wide = indices.to(torch.int64)
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < number:
        raise CorruptError(f"{what} names a group that is not there", expected=f"0 to {number - 1}")
    return wide


ELSEWHERE = "dequantize it with its own package, call save_pretrained, and use that directory"


_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_NONE = ("none", "None")


@dataclass(frozen=True)
class QuantizedModule:
    """What a quantized module computes with.

    Attributes:
        weights: Name in the unquantized module -> value, float32; biases of packed modules too.
        steps: Name of each quantized weight -> step of each element, as `Grid.step`.
        rounds_inputs: Whether inputs of products are quantized too, as far as is known.
        method: Classes of the quantized tensors and modules, for people.
    """

    weights: Mapping[str, Tensor]
    steps: Mapping[str, Tensor]
    rounds_inputs: bool
    method: str


@torch.no_grad()
def quantized_module(module: nn.Module) -> QuantizedModule | None:
    """Return the quantized weights of a module; None where it has none whose grid is known."""
    weights: dict[str, Tensor] = {}
    steps: dict[str, Tensor] = {}
    rounds_inputs, kinds = False, dict[str, None]()
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for name, leaf in _tensors(part):
            found = _read(leaf)
            if found is None:
                continue
            weights[dot + name], steps[dot + name] = found
            kinds[type(part if _is_packed(part) else leaf).__qualname__] = None
            rounds_inputs |= _is_packed(part) or _rounds_inputs(leaf)
        if _is_packed(part) and isinstance(bias := part.bias(), Tensor):
            weights[f"{dot}bias"] = bias.detach().float()
    return QuantizedModule(weights, steps, rounds_inputs, ", ".join(kinds)) if steps else None


def _is_packed(part: nn.Module) -> bool:
    return hasattr(part, "_packed_params") and callable(getattr(part, "weight", None)) and callable(part.bias)


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters(recurse=False)
    yield from part.named_buffers(recurse=False)
    if _is_packed(part):
        weight = part.weight()  # type: ignore[operator]
        if isinstance(weight, Tensor):
            yield "weight", weight


def _read(leaf: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what a quantized tensor stands for, and its step; None where it is none, or of an unknown grid."""
    if leaf.is_quantized:
        value = leaf.dequantize().float()
        if leaf.qscheme() in _PER_CHANNEL:
            shape = [1] * leaf.dim()
            shape[leaf.q_per_channel_axis()] = -1
            return value, _step(value, leaf.q_per_channel_scales().float().reshape(shape))
        return value, _step(value, torch.tensor(leaf.q_scale()))
    if not is_traceable_wrapper_subclass(leaf) or not callable(getattr(leaf, "dequantize", None)):
        return None
    inner = dict(_inner(leaf))
    scale = next((t for name, t in inner.items() if "scale" in name and t.is_floating_point()), None)
    try:
        value = leaf.dequantize().float()
        if scale is None or value.shape != leaf.shape:
            return None
        scale = expand(scale.float(), tuple(leaf.shape))
        codes = next((t for t in inner.values() if t.is_floating_point() and t.itemsize == 1), None)
        if codes is not None:
            return value, float8_grid(codes, scale).step()
        return value, _step(value, scale)
    except (CorruptError, RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None


def _step(value: Tensor, scale: Tensor) -> Tensor:
    codes = (value / scale).round()
    return integer_grid(codes, scale.expand(value.shape), None, int(codes.min()), int(codes.max())).step()


def _inner(leaf: Any) -> Iterator[tuple[str, Tensor]]:
    names, _ = leaf.__tensor_flatten__()
    for name in names:
        tensor = getattr(leaf, name)
        if is_traceable_wrapper_subclass(tensor):
            yield from _inner(tensor)
        else:
            yield name, tensor


def _rounds_inputs(leaf: Tensor) -> bool:
    """Whether what a tensor says of itself names a type of activations."""
    if not is_traceable_wrapper_subclass(leaf):
        return False
    context: Any = leaf.__tensor_flatten__()[1]
    says = context.items() if isinstance(context, Mapping) else ()
    return any("act" in str(key) and value is not None and str(value) not in _NONE for key, value in says)
