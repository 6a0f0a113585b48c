"""Logits of chosen tokens: equal to those of all, and left alone where a row is no token's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.capture.observers import run_program
from glassengine.judge.cases import Case, StepInputs, empty_caches
from glassengine.program.export.export import export_causal_lm
from glassengine.program.representation.kept_logits import KEPT, with_kept_logits
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import load_program, save_program
from glassengine.testing import models

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def program() -> Program:
    return export_causal_lm(models.llama())


def run(program: Program, kept: list[int] | None = None) -> torch.Tensor:
    named = StepInputs.first(Case("prompt", 1, input_ids=IDS, attention_mask=torch.ones_like(IDS))).named()
    more = {} if kept is None else {KEPT: torch.tensor(kept)}
    return run_program(program, {**named, **empty_caches(program, named), **more})["logits"]


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [3], [2, 0]])
def test_logits_are_those_of_the_kept_tokens(program: Program, kept: list[int]) -> None:
    found = run(with_kept_logits(program), kept)
    torch.testing.assert_close(found, run(program)[:, kept], rtol=1e-5, atol=1e-6)


def test_the_program_stays_as_it_is(program: Program) -> None:
    before = [str(node) for node in program.graph.nodes], program.inputs
    changed = with_kept_logits(program)
    assert ([str(node) for node in program.graph.nodes], program.inputs) == before
    assert (changed.inputs[-1].name, changed.inputs[-1].shape) == (KEPT, ("kept",))
    own = {name: value for name, value in changed.weights().items() if value is program.weights()[name]}
    assert own == changed.weights(), "weights are shared"


def test_a_program_from_a_file_has_a_size_of_its_own(program: Program, tmp_path: Path) -> None:
    weights = {**program.exported.state_dict, **program.exported.constants}
    save_program(program, tmp_path)
    loaded = load_program(tmp_path, weights)
    sizes = set(loaded.exported.range_constraints)
    changed = with_kept_logits(loaded)
    (size,) = changed.node(KEPT).meta["val"].shape
    numbered = size.node.shape_env.unique_ids
    assert size.node.expr not in sizes and numbered >= {int(str(symbol)[1:]) for symbol in sizes}
    torch.testing.assert_close(run(changed, [3]), run(program)[:, [3]], rtol=1e-5, atol=1e-6)


def exported(after: Any) -> Program:
    model = models.llama()
    forward = model.forward

    def changed(*args: Any, **given: Any) -> Any:
        found = forward(*args, **given)
        found.logits = after(found.logits)
        return found

    model.forward = changed
    return export_causal_lm(model)


def test_caps_of_logits_are_followed() -> None:
    program = exported(lambda logits: torch.tanh(logits / 30.0) * 30.0)
    torch.testing.assert_close(run(with_kept_logits(program), [1]), run(program)[:, [1]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "after",
    [
        lambda logits: logits - logits.mean(1, keepdim=True),
        lambda logits: logits.cumsum(1),
        lambda logits: logits.flatten(0, 1)[None],
    ],
)
def test_rows_that_are_not_of_one_token_are_left_alone(after: Any) -> None:
    program = exported(after)
    assert with_kept_logits(program) is program


def test_debug_outputs_before_the_head_have_every_token(program: Program) -> None:
    hidden = next(node for node in program.graph.nodes if node.name == program.output_nodes["logits"]).args[0].name
    observed = with_kept_logits(add_outputs(program, [hidden]))
    named = StepInputs.first(Case("prompt", 1, input_ids=IDS, attention_mask=torch.ones_like(IDS))).named()
    found = run_program(observed, {**named, **empty_caches(program, named), KEPT: torch.tensor([3])})
    assert (found[f"dbg.{hidden}"].shape[1], found["logits"].shape[1]) == (4, 1)
