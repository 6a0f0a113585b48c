"""Two recordings of training runs: the step where they part, and whether forward, backward or update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.cli.main import main


def trained(path: Path, mistake: str = "") -> Path:
    """Record three steps; the mistake is in the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for step in range(3):
            is_wrong = step == 1
            hook = None
            if is_wrong and mistake == "forward":
                hook = net[1].register_forward_hook(lambda module, args, result: result * 1.1)
            if is_wrong and mistake == "backward":
                hook = net[2].register_full_backward_hook(lambda module, made, given: (made[0] * 1.1,))
            optimizer.param_groups[0]["lr"] = 0.2 if is_wrong and mistake == "update" else 0.1
            optimizer.zero_grad()
            net(torch.ones(3, 4) * (step + 1)).square().mean().backward()
            optimizer.step()
            if hook is not None:
                hook.remove()
    return path


@pytest.mark.parametrize(
    ("mistake", "sites"),
    [
        ("forward", {"1"}),
        ("backward", {"1:grad_out", "2:in[0]:grad_in", "2:grad_in[0]"}),
        ("update", {"0.weight:param", "0.bias:param", "2.weight:param"}),
    ],
)
def test_the_step_where_two_runs_part(
    tmp_path: Path, mistake: str, sites: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    baseline, candidate = trained(tmp_path / "a"), trained(tmp_path / "b", mistake)
    result = glass.compare(baseline, candidate)
    found = result.first_divergence
    assert not result.ok and found is not None
    assert (found.step, found.level) == (1, mistake) and found.site in sites
    assert main(["compare", str(baseline), str(candidate)]) == 1
    assert f"first divergence: step 1, {mistake}, {found.site}" in capsys.readouterr().out


def test_two_runs_that_do_not_part(tmp_path: Path) -> None:
    result = glass.compare(trained(tmp_path / "a"), trained(tmp_path / "b"))
    assert result.verdict == "identical" and result.first_divergence is None


class Branches(nn.Module):
    """Two modules and a residual read one tensor; `copy` makes another one of it for each module."""

    def __init__(self, copy: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.copy = copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for_left, for_right = y, y
        if self.copy is not None:
            for_left, for_right = y.clone(), y.clone()
            if self.copy == "wrong":
                for_left.register_hook(lambda gradient: gradient * 1.5)
        residual = 0.5 * y if self.copy != "without residual" else 0
        y = self.left(for_left).tanh() + self.right(for_right).sigmoid() + residual
        return self.last(y + y.detach())


@pytest.mark.parametrize("copy", ["right", "wrong"])
def test_modules_that_have_a_share_of_a_gradient_each(copy: str, tmp_path: Path) -> None:
    """Modules that get copies, as those that convert their inputs, see their own share of the gradient alone."""

    def trained(path: Path, copy: str | None) -> Path:
        net = Branches(copy)
        with glass.record(net, path, gradients=True):
            net(torch.randn(3, 4, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        return path

    result = glass.compare(trained(tmp_path / "one", None), trained(tmp_path / "copies", copy))
    assert result.ok == (copy == "right"), result.first_divergence
    if copy == "right":
        shares = {pair.site for pair in result.pairs if pair.reason is not None}
        assert shares == {"left:grad_in[0]", "right:grad_in[0]"}
    else:
        # The sum is wrong where what made the tensor gets it.
        found = result.first_divergence
        assert found is not None and found.level == "backward"
        assert found.site in ("first:grad_out", "left:grad_in[0]", "right:grad_in[0]")
