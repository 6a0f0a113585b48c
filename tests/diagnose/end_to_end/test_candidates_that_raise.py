"""A candidate that cannot run is an error about the candidate: what, where, and how far it was right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.errors import IncomparableError, UsageError
from glassengine.testing import models


class Net(nn.Module):
    """Two layers, with something in between that may raise."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu, *, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.weight.data *= gain
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


def raises(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("nothing here")


def too_wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], -1)


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "inputs.pt"
    torch.save({"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}, path)
    return str(path)


def test_an_exception_of_the_port(inputs: str) -> None:
    with pytest.raises(IncomparableError) as caught:
        check(Net(), candidate=Net(raises), inputs=inputs)
    assert caught.value.what == "the candidate cannot run: its forward raised in Net, in step 0"
    assert str(caught.value.got).startswith(f"KeyError: 'nothing here', raised at {__file__}:")
    assert caught.value.hint == "until then it is the baseline's: 1 module outputs, the last of them first"
    assert caught.value.exit_status == 4


def test_errors_before_the_exception_are_named(inputs: str) -> None:
    with pytest.raises(IncomparableError) as caught:
        check(Net(), candidate=Net(too_wide, gain=1.01), inputs=inputs)
    assert "raised in second" in caught.value.what
    assert "self.second(" in str(caught.value.got)
    assert caught.value.hint == "before that its first is not the baseline's any more"


@pytest.mark.slow
def test_a_decode_step_that_raises(token_ids: str) -> None:
    port = models.llama()
    attention = port.model.layers[1].self_attn  # type: ignore[union-attr, index]
    own = attention.forward

    def forward(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        if hidden_states.shape[1] == 1 and not torch.compiler.is_exporting():
            raise ValueError("one token")
        return own(hidden_states, *args, **kwargs)

    attention.forward = forward
    with pytest.raises(IncomparableError) as caught:
        check(models.llama(), candidate=port, inputs=token_ids, steps=1)
    assert caught.value.what.endswith("raised in model.layers.1.self_attn, in decode step 1")


def test_a_baseline_that_raises_is_not_a_bug_either(inputs: str) -> None:
    with pytest.raises(UsageError, match="KeyError: 'nothing here'") as caught:
        check(Net(raises), inputs=inputs)
    assert __file__ in str(caught.value)
