"""A sample of the corpus: legitimate variants raise no alarm, planted mistakes are found and the guilty op is named."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.fx import Node

from glassengine.testing import corpus
from glassengine.testing.corpus import Bench
from glassengine.testing.edits import DoesNotApply, Edit, Mistake, Mutant, plant
from glassengine.testing.families import make_bench
from glassengine.testing.mistakes import MISTAKES
from glassengine.testing.places import aten
from glassengine.testing.random_mistakes import RANDOM_MISTAKES
from glassengine.testing.rewrites import REWRITES
from glassengine.testing.truth import find_guilt
from glassengine.testing.variations import VARIATIONS

SAMPLE = (
    "rope_sign",
    "positions_late",
    "cache_wrong_slot",
    "cache_stale_in_decode",
    "mask_sees_one_more",
    "scale_missing",
    "repeat_order",
    "rms_epsilon_x1000",
    "epsilon_outside",
    "silu_to_gelu",
    "gate_up_swapped",
    "residual_from_norm",
    "last_token_lost",
    "not_a_number",
    "weight_exponent_bit",
    "weight_of_another",
    "random_3",
    "random_4",
)


@cache
def bench(family: str, dtype: str) -> Bench:
    torch.set_num_threads(1)
    return make_bench(family, dtype)


def named(name: str) -> Mistake:
    return next(mistake for mistake in MISTAKES if mistake.name == name)


def test_the_corpus_is_as_large_as_promised() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names)
    assert len(names) - len(RANDOM_MISTAKES) >= 60 and len(RANDOM_MISTAKES) >= 20


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_legitimate_variants_raise_no_alarm(dtype: str) -> None:
    made = bench("llama", dtype)
    sides = [corpus.varied(made, made.program, variation) for variation in VARIATIONS]
    rewritten = [plant(made.program, rewrite, "") for rewrite in REWRITES[::2]]
    sides += [corpus.varied(made, mutant.program, VARIATIONS[-1]) for mutant in rewritten]
    names = [*(variation.name for variation in VARIATIONS), *(rewrite.name for rewrite in REWRITES[::2])]
    rows = corpus.rows_of_legitimate(made, names, sides)
    assert not [row for row in rows if row.is_found]
    assert any(row.verdict == "rounding" and row.largest > 0.1 for row in rows), "nothing varied"


@pytest.mark.parametrize(("execution", "dtype"), [("interpreted", "bfloat16"), ("everything", "bfloat16")])
def test_mistakes_are_found_and_the_op_is_named(execution: str, dtype: str) -> None:
    made = bench("llama", dtype)
    sample = SAMPLE[::2] if execution == "interpreted" else SAMPLE[1::2]
    planted, left_out = corpus.plant_all(made, [named(name) for name in sample])
    assert len(planted) >= len(sample) - 1, left_out
    if execution == "interpreted":
        sides = [corpus.interpreted(made, item.mutant) for item in planted]
    else:
        sides = [corpus.varied(made, item.mutant.program, VARIATIONS[-1]) for item in planted]
    rows = corpus.rows_of_mistakes(made, planted, execution, sides)
    assert not [row for row in rows if not row.is_found or not row.is_exact]


def test_truth_names_the_op_that_was_changed_and_the_step() -> None:
    made = bench("llama", "float32")
    stale = plant(made.program, named("cache_stale_in_decode"), "")
    guilt = find_guilt(made.program, stale, made.inputs)
    assert [node.split("_")[0] for node in guilt.nodes] == ["index"] and list(guilt.nodes.values()) == [1]


def test_an_edit_without_effect_has_no_guilt() -> None:
    made = bench("llama", "float32")
    clean = Mutant(named("rope_sign"), made.program, {node.name: node.name for node in made.program.graph.nodes})
    assert not find_guilt(made.program, clean, made.inputs).nodes


def scaled_in_float32(factor: float) -> Mistake:
    """A product of half-precision values, scaled before its float32 result is rounded."""

    def edit(e: Edit) -> None:
        node = e.find("linear")[-1]

        def make() -> Node:
            wide = [e.call(aten._to_copy.default, arg, dtype=torch.float32) for arg in node.args]
            scaled = e.call(aten.mul.Tensor, e.call(aten.linear.default, *wide), factor)
            return e.call(aten._to_copy.default, scaled, dtype=torch.bfloat16)

        e.replace(node, make)

    return Mistake("scaled", "graph", edit)


@pytest.mark.parametrize(("factor", "is_below"), [(1 + 2.0**-11, True), (1 + 2.0**-6, False)])
def test_a_shift_below_half_a_unit_is_below_precision(factor: float, is_below: bool) -> None:
    made = bench("llama", "bfloat16")
    guilt = find_guilt(made.program, plant(made.program, scaled_in_float32(factor), ""), made.inputs)
    assert guilt.nodes and guilt.is_below_precision is is_below


def test_a_program_without_a_place_for_a_mistake_says_so() -> None:
    with pytest.raises(DoesNotApply):
        plant(bench("llama", "float32").program, named("router_not_renormalised"), "")
