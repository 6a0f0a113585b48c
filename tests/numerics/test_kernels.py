"""Errors of kernels: how they are kept, joined and allowed."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.float64 import Operation, Roundoff
from glassengine.numerics.kernels import SAFETY, KernelError, Kernels, joined


def test_unmeasured_errors_are_unknown() -> None:
    kernels = Kernels({"float32": {"sigmoid": KernelError(1e-7)}})
    assert kernels.error("sigmoid", torch.float32) == KernelError(1e-7)
    assert kernels.error("sigmoid", torch.float16) is None
    assert kernels.error("tanh", torch.float32) is None


def test_joined_kernels_are_as_coarse_as_the_coarsest() -> None:
    one = Kernels({"float32": {"sigmoid": KernelError(1e-7), "exp": KernelError(0.0, 1e-8)}}, "one 1")
    other = Kernels({"float32": {"sigmoid": KernelError(0.0, 1e-6)}, "float16": {"erf": KernelError(1e-4)}}, "two 2")
    both = joined([one, other])
    assert both.error("sigmoid", torch.float32) == KernelError(1e-7, 1e-6)
    assert both.error("erf", torch.float16) == KernelError(1e-4)
    assert both.about == "one 1, two 2"
    assert one.joined(Kernels()) is one
    assert Kernels.from_dict(both.to_dict()).to_dict() == both.to_dict()


@pytest.mark.parametrize(
    "damaged", [{"float32": {"exp": [2.0, 0, 0, 0, 0]}}, {"float32": {"exp": [-1e-7, 0, 0, 0, 0]}}]
)
def test_errors_that_no_kernel_has_are_refused(damaged: dict[str, dict[str, list[float]]]) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        Kernels.from_dict(damaged)


def test_the_bound_allows_twice_what_was_measured() -> None:
    x = torch.linspace(-12, 4, 9, dtype=torch.float64)
    operation = Operation("sigmoid", torch.sigmoid, (x,), {}, x.sigmoid())
    plain, wide = (rounding_bound(operation, Roundoff(2.0**-24, kernel=k)) for k in (KernelError(), KernelError(1e-7)))
    assert plain is not None and wide is not None
    torch.testing.assert_close(wide - plain, torch.full_like(x, SAFETY * 1e-7), rtol=1e-6, atol=0.0)


def test_measured_errors_replace_assumed_ones() -> None:
    x = torch.linspace(-3, 3, 9, dtype=torch.float64)
    operation = Operation("erf", torch.erf, (x,), {}, x.erf())
    assumed, measured = (rounding_bound(operation, Roundoff(2.0**-24, kernel=k)) for k in (None, KernelError()))
    assert assumed is not None and measured is not None
    assert bool((assumed > measured + 5e-7).all())
