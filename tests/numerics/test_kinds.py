"""Two programs may keep one tensor in two kinds of numbers: values are compared, and the kinds are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.numerics.verdict import Reference

KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def reference(exact: Tensor) -> Reference:
    wide = exact.double() if exact.is_floating_point() else exact.cdouble() if exact.is_complex() else exact
    dtype = exact.dtype if exact.is_floating_point() or exact.is_complex() else torch.float32
    return Reference(wide, exact, [wide, wide], dtype=dtype, valid=None)


@pytest.mark.parametrize("ours", KINDS)
@pytest.mark.parametrize("theirs", KINDS)
def test_f66_every_pair_of_kinds_has_a_verdict(ours: torch.dtype, theirs: torch.dtype) -> None:
    flags = torch.tensor([[True, False, True], [False, False, True]])
    same = reference(flags.to(ours)).judge(flags.to(theirs))
    other = reference(flags.to(ours)).judge((~flags).to(theirs))
    assert same.verdict in ("identical", "rounding") and other.verdict == "wrong"
    kinds = [(one.is_floating_point, one.is_complex) for one in (ours, theirs)]
    if kinds[0] != kinds[1]:
        assert same.reason is not None and "where the baseline has" in same.reason


def test_f66_whole_numbers_are_no_floats_cut_off() -> None:
    assert reference(torch.tensor([1.7, -2.2])).judge(torch.tensor([1, -2])).verdict == "wrong"
    assert reference(torch.tensor([1, -2])).judge(torch.tensor([1.7, -2.2])).verdict == "wrong"


def test_f66_complex_numbers_are_judged_by_rounding_and_not_as_ties() -> None:
    exact = torch.randn(64, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    native = exact.to(torch.complex64)
    judged = Reference(exact, native, [native.cdouble()], dtype=torch.complex64, valid=None)
    assert judged.judge((exact * (1 + 2e-8)).to(torch.complex64)).verdict == "rounding"
    assert judged.judge(native * 1.01).verdict == "wrong"


class Cast(nn.Module):
    """A result, or what is in between, of a dtype."""

    def __init__(self, dtype: torch.dtype, *, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.dtype, self.inside = nn.Linear(4, 4), nn.Linear(4, 4), dtype, inside

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.first(x) * 4).to(self.dtype)
        if not self.inside:
            return hidden
        return self.last(hidden.abs().float() if hidden.is_complex() else hidden.float().abs())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.float32, torch.int64),
        (torch.bool, torch.float32),
        pytest.param(torch.complex64, torch.uint8, marks=pytest.mark.slow),
    ],
)
def test_f66_other_kinds_of_results_and_between(ours: torch.dtype, theirs: torch.dtype, inside: bool) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    models = [Cast(dtype, inside=inside).eval() for dtype in (ours, theirs)]
    result = check(models[0], candidate=models[1], inputs={"x": x}, min_coverage=0)
    assert not result.ok and result.standing == "results differ"
    assert check(models[0], candidate=Cast(ours, inside=inside).eval(), inputs={"x": x}, min_coverage=0).ok


class Masked(nn.Module):
    """Returns its mask beside what it masks."""

    def __init__(self, dtype: torch.dtype, *, hides: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.last, self.dtype, self.hides = nn.Embedding(9, 4), nn.Linear(4, 4), dtype, hides

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        mask = (ids != self.hides).to(self.dtype)
        x = self.embed(ids)
        x = torch.where(mask[..., None], x, 0.0) if self.dtype is torch.bool else x * mask[..., None].to(x.dtype)
        return {"y": self.last(x), "mask": mask}


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_f65_a_mask_of_zeros_and_ones_is_one_of_bools(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3, 4, 1], [2, 1, 5, 0]])
    ours = Masked(torch.bool).eval()
    assert check(ours, candidate=Masked(dtype).eval(), inputs={"ids": ids}, min_coverage=0).ok
    wrong = check(ours, candidate=Masked(dtype, hides=1).eval(), inputs={"ids": ids}, min_coverage=0)
    assert not wrong.ok and wrong.standing == "results differ"


class Conjugated(nn.Module):
    """A conjugate, which torch only marks as one, inside and as a result."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x)
        made = (spectrum * torch.fft.rfft(x.flip(-1)).conj())[..., : self.bins]
        return torch.fft.irfft(made, n=x.shape[-1]), made.conj()


def test_conjugates_are_judged_in_both_parts() -> None:
    inputs = {"x": torch.randn(3, 12, generator=torch.Generator().manual_seed(1))}
    assert check(Conjugated(7), candidate=Conjugated(7), inputs=inputs).ok
