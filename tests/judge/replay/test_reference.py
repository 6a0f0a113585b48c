"""The reference lanes: float64 is real, the noise is of the right size, caches are separate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glassengine.capture.observers import run_program
from glassengine.judge.cases import Case, StepInputs, empty_caches
from glassengine.judge.replay.reference import ReferenceRun
from glassengine.numerics.noise import rounds
from glassengine.numerics.verdict import Reference
from glassengine.program import Program, export_program, load_model
from glassengine.program.export.export import export_module
from glassengine.testing import models


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def program(family: str) -> Program:
    return export_program(load_model(models.CAUSAL_LMS[family]()))


@pytest.fixture
def case() -> Case:
    ids = torch.randint(3, 256, (1, 11), generator=torch.Generator().manual_seed(0))
    return Case("one", 3, input_ids=ids, attention_mask=torch.ones_like(ids))


def run(program: Program, case: Case, **options: Any) -> list[dict[str, Reference]]:
    lanes = ReferenceRun(program, **options)
    inputs = StepInputs.first(case)
    named = inputs.named() | empty_caches(program, inputs.named())
    steps: list[dict[str, Reference]] = []
    for step in range(case.num_steps):
        if step:
            inputs = inputs.following(torch.tensor([40 + step]))
            named = inputs.named()
        found: dict[str, Reference] = {}
        with torch.no_grad():
            lanes.step(named, lambda node, value, found=found: found.__setitem__(node.name, value), lambda n, v: None)
        steps.append(found)
    return steps


def test_the_exact_lane_is_the_model_in_float64(program: Program, case: Case, family: str) -> None:
    model = models.CAUSAL_LMS[family]()
    # Buffers that are not saved keep float32 precision in both.
    for _, parameter in model.named_parameters():
        parameter.data = parameter.data.double()
    logits = run(program, case)[0][program.output_nodes["logits"]].exact
    assert logits.dtype is torch.float64
    with torch.no_grad():
        native = run_native(program, case)
    assert 0 < float((logits - native.double()).abs().max()) < 1e-4, "float32 differs, by rounding only"
    again = run(program, case)[0][program.output_nodes["logits"]].exact
    assert torch.equal(logits, again)


def run_native(program: Program, case: Case) -> torch.Tensor:
    inputs = StepInputs.first(case).named()
    return run_program(program, inputs | empty_caches(program, inputs))["logits"]


def test_no_float32_value_is_left_in_the_exact_lane(program: Program, case: Case) -> None:
    for step in run(program, case):
        floating = [r.exact for r in step.values() if r.exact.is_floating_point()]
        assert floating and all(value.dtype is torch.float64 for value in floating)


def test_the_native_lane_is_the_interpreter_bit_for_bit(program: Program, case: Case) -> None:
    inputs = StepInputs.first(case)
    caches = empty_caches(program, inputs.named())
    for step, found in enumerate(run(program, case)):
        if step:
            inputs = inputs.following(torch.tensor([40 + step]))
        values: dict[str, Any] = {}
        outputs = run_program(
            program, inputs.named() | caches, lambda n, v, values=values: values.__setitem__(n.name, v)
        )
        caches = {past: outputs[present] for past, present in program.caches.items()}
        for name, reference in found.items():
            assert torch.equal(reference.native, values[name]), name


def test_a_second_float32_implementation_is_rounding_at_every_node(program: Program, case: Case) -> None:
    """Rounding must never be flagged, and the floor must not be vacuous either."""
    found = run(program, case)[0]
    logits = found[program.output_nodes["logits"]]
    spread = logits.exact.abs().mean()
    assert 1e-9 < logits.relative_floor < 1e-5
    shifted = (logits.exact + 40 * logits.relative_floor * spread).float()
    assert logits.judge(shifted).verdict == "wrong"


def test_a_coarser_candidate_widens_the_floor(program: Program, case: Case) -> None:
    node = program.output_nodes["logits"]
    fine = run(program, case)[0][node].relative_floor
    coarse = run(program, case, coarsest=torch.bfloat16)[0][node].relative_floor
    assert 1e-3 < coarse < 1e-1 and coarse > 1000 * fine


def test_which_ops_round(program: Program) -> None:
    by_op: dict[str, bool] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            by_op.setdefault(str(node.target).split(".")[1], rounds(node))
    assert by_op["linear"] and by_op["mul"] and by_op["rsqrt"]
    for name in ("view", "transpose", "cat", "neg", "embedding", "index_copy", "expand", "clone"):
        assert not by_op.get(name, False), name


class Steps(torch.nn.Module):
    """What a state space model makes of small steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(x).cumsum(-1) * 3


@pytest.mark.parametrize(("factor", "is_rounding"), [(1.0, True), (1.001, False)])
def test_an_exponential_written_out_is_rounding(factor: float, is_rounding: bool) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) - 6
    program = export_module(Steps().eval(), {"x": x})
    lanes, found = ReferenceRun(program), {}
    lanes.step({"x": x}, lambda node, value: found.__setitem__(node.name, value), lambda n, v: None)
    softplus, cumsum, last = (node.name for node in program.graph.nodes if node.op == "call_function")
    # Of small results this has few digits left: 1 + exp(x) is rounded.
    steps = torch.log(1 + torch.exp(x)) * factor
    values = {softplus: steps, cumsum: steps.cumsum(-1), last: steps.cumsum(-1) * 3}
    verdicts = {name: found[name].judge(value).verdict for name, value in values.items()}
    assert (set(verdicts.values()) == {"rounding"}) == is_rounding, verdicts
    assert is_rounding or "wrong" in verdicts.values()
