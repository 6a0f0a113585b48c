"""The conformance checks find what they are for: each fault is planted in a back-end that is right otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from glassengine.backends.eager import EagerBackend
from glassengine.backends.protocol.backend import Run, Weights
from glassengine.program.export.export import export_causal_lm
from glassengine.program.representation.program import Program
from glassengine.testing import conformance, models

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Mapping[str, torch.Tensor], Tensors], Tensors]


class FaultyBackend(EagerBackend):
    """Runs the program right, then lets `fault` change what it took and returns."""

    name = "faulty"

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def load(self, directory: Path, weights: Weights | None) -> Run:
        run = super().load(directory, weights)
        return lambda inputs: self.fault(inputs, run(inputs))


@pytest.fixture(scope="module")
def program() -> Program:
    return export_causal_lm(models.llama(num_hidden_layers=1))


@pytest.fixture
def check(program: Program, tmp_path: Path) -> Callable[..., conformance.ConformanceReport]:
    def run(fault: Fault, **scenario: int) -> conformance.ConformanceReport:
        return conformance.check_generation(
            conformance.prepare(program, FaultyBackend(fault), tmp_path), num_decode_steps=1, **scenario
        )

    return run


def only(report: conformance.ConformanceReport) -> set[str]:
    assert not report.ok
    return {finding.what for finding in report.findings}


def test_a_right_backend_passes(check) -> None:
    report = check(lambda inputs, outputs: outputs)
    assert report.ok
    assert report.to_dict()["findings"] == []


def test_a_wrong_op_is_named(check, program) -> None:
    site = program.sites.get("model.layers.0.mlp/mul.0")

    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        outputs[f"dbg.{site.node}"] = outputs[f"dbg.{site.node}"] * 1.001
        return outputs

    assert only(check(fault)) == {site.name}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_found(check, value: float) -> None:
    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        outputs["logits"][0, 0] = value
        return outputs

    assert only(check(fault, batch=2, left_padding=2)) == {"lm_head/linear.0"}


def test_padded_positions_are_not_compared(check) -> None:
    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        if outputs["logits"].shape[1] > 1:
            outputs["logits"][1, :2] = float("nan")
        return outputs

    assert check(fault, batch=2, left_padding=2).ok


def test_a_wrong_dtype_is_found(check) -> None:
    report = check(lambda inputs, outputs: {**outputs, "logits": outputs["logits"].double()})
    assert "float64" in report.findings[0].problem


def test_a_slot_written_by_mistake_is_found(check) -> None:
    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        changed = outputs["present_value_0"].clone()
        changed[0, 0, -1, 0] += 1e-6
        return {**outputs, "present_value_0": changed}

    report = check(fault)
    assert "past_value_0" in only(report)
    assert any("does not write" in finding.problem for finding in report.findings)


def test_an_update_that_is_lost_is_found(check) -> None:
    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        return {**outputs, "present_key_0": inputs["past_key_0"].clone()}

    assert "past_key_0" in only(check(fault))


def test_a_changed_input_is_found(check) -> None:
    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        inputs["position_ids"].add_(1)
        return outputs

    assert "position_ids" in only(check(fault))


def test_results_that_the_next_step_overwrites_are_found(check) -> None:
    kept: list[torch.Tensor] = []

    def fault(inputs: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        logits = outputs["logits"]
        kept.append(torch.empty(logits.shape) if not kept else kept[0])
        outputs["logits"] = kept[0][:, : logits.shape[1]].copy_(logits)
        return outputs

    report = check(fault)
    assert only(report) == {"logits"}
    assert report.findings[0].step == 0


def test_checking_nothing_is_not_ok() -> None:
    assert not conformance.ConformanceReport(0, (), {}).ok


def test_models_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    one, two = models.gpt2(), models.gpt2()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not one.training
