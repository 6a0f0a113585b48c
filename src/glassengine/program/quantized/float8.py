"""8 bit floating weights with one scale per block, as DeepSeek-V3 and transformers' "fp8" write them.

weight float8_e4m3fn [O, I], weight_scale_inv [ceil(O / block), ceil(I / block)] (despite its name a factor)
weight = float8 * scale
"""

from __future__ import annotations

from glassengine.program.quantized.grid import expand, float8_grid
from glassengine.program.quantized.parts import Parts, Read, modules_with, require, rest


def read(parts: Parts) -> Read:
    """Yield every tensor of an "fp8" checkpoint by the name it has in the unquantized model."""
    size = parts.settings.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    used: set[str] = {name for name in parts.tensors if name.endswith(".activation_scale")}
    for module in modules_with(parts, "weight_scale_inv"):
        weight, scale = parts.of(module, "weight", "weight_scale_inv")
        require(weight.dtype.itemsize == 1 and weight.is_floating_point(), "this fp8 weight", weight.dtype, "float8")
        require(scale.dtype.itemsize > 1, "a scale of one byte (MXFP8)", scale.dtype, "float32 or bfloat16")
        used |= {f"{module}.weight", f"{module}.weight_scale_inv"}
        yield f"{module}.weight", float8_grid(weight, expand(scale, tuple(weight.shape), block))
    yield from rest(parts, used)
