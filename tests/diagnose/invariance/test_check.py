"""Planted dependences are named with operation and cause; what does not depend raises no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.diagnose.invariance import causes
from glassengine.errors import UnknownNameError, UsageError
from glassengine.results.without_tensors import Variation
from tests.diagnose.invariance import planted

BEYOND, WITHIN, UNDECIDED = "beyond rounding", "within rounding", "undecided"
PAST = causes.STATE
ARGUMENT = "an argument that depends on the change"
FUNCTION = "another function of the row"
INDICES = "other positions, indices or another mask"
# Variation, what is planted, verdict, operation, words of the cause.
ROWS = [
    ("run", "dropout", BEYOND, "bernoulli_", causes.RANDOM),
    ("run", "noise", BEYOND, "randn_like", causes.RANDOM),
    ("run", "random_of_python", BEYOND, "mul", causes.RANDOM),
    ("run", "random_of_numpy", BEYOND, "mul", causes.RANDOM),
    ("run", "counter", BEYOND, "mul", PAST),
    ("run", "running_mean", BEYOND, "mul_", PAST),
    ("run", "first_call", BEYOND, None, PAST),
    ("run", "last_row", BEYOND, "mul", PAST),
    # What lies in unwritten memory is chance: now and then it is the same in the run that looks at operations.
    pytest.param("run", "unwritten", BEYOND, "sum", causes.MEMORY, marks=pytest.mark.slow),
    pytest.param("run", "accumulated_in_unwritten", BEYOND, "mul", causes.MEMORY, marks=pytest.mark.slow),
    ("batch", "batch_norm", BEYOND, "mean", causes.MIXED),
    ("batch", "softmax_over_rows", BEYOND, "_softmax", causes.MIXED),
    ("batch", "number_of_rows", BEYOND, "mul", ARGUMENT),
    ("batch", "scale_of_the_tensor", BEYOND, "max", causes.MIXED),
    ("batch", "other_path", BEYOND, "gelu", ARGUMENT),
    ("batch", "capacity", BEYOND, "cumsum", ""),
    ("batch", "sum_over_rows", BEYOND, "cumsum", causes.MIXED),
    ("batch", "place_of_row", BEYOND, "mul", INDICES),
    ("batch", "sorted_rows", BEYOND, "sort", causes.MIXED),
    ("batch", "neighbor", BEYOND, "roll", causes.MIXED),
    ("batch", "product", WITHIN, "mm", causes.SHAPE),
    ("batch", "convolution", WITHIN, "convolution", causes.SHAPE),
    ("order", "sum_over_rows", BEYOND, "cumsum", causes.MIXED),
    ("order", "place_of_row", BEYOND, "mul", INDICES),
    ("order", "neighbor", BEYOND, "roll", causes.MIXED),
    ("cache", "first_call", BEYOND, "mean", PAST),
    ("cache", "running_mean", BEYOND, "mul_", PAST),
    ("cache", "last_row", BEYOND, "mul", PAST),
    ("threads", "threads_of_torch", BEYOND, "mul", ARGUMENT),
]
SENTENCES = [
    ("mean_with_padding", "masked", "mean", causes.PADDING),
    ("last_token", "masked", "mul", causes.PADDING),
    ("weak_mask", "masked", "_softmax", causes.PADDING),
    ("largest_with_padding", "masked", "amax", causes.PADDING),
    ("masked_mean", "plain", "embedding", INDICES),
]


def changed(module: nn.Module, what: str, inputs: Any) -> Variation:
    found = glass.check_invariant(module, invariant=[what], inputs=inputs)
    (change,) = found.changes
    assert found.ok == (change.verdict in ("bitwise", WITHIN))
    return change


def require(change: Variation, verdict: str, operation: str | None, cause: str) -> None:
    assert change.verdict == verdict, change
    assert change.first is not None and change.first.source is not None, change
    assert operation is None or change.first.name == operation, change.in_words()
    assert "planted.py" in change.first.source, change.first
    assert cause in (change.cause or ""), change


@pytest.mark.parametrize(("what", "name", "verdict", "operation", "cause"), ROWS)
def test_a_planted_dependence_of_rows_is_named(
    what: str, name: str, verdict: str, operation: str | None, cause: str
) -> None:
    change = changed(planted.Rows(getattr(planted, name)), what, planted.X)
    require(change, verdict, operation, cause)


@pytest.mark.parametrize(("pool", "positions", "operation", "cause"), SENTENCES)
def test_padding_that_is_read_is_named(pool: str, positions: str, operation: str, cause: str) -> None:
    module = planted.Sentences(getattr(planted, pool), positions=positions)
    require(changed(module, "padding", planted.IDS), BEYOND, operation, cause)


@pytest.mark.slow
def test_a_mean_over_the_padded_length_is_another_function() -> None:
    module = planted.Sentences(planted.mean_over_length)
    require(changed(module, "padding", planted.IDS), BEYOND, "mean", FUNCTION)


@pytest.mark.slow
def test_the_scalar_tail_of_a_loop_is_named_with_its_switch() -> None:
    change = changed(planted.Rows(planted.tail), "batch", planted.X)
    require(change, WITHIN, "rsqrt", causes.TAIL)
    assert change.switch is not None and "ATEN_CPU_CAPABILITY=default" in change.switch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "cause"), [("while_compiling", BEYOND, "Dynamo"), ("fused", WITHIN, "Inductor")]
)
def test_changes_by_a_compiler_are_named(name: str, verdict: str, cause: str) -> None:
    require(changed(planted.Rows(getattr(planted, name)), "compile", planted.X), verdict, "Rows", cause)


@pytest.mark.parametrize("what", ["run", "batch", "order", "cache", "threads"])
@pytest.mark.parametrize("name", ["identity", "norm"])
def test_independent_models_are_bitwise_equal(what: str, name: str) -> None:
    module = nn.Sequential(nn.LayerNorm(32), nn.ReLU()) if name == "norm" else nn.Sequential(nn.Identity())
    change = changed(module.eval(), what, {"input": planted.X["x"]})
    assert change.verdict == "bitwise" and change.num_variants > 0 and change.first is None


def test_the_module_and_the_seeds_are_left_as_they_were() -> None:
    module = planted.Rows(planted.counter)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    changed(module, "threads", planted.X)
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_change_that_a_model_has_not_is_refused() -> None:
    module = planted.Rows(planted.product)
    with pytest.raises(UsageError, match="--invariant length"):
        glass.check_invariant(module, invariant=["length"], inputs=planted.X)
    with pytest.raises(UsageError, match="--invariant padding"):
        glass.check_invariant(module, invariant=["padding"], inputs=planted.X)
    with pytest.raises(UnknownNameError, match="bacth"):
        glass.check_invariant(module, invariant=["bacth"], inputs=planted.X)


@pytest.mark.slow
def test_two_ranks_add_in_another_order(root: Path) -> None:
    (change,) = glass.check_invariant(str(root / "examples/tiny-llama"), invariant=["world"]).changes
    assert change.verdict == "within rounding" and change.num_tokens > 0 and "ranks" in (change.cause or "")


def test_a_result_without_rows_is_neither_alarm_nor_ok() -> None:
    change = changed(planted.Loss(), "batch", planted.X)
    assert change.verdict == UNDECIDED and change.num_variants == 0


def test_several_changes_point_to_a_subsystem() -> None:
    found = glass.check_invariant(planted.Rows(planted.last_row), invariant=["batch", "cache"], inputs=planted.X)
    assert found.subsystem is not None and "cache" in found.subsystem
    assert found.change("batch").verdict == "bitwise"
