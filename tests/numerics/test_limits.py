"""The limits of dtypes by name are those that torch has."""

from __future__ import annotations

import math

import pytest
import torch

from glassengine.numerics.limits import is_floating, limits
from glassengine.recording.layout.layout import STORED


@pytest.mark.parametrize("name", STORED)
def test_every_dtype_that_is_recorded_has_the_limits_and_the_size_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    assert STORED[name].num_bytes == dtype.itemsize
    assert is_floating(name) == dtype.is_floating_point
    if dtype.is_floating_point or dtype.is_complex:
        info = torch.finfo(dtype)
        found = limits(name)
        assert found == limits(dtype) and found[:2] == (info.eps, info.tiny) and found.largest in (info.max, math.inf)
    else:
        with pytest.raises(TypeError, match="not floating"):
            limits(name)
