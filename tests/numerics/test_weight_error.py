"""Quantization or a mistake: rounding and compensated rounding raise no alarm, every planted mistake is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glassengine.numerics.weight_error import WeightError, judge_weight
from glassengine.program.loading.quantized_grid import float8_grid, integer_grid
from tests.quantized import compensated, round_to_nearest

GROUP = 32
SIZES = [(64, 64), (96, 256), (32, 512)]


def matrix(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / math.sqrt(inputs)


def activations(inputs: int) -> Tensor:
    """Return inputs that are correlated, as real ones are: what makes compensation go far."""
    generator = torch.Generator().manual_seed(9)
    mixed = torch.randn(256, inputs // 8, generator=generator) @ torch.randn(inputs // 8, inputs, generator=generator)
    return mixed + 0.1 * torch.randn(256, inputs, generator=generator)


def value(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = codes.reshape(*scale.shape, -1).double() - zero.double()[..., None]
    return (groups * scale.double()[..., None]).flatten(1)


def step(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    steps = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return torch.where((codes == 0) | (codes == (1 << bits) - 1), -steps, steps).bfloat16()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_rounding_is_no_mistake(size: tuple[int, int], bits: int) -> None:
    weight = matrix(*size)
    for symmetric in (False, True):
        codes, scale, zero = round_to_nearest(weight, bits, GROUP, symmetric=symmetric)
        found = judge_weight(weight, value(codes, scale, zero), step(codes, scale, bits))
        assert not found.mistakes, (symmetric, found)
        assert 0.25 < found.rms_steps < 0.35
        assert found.num_groups == pytest.approx(size[0] * size[1] / GROUP, rel=0.05)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("size", SIZES[:2])
def test_errors_that_make_up_for_one_another_are_no_mistake(size: tuple[int, int], bits: int) -> None:
    weight = matrix(*size)
    codes, scale, zero = compensated(weight, activations(size[1]), bits, GROUP)
    found = judge_weight(weight, value(codes, scale, zero), step(codes, scale, bits))
    assert not found.mistakes, found
    assert found.max_steps is not None and found.max_steps > 1 and found.rms_steps > 0.3


def test_groups_that_were_sorted() -> None:
    """With act-order the inputs of a group lie anywhere."""
    weight = matrix(64, 256)
    codes, scale, zero = round_to_nearest(weight, 4, GROUP)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    found, steps = value(codes, scale, zero)[:, order], step(codes, scale, 4)[:, order]
    assert not judge_weight(weight[:, order], found, steps).mistakes
    one = zero.clone()
    one[5, 3] += 1
    wrong = judge_weight(weight[:, order], value(codes, scale, one)[:, order], steps)
    assert [hint.evidence for hint in wrong.mistakes] == ["wrong zero"]


def shuffled(codes: Tensor, order: tuple[int, ...], axis: int) -> Tensor:
    index = torch.arange(codes.shape[axis]).reshape(-1, 8)[:, list(order)].flatten()
    return codes.index_select(axis, index)


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
Plant = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
PLANTED: dict[str, tuple[Plant, str, str]] = {
    "zero": (lambda q, s, z: (q, s, z + 1), "wrong zero", r"of .* groups are moved by -1(\.0\d)? steps"),
    "one zero": (lambda q, s, z: (q, s, z + one_of(z)), "wrong zero", r"^1 of .* groups are moved by -"),
    "scale": (lambda q, s, z: (q, s * 2, z), "wrong scale", r"groups are (2|1\.9\d) times what they should be"),
    "scale by 20 %": (lambda q, s, z: (q, s * 1.2, z), "wrong scale", r"1\.\d+ times"),
    "AWQ's order": (lambda q, s, z: (shuffled(q, AWQ, 1), s, z), "packing order", "inputs .* AWQ's packing order"),
    "AWQ's order, outputs": (lambda q, s, z: (shuffled(q, AWQ, 0), s, z), "packing order", "outputs .* AWQ's packing"),
    "nibbles": (lambda q, s, z: (shuffled(q, (1, 0, 3, 2, 5, 4, 7, 6), 1), s, z), "packing order", "halves of each"),
    "groups": (lambda q, s, z: (q, s.flip(1), z), "scales of other groups", "scale of another group"),
    "groups transposed": (lambda q, s, z: (q, s.T.reshape(s.shape), z), "scales of other groups", "of another group"),
    "sign": (lambda q, s, z: (q, -s, z), "sign", "other sign"),
    "rows": (lambda q, s, z: (q.roll(1, 0), s.roll(1, 0), z.roll(1, 0)), "not its values", "correlation"),
}


def one_of(z: Tensor) -> Tensor:
    one = torch.zeros_like(z)
    one[3, 1] = 1
    return one


@pytest.mark.parametrize("how", ["rounded", "compensated"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_named(name: str, how: str) -> None:
    weight = matrix(96, 256)
    rounded = (
        round_to_nearest(weight, 4, GROUP) if how == "rounded" else compensated(weight, activations(256), 4, GROUP)
    )
    plant, kind, text = PLANTED[name]
    codes, scale, zero = plant(*rounded)
    found = judge_weight(weight, value(codes, scale, zero), step(codes, scale.abs(), 4))
    assert found.mistakes and found.mistakes[0].evidence == kind, found
    assert re.search(text, found.mistakes[0].text), found.mistakes


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("name", ["zero", "scale", "AWQ's order", "sign"])
def test_planted_mistakes_of_other_widths(name: str, bits: int) -> None:
    weight = matrix(96, 256)
    plant, kind, _ = PLANTED[name]
    codes, scale, zero = plant(*round_to_nearest(weight, bits, GROUP))
    found = judge_weight(weight, value(codes, scale, zero), step(codes, scale.abs(), bits))
    assert found.mistakes and found.mistakes[0].evidence == kind, found


def judged(change: Callable[[Tensor], Tensor]) -> WeightError:
    weight, other = matrix(64, 64), matrix(64, 64, seed=1)
    codes, scale, zero = round_to_nearest(weight, 4, GROUP)
    return judge_weight(weight, change(value(codes, scale, zero)), step(codes, scale, 4), {"layers.1.k": other})


def test_another_weight_and_a_transposed_one() -> None:
    other = value(*round_to_nearest(matrix(64, 64, seed=1), 4, GROUP))
    found = judged(lambda _: other)
    assert (found.mistakes[0].evidence, found.mistakes[0].text) == ("another weight", "it is the weight layers.1.k")
    assert judged(lambda good: good.T).mistakes[0].evidence == "transposed"


def test_single_elements_and_numbers_that_are_none() -> None:
    def flip(good: Tensor) -> Tensor:
        bad = good.clone()
        bad[7, 9] = -bad[7, 9] + 1
        return bad

    found = judged(flip)
    assert found.mistakes[0].evidence == "single elements" and "1 of " in found.mistakes[0].text

    def spoil(good: Tensor) -> Tensor:
        bad = good.clone()
        bad[0, 0] = math.nan
        return bad

    assert judged(spoil).mistakes[0].evidence == "not a number"


def test_a_weight_that_was_trained_further_is_no_quantization() -> None:
    found = judged(lambda good: good + 0.6 * matrix(64, 64, seed=5))
    assert found.mistakes[0].evidence == "not its values" and "steps (rms)" in found.mistakes[0].text


def test_unquantized_parts_of_a_weight_do_not_count() -> None:
    weight = matrix(64, 64)
    codes, scale, zero = round_to_nearest(weight, 4, GROUP)
    steps, found = step(codes, scale, 4), value(codes, scale, zero).float()
    steps[:32], found[:32] = 0, weight[:32]
    assert not judge_weight(weight, found, steps).mistakes
    exact = judge_weight(weight, weight, steps)
    assert exact.rms_steps == 0 and exact.snr_db == math.inf and not exact.mistakes


@pytest.mark.parametrize("clip", [1.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_small_factor_of_the_whole_weight_is_a_mistake_where_steps_are_finer(dtype: torch.dtype, clip: float) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 2, 96)[:, None]
    limits = torch.iinfo(dtype) if dtype is torch.int8 else torch.finfo(dtype)
    scale = clip * weight.abs().amax(1, keepdim=True) / limits.max

    def made(factor: float) -> tuple[Tensor, Tensor]:
        codes = (factor * weight / scale).clamp(-limits.max, limits.max)
        if dtype is torch.int8:
            grid = integer_grid(codes.round(), scale, None, -127, 127)
        else:
            grid = float8_grid(codes.to(dtype), scale)
        return grid.weight(), grid.step()

    assert not judge_weight(weight, *made(1)).mistakes
    found = judge_weight(weight, *made(1.2 if dtype is torch.float8_e5m2 else 1.06)).mistakes
    assert found and found[0].evidence in ("wrong scale", "not its values")


def _of_blocks(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Round to nearest in blocks of 32 with a scale each, as served files do."""
    blocks = weight.reshape(len(weight), -1, 32)
    step = (2 * blocks.abs().amax(-1, keepdim=True) / levels).expand(blocks.shape)
    return ((blocks / step).round() * step).reshape(weight.shape), step.reshape(weight.shape)


@pytest.mark.parametrize(
    ("what", "levels"),
    [(what, levels) for what in ("1.02", "0.96", "rows", "offset") for levels in (15, 31, 254)] + [("0.98", 31)],
)
def test_f52_sums_show_what_is_within_every_step(what: str, levels: int) -> None:
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
    assert not judge_weight(weight, *_of_blocks(weight, levels)).mistakes
    other = weight.clone()
    if what == "rows":
        other[5:9] *= 1.1
    elif what == "offset":
        other += 0.15 * 2 * 2.5 / levels
    else:
        other *= float(what)
    found = judge_weight(weight, *_of_blocks(other, levels)).mistakes
    assert found and found[0].kind == ("other" if what == "offset" else "scale"), found
    wanted = {"rows": "(rows|groups) are 1.", "offset": "all of it is moved by"}.get(what, f"all of it is {what[:3]}")
    assert re.search(wanted, found[0].text)


@pytest.mark.parametrize("levels", [4, 8, 15])
def test_f52_a_quantizer_that_shrinks_by_its_noise_is_right(levels: int) -> None:
    """The least squares scale of each block makes all of it smaller, by the power of its noise."""
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(1))
    made, step = _of_blocks(weight, levels)
    blocks, own = made.reshape(-1, 32), weight.reshape(-1, 32)
    factor = (blocks * own).sum(1, keepdim=True) / blocks.square().sum(1, keepdim=True)
    fitted = (blocks * factor).reshape(weight.shape)
    assert not judge_weight(weight, fitted, step).mistakes
