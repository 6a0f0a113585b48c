"""Weights that were scaled before they were quantized: factors are found, and those that nothing undoes are not."""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.numerics.rescaling import Factors, fit, is_undone_vector, undone


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors(size: int, seed: int) -> Tensor:
    return drawn(size, seed=seed).mul(0.5).exp()


def noisy(weight: Tensor) -> Tensor:
    return weight + 0.05 * weight.abs().mean() * drawn(*weight.shape, seed=99)


ONE = torch.ones(64, dtype=torch.float64)
NORM, MIDDLE = factors(64, 1), factors(96, 2)
UP, DOWN = drawn(96, 64, seed=3), drawn(64, 96, seed=4)


def test_factors_are_fitted_up_to_one_number() -> None:
    found = fit(UP, noisy(UP / MIDDLE[:, None] * NORM))
    assert found is not None
    product = found.rows[:, None] * found.columns
    assert torch.allclose(product, NORM / MIDDLE[:, None], rtol=0.1)
    assert torch.allclose(found.undone(found.scaled(UP)), UP)
    assert fit(UP, -UP) is None
    assert fit(UP, torch.zeros_like(UP)) is None


def pair() -> dict[str, Factors]:
    """A product after a norm, its rows undone by the columns of the next one."""
    up, down = fit(UP, noisy(UP / MIDDLE[:, None] * NORM)), fit(DOWN, noisy(DOWN * MIDDLE))
    assert up is not None and down is not None
    return {"up": up, "down": down}


def test_what_undoes_factors_is_found_by_its_values() -> None:
    norm = torch.rand(64, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.5
    assert undone(pair(), [(norm, norm / NORM)]).keys() == {"up", "down"}
    # Gemma's norms multiply by 1 + weight.
    assert undone(pair(), [(norm - 1, norm / NORM - 1)]).keys() == {"up", "down"}
    assert is_undone_vector(norm, norm / NORM, pair().values())
    assert not is_undone_vector(norm, norm * NORM, pair().values())


def test_factors_that_nothing_undoes_are_not_explained() -> None:
    norm = torch.ones(64, dtype=torch.float64)
    assert not undone(pair(), [])
    assert undone(pair(), [(norm, norm * NORM)]) == {}
    # A wrong scale of each row, with no layer behind that undoes it.
    alone = fit(DOWN, noisy(DOWN * factors(64, 8)[:, None]))
    assert alone is not None and undone({"down": alone}, [(norm, norm / NORM)]) == {}
    twice = fit(DOWN, noisy(DOWN * 2))
    assert twice is not None and undone({"down": twice}, [(norm, norm / NORM)]) == {}


def test_an_unknown_number_of_the_rows_is_not_taken_for_a_scale() -> None:
    found = undone({"none": Factors(torch.ones(96, dtype=torch.float64), ONE)}, [])
    assert found.keys() == {"none"}


def test_a_mistake_in_some_rows_is_no_scale_of_them() -> None:
    """Factors come from the weight that undoes them, so that what is wrong in this one stays to be seen."""
    norm = torch.ones(64, dtype=torch.float64)
    wrong = UP * NORM
    wrong[[3, 50]] *= 3
    fitted = fit(UP, noisy(wrong))
    assert fitted is not None and fitted.rows[3] > 2.5
    found = undone({"up": fitted, "other": fitted}, [(norm, norm / NORM)])["up"]
    assert torch.equal(found.rows, torch.ones(96, dtype=torch.float64))
    assert torch.allclose(found.columns, NORM)
