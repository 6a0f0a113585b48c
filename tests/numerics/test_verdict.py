"""The noise-floor verdict: every alarm planted, every "rounding" able to fail."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics.judgement import SUSPICIOUS, relative_from, smallest_precise, unit_roundoff
from glassengine.numerics.verdict import Reference


def make(exact: torch.Tensor, *, noise: float = 1e-6, valid: torch.Tensor | None = None, seed: int = 0) -> Reference:
    generator = torch.Generator().manual_seed(seed)

    def noisy() -> torch.Tensor:
        return exact + noise * torch.randn(exact.shape, generator=generator, dtype=torch.float64)

    return Reference(exact, noisy().float(), [noisy(), noisy()], dtype=torch.float32, valid=valid)


@pytest.fixture
def exact() -> torch.Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def test_the_native_value_is_identical(exact: torch.Tensor) -> None:
    reference = make(exact)
    assert reference.judge(reference.native.clone()).verdict == "identical"


def test_noise_of_the_size_of_the_floor_is_rounding(exact: torch.Tensor) -> None:
    found = make(exact).judge(exact.float() + 1e-6 * torch.randn(exact.shape))
    assert found.verdict == "rounding"
    assert found.noise_ratio is not None and 0.3 < found.noise_ratio < SUSPICIOUS


def test_a_single_number_is_measured_within_a_limit() -> None:
    exact = torch.tensor(2.0, dtype=torch.float64)
    assert make(exact).measured(torch.tensor(2.0 + 1e-6), at_most=100.0).verdict == "rounding"


@pytest.mark.parametrize(("factor", "verdict"), [(6.0, "suspicious"), (30.0, "wrong")])
def test_larger_noise_is_flagged(exact: torch.Tensor, factor: float, verdict: str) -> None:
    candidate = (exact + factor * 1e-6 * torch.sign(exact)).float()
    assert make(exact, noise=1e-6).judge(candidate).verdict == verdict


def test_one_wrong_element_is_not_lost_in_the_mean() -> None:
    exact = torch.randn(4, 64, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = make(exact, noise=1e-6)
    candidate = reference.native.clone()
    candidate[2, 5, 7] += 1e-3
    found = reference.judge(candidate)
    assert found.verdict == "wrong"
    whole = float((candidate.double() - exact).square().mean().sqrt()) / 1e-6
    assert found.noise_ratio is not None and found.noise_ratio > 3 * whole


def test_shape_and_dtype_of_the_candidate(exact: torch.Tensor) -> None:
    found = make(exact).judge(exact[:, :5].float())
    assert found.verdict == "wrong" and "shape" in str(found.reason)
    assert make(exact).judge(exact).verdict == "rounding"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3e38])
def test_a_value_that_is_no_number_on_one_side_is_wrong(exact: torch.Tensor, value: float) -> None:
    reference = make(exact)
    candidate = reference.native.clone()
    candidate[0, 3, 2] = value
    found = reference.judge(candidate)
    assert found.verdict == "wrong" and "[0, 3, 2]" in str(found.reason)


def test_mask_sentinels_are_a_class_and_do_not_hide_other_errors(exact: torch.Tensor) -> None:
    exact = exact.clone()
    exact[:, :, 8:] = torch.finfo(torch.float32).min
    reference = Reference(exact, exact.float(), [exact, exact], dtype=torch.float32, valid=None)
    candidate = exact.float()
    for legitimate in (float("-inf"), torch.finfo(torch.float32).min * 0.999):
        candidate[:, :, 8:] = legitimate
        assert reference.judge(candidate).verdict == "rounding"
    for wrong in (float("inf"), float("nan"), -1e4):
        candidate[:, :, 8:] = wrong
        assert reference.judge(candidate).verdict == "wrong"
    candidate[:, :, 8:] = float("-inf")
    candidate[1, 2, 3] += 0.01
    assert reference.judge(candidate).verdict == "wrong"


@pytest.mark.parametrize(
    ("dtype", "hides"), [(torch.float32, -1e30), (torch.bfloat16, -1e30), (torch.float16, -65504.0)]
)
def test_what_hides_is_no_size_that_a_mistake_drowns_in(exact: torch.Tensor, dtype: torch.dtype, hides: float) -> None:
    """-1e30 beside scores was a number in float32: rounding of it was as large as any mistake."""
    exact = exact.clone()
    exact[:, :, 8:] = torch.tensor(hides).to(dtype).double()
    native = exact.to(dtype)
    reference = Reference(exact, native, [exact, native.double()], dtype=dtype, valid=None)
    assert reference.judge(native).verdict == "identical"
    candidate = native.clone()
    candidate[:, :, :8] *= 1.5
    assert reference.judge(candidate).verdict == "wrong"


def test_large_activations_of_float16_are_numbers(exact: torch.Tensor) -> None:
    exact = exact * 3e4 / exact.abs().max()
    reference = Reference(exact, exact.half(), [exact], dtype=torch.float16, valid=None)
    assert reference.judge((exact * 1.2).half()).verdict == "wrong"


def test_invalid_elements_do_not_count(exact: torch.Tensor) -> None:
    valid = torch.ones(2, 6, 1, dtype=torch.bool)
    valid[1, :3] = False
    reference = make(exact, valid=valid)
    candidate = reference.native.clone()
    candidate[1, :3] = float("nan")
    assert reference.judge(candidate).verdict == "identical"
    candidate[1, 3, 0] = 9.0
    assert reference.judge(candidate).verdict == "wrong"


def test_integers_and_bools_are_exact() -> None:
    exact = torch.arange(12).reshape(3, 4)
    reference = Reference(exact, exact, [exact], dtype=torch.int64, valid=None)
    assert reference.judge(exact.clone()).verdict == "identical"
    candidate = exact.clone()
    candidate[1, 1] = 0
    found = reference.judge(candidate)
    assert found.verdict == "wrong" and found.reason is not None and "1 of 12" in found.reason


def test_the_floor_of_a_site_is_remembered(exact: torch.Tensor) -> None:
    first = make(exact, noise=1e-5)
    one = torch.tensor([[0.5]], dtype=torch.float64)
    lucky = Reference(one, one.float(), [one, one], dtype=torch.float32, valid=None)
    candidate = (one + 3e-6).float()
    assert lucky.judge(candidate).verdict == "wrong"
    remembered = Reference(
        one, one.float(), [one, one], dtype=torch.float32, valid=None, relative_floor=first.relative_floor
    )
    assert remembered.judge(candidate).verdict == "rounding"


def test_a_few_large_elements_do_not_make_a_lucky_floor() -> None:
    """Cubes of normal values, one row, as after a decode step: legal rounding of another formula is never flagged."""
    worst = 0.0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = (2 * torch.randn(1, 1, 256, generator=generator)).double()
        exact = x**3

        def noisy(exact: torch.Tensor = exact, generator: torch.Generator = generator) -> torch.Tensor:
            return exact * (1 + 2.0**-24 * (2 * torch.rand(exact.shape, generator=generator) - 1))

        reference = Reference(exact, noisy().float(), [noisy(), noisy()], dtype=torch.float32, valid=None)
        single = x.float()
        found = reference.judge(single * single * single)
        worst = max(worst, found.noise_ratio or 0.0)
    assert worst < SUSPICIOUS


def test_empty_and_zero_tensors() -> None:
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert (
        Reference(empty, empty.float(), [empty], dtype=torch.float32, valid=None).judge(empty.float()).verdict
        == "identical"
    )
    zero = torch.zeros(2, 3, dtype=torch.float64)
    reference = Reference(zero, zero.float(), [zero], dtype=torch.float32, valid=None)
    assert reference.judge(zero.float()).verdict == "identical"
    assert reference.judge(torch.full((2, 3), 1e-3)).verdict == "wrong"


def test_roundoff_of_the_coarser_dtype_widens_the_floor(exact: torch.Tensor) -> None:
    candidate = exact.to(torch.bfloat16)
    fine = Reference(exact, exact.float(), [exact], dtype=torch.float32, valid=None)
    coarse = Reference(exact, exact.float(), [exact], dtype=torch.bfloat16, valid=None)
    assert fine.judge(candidate).verdict == "wrong"
    assert coarse.judge(candidate).verdict == "rounding"


@pytest.fixture(scope="module")
def gelu() -> tuple[Reference, torch.Tensor, torch.Tensor]:
    """A gelu in float16 of which half is tiny beside the rest, a bound of two roundings, and the tanh form."""
    x = (2 * torch.randn(64, 256, generator=torch.Generator().manual_seed(5))).half()
    exact = torch.nn.functional.gelu(x.double())
    native = torch.nn.functional.gelu(x)
    other = torch.nn.functional.gelu(x.double(), approximate="tanh").half()
    # 1 + erf(x) cancels in float32, and processors have other polynomials of erf.
    bound = 4 * unit_roundoff(torch.float16) * exact.abs() + 2.0**-21
    return Reference(exact, native, [], dtype=torch.float16, valid=None), bound, other


def test_errors_of_small_elements_are_not_lost_beside_large_ones(
    gelu: tuple[Reference, torch.Tensor, torch.Tensor],
) -> None:
    reference, bound, other = gelu
    alone = reference.measured(other)
    assert alone.noise_ratio is not None and alone.noise_ratio < 2, "the floor alone does not see it"
    assert reference.has_outliers(other)
    assert reference.judge_introduced(reference.native, bound).verdict != "wrong"
    found = reference.judge_introduced(other, bound)
    assert found.verdict == "wrong" and found.noise_ratio is not None and found.noise_ratio > 10
    assert found.bound_ratio is not None and found.bound_ratio > 2


def test_an_element_somewhat_beyond_its_bound_is_no_error(gelu: tuple[Reference, torch.Tensor, torch.Tensor]) -> None:
    """The bound is of first order: floor and bound must agree, here the floor has nothing to say."""
    reference, bound, _ = gelu
    candidate = reference.exact.clone()
    smallest = int(bound.abs().argmin())
    candidate.view(-1)[smallest] += 1.5 * bound.view(-1)[smallest]
    found = reference.judge_introduced(candidate, bound)
    assert found.verdict == "rounding" and found.bound_ratio is not None and found.bound_ratio > 1


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_rounding_near_zero_is_absolute(dtype: torch.dtype) -> None:
    least = relative_from(dtype)
    assert least >= torch.finfo(dtype).tiny
    for size in (0.3, 0.9, 1.1, 7.0):
        x = size * torch.finfo(dtype).tiny * torch.linspace(1, 2, 999, dtype=torch.float64)
        error = (x.to(dtype).double() - x).abs()
        assert bool((error <= torch.maximum(unit_roundoff(dtype) * x, torch.tensor(smallest_precise(dtype)))).all())


def test_a_step_of_numbers_near_zero_does_not_widen_the_floor_of_others() -> None:
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    nearly = Reference(6e-8 * x, (6e-8 * x).half(), [], dtype=torch.float16, valid=None)
    assert nearly.relative_floor == 0
    later = Reference(x, x.half(), [], dtype=torch.float16, valid=None, relative_floor=nearly.relative_floor)
    assert later.judge((1.02 * x).half()).verdict == "wrong"


def test_what_hangs_on_a_tie_may_be_any_number_but_no_nan(exact: torch.Tensor) -> None:
    tied = torch.zeros(exact.shape, dtype=torch.bool)
    tied[1, 2] = True
    native = exact.float()
    reference = Reference(exact, native, [], dtype=torch.float32, valid=None, tied=tied)
    candidate = native.clone()
    candidate[1, 2] = 7.0
    found = reference.judge(candidate)
    assert found.verdict == "rounding" and "16 of 192 elements" in str(found.reason)
    candidate[1, 2, 3] = torch.nan
    assert reference.judge(candidate).verdict == "wrong"
    candidate[1, 2, 3], candidate[1, 3, 3] = 7.0, 7.0
    assert reference.judge(candidate).verdict == "wrong"


def test_a_run_that_makes_another_number_of_rows_says_nothing_of_rounding(exact: torch.Tensor) -> None:
    rows = exact[0]
    runs = [rows + 1e-6, torch.cat([rows, rows[:1]])]
    reference = Reference(rows, rows.float(), runs, dtype=torch.float32, valid=None)
    assert reference.judge(rows.float() + 1e-6).verdict == "rounding"
    assert reference.judge(rows.float() * 1.1).verdict == "wrong"
