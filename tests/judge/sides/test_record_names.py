"""What the names of a dump mean: results by key, place or shape; what means nothing is listed with the nearest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import IncomparableError
from glassengine.results import Comparison


class Two(nn.Module):
    """Returns two results of two shapes; `output` is a module of it, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm_f, self.output, self.b = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.output(self.norm_f(x))
        return torch.tanh(h), torch.sigmoid(self.b(h))


class Named(Two):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        hidden, pooled = super().forward(x)
        return {"last_hidden_state": hidden, "pooler_output": pooled}


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def checked(net: nn.Module, tmp_path: Path, min_coverage: float = 0.0, **tensors: torch.Tensor) -> Comparison:
    np.savez(tmp_path / "dump.npz", x=X.numpy(), **{name: t.numpy() for name, t in tensors.items()})
    return glass.check(net.eval(), candidate=tmp_path / "dump.npz", min_coverage=min_coverage)


@pytest.mark.parametrize(
    ("net", "names", "method"),
    [
        (Two, ("output[0]", "output[1]"), "name"),
        (Two, ("output0", "output1"), "name"),
        (Two, ("out.0", "result_1"), "name"),
        (Two, ("hidden", "scores"), "shape"),
        (Named, ("last_hidden_state", "pooler_output"), "name"),
        (Named, ("a", "b_of_it"), "shape"),
    ],
)
def test_f47_results_of_a_dump_are_compared(
    tmp_path: Path, net: type[Two], names: tuple[str, str], method: str
) -> None:
    made = net().eval()(X)
    first, second = (one.detach() for one in (made.values() if isinstance(made, dict) else made))
    result = checked(net(), tmp_path, **{names[0]: first, names[1]: second})
    own = [one for one in result.results if one.rung == "record"]
    assert result.ok and [(one.candidate_name, one.method) for one in own] == [(name, method) for name in names]
    for wrong in ((first * 1.01, second), (first, second.flip(0))):
        result = checked(net(), tmp_path, **dict(zip(names, wrong, strict=True)))
        assert result.standing == "results differ", result.not_ok_because


def test_f47_without_a_result_nothing_is_ok(tmp_path: Path) -> None:
    net = Two().eval()
    with torch.no_grad():
        inside = {"norm_f": net.norm_f(X), "b": net.b(net.output(net.norm_f(X)))}
    result = checked(net, tmp_path, **inside)
    assert not result.ok and result.too_little and not result.results
    assert "no result of the candidate was compared" in str(result.not_ok_because)
    # One of the two results is there.
    with torch.no_grad():
        result = checked(net, tmp_path, **inside, output1=net(X)[1])
    assert not result.ok and "0" in str(result.not_ok_because)


def test_f47_a_name_of_a_module_and_of_a_result_is_taken_for_neither(tmp_path: Path) -> None:
    class One(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    net = One().eval()
    with torch.no_grad():
        norm, made = net.norm_f(X), net(X)
    assert checked(net, tmp_path, output=made).ok, "beside inputs alone it is the result"
    result = checked(net, tmp_path, output=made, norm_f=norm)
    assert result.too_little and any("names a module and a result" in item.reason for item in result.skipped)
    assert checked(net, tmp_path, **{"out.output": made, "norm_f": norm}).ok


def test_f63_what_is_missing_and_what_means_nothing_is_named(tmp_path: Path) -> None:
    net = Two().eval()
    with torch.no_grad():
        made = net(X)
        tensors = {"final_norm": net.norm_f(X), "proj.b": made[1] + 1, "output0": made[0], "output1": made[1]}
        tensors["proj.b"] = net.b(net.output(net.norm_f(X)))[:, :2]
    result = checked(net, tmp_path, 0.9, **tensors)
    assert result.too_little and result.results
    because = str(result.not_ok_because)
    assert "not in the record: norm_f, output, b" in because and "--map" in because
    reasons = [item.reason for item in result.skipped]
    assert any("final_norm names nothing in the baseline (nearest: norm_f)" in reason for reason in reasons)
    assert any(reason.startswith("proj.b names nothing") for reason in reasons)
    with torch.no_grad():
        all_of_it = {"norm_f": net.norm_f(X), "output": net.output(net.norm_f(X))}
        all_of_it |= {"b": net.b(all_of_it["output"]), "out.0": made[0], "out.1": made[1]}
    assert checked(net, tmp_path, 0.9, **all_of_it).ok


def test_f63_a_refusal_names_a_way_on(tmp_path: Path) -> None:
    with pytest.raises(IncomparableError, match="nothing in the record has a name") as refused:
        checked(Two(), tmp_path, final_norm=torch.zeros(5, 4))
    assert "norm_f" in str(refused.value.expected) and "--map" in str(refused.value.hint)
