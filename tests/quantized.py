"""Quantized checkpoints as the packages that make them write them: what reading and judging them is tested with.

Nothing here is shared with the code that reads: integers are packed bit by bit, as the documentation of a format says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Spoil = Callable[[str, dict[str, Tensor]], None]
"""Takes the name of a module and its tensors before they are written: the place for a mistake."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def round_to_nearest(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [O, I], scales and zeros [O, groups] of a matrix [O, I]; codes and zeros are unsigned.

    Args:
        weight: The matrix.
        bits: Of a code.
        group_size: Neighboring inputs with one scale.
        symmetric: Whether the zero is in the middle.
    """
    groups = weight.float().reshape(len(weight), -1, group_size)
    most = (1 << bits) - 1
    if symmetric:
        scale = groups.abs().amax(-1) * 2 / most
        zero = torch.full_like(scale, (most + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round()
    scale = scale.half().float()
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scale, zero.int()


def compensated(weight: Tensor, inputs: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what GPTQ makes of a matrix [O, I]: the error of an input's weights is made up for by the later ones.

    Args:
        weight: The matrix.
        inputs: [N, I], what the layer is calibrated on.
        bits: Of a code.
        group_size: Neighboring inputs with one scale.
    """
    work, wide = weight.double().clone(), inputs.double()
    hessian = wide.T @ wide
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes, scales, zeros = torch.zeros(weight.shape, dtype=torch.int32), [], []
    for column in range(weight.shape[1]):
        if column % group_size == 0:
            _, scale, zero = round_to_nearest(work[:, column : column + group_size], bits, group_size)
            scales.append(scale[:, 0])
            zeros.append(zero[:, 0])
        value = work[:, column]
        code = (value / scales[-1] + zeros[-1]).round().clamp(0, (1 << bits) - 1)
        codes[:, column] = code.int()
        error = (value - (code - zeros[-1]) * scales[-1]) / upper[column, column]
        work[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :][None]
    return codes, torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq_tensors(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, *, version: int = 1) -> dict[str, Tensor]:
    """Return the tensors of GPTQ for codes [O, I], scales and zeros [O, groups]."""
    stored = (zero - 1) % (1 << bits) if version == 1 else zero
    group = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
    return {
        "qweight": _packed(codes, bits).T.contiguous(),
        "qzeros": _packed(stored.T, bits),
        "scales": scale.T.half().contiguous(),
        "g_idx": group.int(),
    }


def awq_tensors(codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """Return the tensors of AWQ for 4 bit codes [O, I], scales and zeros [O, groups]."""

    def shuffled(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), -1, 8)[..., list(_AWQ_ORDER)].reshape(len(rows), -1)

    return {
        "qweight": _packed(shuffled(codes.T), 4),
        "qzeros": _packed(shuffled(zero.T), 4),
        "scales": scale.T.half().contiguous(),
    }


def compressed_tensors(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors' packed format for codes [O, I], scales and zeros [O, groups]."""
    return {
        "weight_packed": _packed(codes, bits),
        "weight_scale": scale,
        "weight_zero_point": _packed(zero.T, bits).T.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }


def torchao_tensors(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the tensors of torchao for unsigned codes [O, I], scales and zeros [O, groups]."""
    middle = 1 << bits - 1
    if bits == 4:
        signed = codes - middle
        both = (signed[:, 0::2] & 0xF) | ((signed[:, 1::2] & 0xF) << 4)
        added = (middle - zero).float() * scale
        return {"_weight_qdata": both.byte().view(torch.int8), "_weight_scale": scale.T, "_weight_zero_point": added.T}
    parts = {"qdata": (codes - middle).to(torch.int8), "scale": scale, "zero_point": (zero - middle).to(torch.int8)}
    return {f"_weight_{name}": tensor for name, tensor in parts.items()}


def nf4_tensors(weight: Tensor, block: int, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of bitsandbytes' NF4 for a matrix, and its value.

    Args:
        weight: The matrix.
        block: Neighboring elements with one scale.
        nested: Whether the scales are quantized, too.
    """
    table = torch.cat([torch.linspace(-1, 0, 8), torch.linspace(0, 1, 9)[1:]])
    flat = weight.flatten().reshape(-1, block)
    scale, codes = flat.abs().amax(1), torch.zeros(flat.shape, dtype=torch.uint8)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts: dict[str, Tensor] = {"weight.quant_map": table}
    stored = scale
    if nested:
        levels, offset = torch.linspace(-1, 1, 256), float(scale.mean())
        size = (scale - offset).abs().max()
        stored = ((scale - offset) / size - levels[:, None]).abs().argmin(0).byte()
        scale = levels[stored.long()] * size + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {"weight.nested_absmax": size.reshape(1), "weight.nested_quant_map": levels}
    for row in range(len(flat)):
        codes[row] = (flat[row] / scale[row] - table[:, None]).abs().argmin(0).byte()
    both = codes.flatten()
    parts |= {
        "weight": ((both[0::2] << 4) | both[1::2])[:, None],
        "weight.absmax": stored,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (table[codes.long()] * scale[:, None]).reshape(weight.shape)


def save_quantized(
    model: nn.Module,
    directory: Path,
    method: str,
    *,
    bits: int = 4,
    group_size: int = 32,
    version: int = 1,
    calibration: Mapping[str, Tensor] | None = None,
    spoil: Spoil | None = None,
) -> dict[str, Tensor]:
    """Write a model of transformers into `directory` with every matrix but the head quantized.

    Args:
        model: With `nn.Linear` layers.
        directory: Directory to make.
        method: "gptq", "awq", "compressed-tensors", "torchao", "bitsandbytes" or "fp8".
        bits: Of a code; AWQ has 4, torchao 4 or 8, bitsandbytes 4 (NF4).
        group_size: Neighboring inputs with one scale; of "fp8" the edge of a block.
        version: Of GPTQ.
        calibration: Module -> inputs [N, I]: its errors are compensated as in GPTQ.
        spoil: Plants a mistake.

    Returns:
        Name of each quantized weight -> what it should be read as, computed from the codes.
    """
    from safetensors.torch import save_file

    saved: Any = model
    saved.config.architectures = [type(model).__name__]
    saved.config.save_pretrained(directory)
    tensors, expected = {name: value.clone() for name, value in model.state_dict().items()}, {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = tensors.pop(f"{name}.weight")
        if method == "fp8":
            parts, expected[f"{name}.weight"] = _fp8(weight, group_size)
        elif method == "bitsandbytes":
            parts, expected[f"{name}.weight"] = nf4_tensors(weight, group_size, nested="mlp" in name)
        else:
            if calibration is not None and name in calibration:
                codes, scale, zero = compensated(weight, calibration[name], bits, group_size)
            else:
                codes, scale, zero = round_to_nearest(weight, bits, group_size)
            expected[f"{name}.weight"] = _value(codes, scale, zero)
            parts = _TENSORS[method](codes, scale, zero, bits, version)
        if spoil is not None:
            spoil(name, parts)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
    header = {"format": "pt"}
    if method == "torchao":
        kind, block = "Int4Tensor" if bits == 4 else "Int8Tensor", {"block_size": [1, group_size]}
        header |= {name: json.dumps({"_type": kind, "_data": block}) for name in expected}
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", header)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = _settings(method, bits, group_size, version)
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def _value(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = codes.reshape(*scale.shape, -1).double() - zero.double()[..., None]
    return (groups * scale.double()[..., None]).flatten(1).float()


def _fp8(weight: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    scale = torch.zeros(-(-weight.shape[0] // block), -(-weight.shape[1] // block))
    codes, value = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scale[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
            value[place] = codes[place].float() * scale[row, column]
    return {"weight": codes, "weight_scale_inv": scale}, value


def _packed(rows: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers along the last axis, least significant bit first."""
    single = ((rows.int()[..., None] >> torch.arange(bits)) & 1).flatten(1)
    whole = nn.functional.pad(single, (0, -single.shape[1] % 32)).to(torch.uint8).numpy()
    return torch.from_numpy(np.packbits(whole, axis=1, bitorder="little").view("<i4").copy())


_TENSORS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gptq": lambda codes, scale, zero, bits, version: gptq_tensors(codes, scale, zero, bits, version=version),
    "awq": lambda codes, scale, zero, bits, version: awq_tensors(codes, scale, zero),
    "torchao": lambda codes, scale, zero, bits, version: torchao_tensors(codes, scale, zero, bits),
    "compressed-tensors": lambda codes, scale, zero, bits, version: compressed_tensors(codes, scale, zero, bits),
}


def _settings(method: str, bits: int, group_size: int, version: int) -> dict[str, Any]:
    if method == "gptq":
        form = "gptq" if version == 1 else "gptq_v2"
        return {"quant_method": method, "bits": bits, "group_size": group_size, "checkpoint_format": form}
    if method == "awq":
        return {"quant_method": method, "bits": bits, "group_size": group_size, "version": "gemm", "zero_point": True}
    if method in ("torchao", "bitsandbytes"):
        return {"quant_method": method}
    if method == "fp8":
        return {"quant_method": method, "weight_block_size": [group_size, group_size], "activation_scheme": "dynamic"}
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": method, "format": "pack-quantized", "config_groups": groups}
