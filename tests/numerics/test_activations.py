import pytest
import torch

from glassengine.numerics.activations import READERS, ROUNDOFF


@pytest.mark.parametrize("kind", READERS)
def test_what_is_read_is_near_and_idempotent(kind: str) -> None:
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    read = READERS[kind](x)
    size = x.reshape(3, -1, 256).abs().amax(-1, keepdim=True).expand(3, 2, 256).reshape(3, 512)
    assert read.values.dtype is x.dtype
    assert ((read.values - x).abs() <= ROUNDOFF[kind] * size).all() and not torch.equal(read.values, x)
    # Tied elements are few, and their room is one step.
    assert (read.slack >= 0).all() and (kind == "Q8_1" or float((read.slack > 0).double().mean()) < 0.01)


@pytest.mark.parametrize("kind", READERS)
def test_zeros_stay(kind: str) -> None:
    read = READERS[kind](torch.zeros(2, 256))
    assert not read.values.any() and not read.slack.any()


def test_a_half_may_go_either_way() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 127.0, 2.5
    read = READERS["Q8_0"](x)
    assert read.values[0, 1] in (2.0, 3.0) and read.slack[0, 1] == 1.0 and read.slack[0, 0] == 0.0
