"""What lies inside of a region, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.judge.cases import module_cases
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.replay.replay import covered
from glassengine.program import Program, export_program, load_model


class Root(nn.Module):
    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        spread = x.square().mean(-1, keepdim=True) + 0.1
        if self.written == "division":
            return {"y": (x / spread.sqrt()).tanh()}
        if self.written == "wrong division":
            return {"y": (x / (spread + 0.5).sqrt()).tanh()}
        return {"y": (x * spread.rsqrt()).tanh()}


def exported(written: str, inputs: list[dict[str, torch.Tensor]]) -> Program:
    return export_program(load_model(Root(written).eval()), inputs=inputs)


@pytest.mark.parametrize("written", ["division", "wrong division"])
def test_ops_that_the_candidate_lacks_are_inside_of_a_region(written: str) -> None:
    inputs = [{"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}]
    ours, theirs = exported("product", inputs), exported(written, inputs)
    pairs = pair_programs(ours, theirs, module_cases(inputs))
    found = {ours.sites.by_node[node][0].op: pair.candidate.op for node, pair in pairs.items()}
    assert "rsqrt" not in found and (found["mul"], found["tanh"]) == ("div", "tanh")
    inside = covered(ours, pairs)
    assert [(ours.sites.by_node[node][0].op, len(ends)) for node, ends in inside.items()] == [("rsqrt", 1)]


def test_a_result_is_never_inside() -> None:
    inputs = [{"x": torch.randn(3, 8)}]
    program = exported("product", inputs)
    everything = {site.node for site in program.sites if site.kind == "op"}
    assert covered(program, everything) == {}
    assert covered(program, everything - {program.output_nodes["y"]}) == {}
    assert covered(program, set()) == {}


def test_programs_of_the_same_ops_pair_without_being_run() -> None:
    inputs = [{"x": torch.randn(3, 8)}]
    pairs = pair_programs(exported("product", inputs), exported("product", inputs), [])
    assert {pair.method for pair in pairs.values()} == {"name+fingerprint"}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after((self.before(x) * 0.4 + 0.3).tanh())


class ByLogistic(Gated):
    """tanh(x) as 2 sigmoid(2 x) - 1: nothing between the two products has a counterpart."""

    factor = 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(2 * torch.sigmoid(self.before(x) * (2 * self.factor) + 0.6) - 1)


@pytest.mark.parametrize("factor", [0.4, 0.5])
def test_of_a_region_the_op_is_named_whose_mistake_makes_the_candidates_values(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"x": torch.randn(6, 8)}, tmp_path / "inputs.pt")
    baseline, port = Gated().eval(), ByLogistic().eval()
    port.load_state_dict(baseline.state_dict())
    port.factor = factor
    result = check(baseline, candidate=port, inputs=str(tmp_path / "inputs.pt"))
    # Other numbers before other ops are no evidence of a mistake.
    assert result.ok == (factor == 0.4), result.not_ok_because
    if factor != 0.4:
        first = result.first_divergence
        assert first is not None and (first.site, first.node) == ("./mul.0", "tanh")
        assert [hint.text for hint in first.hints] == ["factor of mul: 0.4 in the baseline, 0.5 in the candidate"]
