"""A sample of the corpus: legitimate variants raise no alarm, planted mistakes are found and the guilty op is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.fx import Node

from tests.corpus import corpus
from tests.corpus.corpus import Bench
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Mutant, plant
from tests.corpus.families import FAMILIES, make_bench
from tests.corpus.mistakes.catalog import MISTAKES
from tests.corpus.mistakes.compiler_bugs import COMPILER_BUGS, built_with_bug
from tests.corpus.mistakes.random_mistakes import RANDOM_MISTAKES
from tests.corpus.mistakes.source import SOURCE_MISTAKES, plant_in_source
from tests.corpus.places import aten
from tests.corpus.right import implementations
from tests.corpus.right.rewrites import REWRITES
from tests.corpus.right.variations import VARIATIONS
from tests.corpus.truth import find_guilt, is_equivalent

SAMPLE = (
    "rope_sign",
    "positions_late",
    "cache_wrong_slot",
    "cache_stale_in_decode",
    "cache_oldest_lost_in_decode",
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
    assert len(FAMILIES) >= 6


@pytest.mark.parametrize(
    ("dtype", "share"),
    [("bfloat16", 16), *(pytest.param(dtype, 1, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16"))],
)
def test_legitimate_variants_raise_no_alarm(dtype: str, share: int) -> None:
    made = bench("llama", dtype)
    sides = [corpus.varied(made, made.program, variation) for variation in VARIATIONS]
    rewrites = [rewrite for rewrite in REWRITES[::share] if rewrite.name != "bias apart"]  # a llama has none
    rewritten = [plant(made.program, rewrite, "") for rewrite in rewrites]
    sides += [corpus.varied(made, mutant.program, VARIATIONS[-1]) for mutant in rewritten]
    sides += [implementations.RowsApart(made), *implementations.other_attention(made)]
    names = [*(variation.name for variation in VARIATIONS), *(rewrite.name for rewrite in rewrites)]
    names += ["rows apart", "eager attention", "eager attention, untouched"]
    rows = corpus.rows_of_legitimate(made, names, sides)
    assert not [row for row in rows if row.is_found]
    assert any(row.verdict == "rounding" and row.largest > 0.1 for row in rows), "nothing varied"


@pytest.mark.parametrize(
    ("execution", "dtype"),
    [("interpreted", "bfloat16"), pytest.param("everything", "bfloat16", marks=pytest.mark.slow)],
)
def test_mistakes_are_found_and_the_op_is_named(execution: str, dtype: str) -> None:
    made = bench("llama", dtype)
    sample = SAMPLE[::4] if execution == "interpreted" else SAMPLE
    planted, left_out = corpus.plant_all(made, [named(name) for name in sample])
    assert len(planted) >= len(sample) - 1, left_out
    if execution == "interpreted":
        sides = [corpus.interpreted(made, item.mutant.program) for item in planted]
    else:
        sides = [corpus.varied(made, item.mutant.program, VARIATIONS[-1]) for item in planted]
    rows = corpus.rows_of_mistakes(made, planted, execution, sides)
    assert not [row for row in rows if not row.is_found or not row.is_exact]


def test_a_cache_that_slides_is_compared_by_its_slots() -> None:
    """Layers with a window shorter than the prompt keep the newest keys only, the program keeps all."""
    rows = corpus.rows_of_legitimate(bench("gemma2", "float32"), [], [])
    assert [row.is_found for row in rows] == [False]


@pytest.mark.parametrize("kind", ["source_statistics_swapped", "source_kernel_mirrored", "source_bias_forgotten"])
def test_mistakes_in_the_source_of_other_architectures(kind: str) -> None:
    made = bench("resnet", "bfloat16")
    mistakes = [mistake for mistake in SOURCE_MISTAKES if mistake.name == kind]
    planted, left_out = corpus.plant_all(made, mistakes, planter=plant_in_source)
    assert len(planted) == 1, left_out
    (row,) = corpus.rows_of_mistakes(made, planted, "", [corpus.interpreted(made, planted[0].mutant.program)])
    assert row.is_found and row.is_exact and not row.num_extra


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bug"), [("resnet", COMPILER_BUGS[0]), ("mamba", COMPILER_BUGS[1])])
def test_bugs_of_the_compiler_are_found_in_a_real_engine(family: str, bug: object, tmp_path: Path) -> None:
    made = bench(family, "float32")
    with ExitStack() as stack:
        item, side = built_with_bug(made, bug, [made.case], tmp_path / "engine", stack)  # type: ignore[arg-type]
        (row,) = corpus.rows_of_mistakes(made, [item], "inductor", [side])
    assert row.is_found and row.is_exact and not row.num_extra


@pytest.mark.slow
def test_torch_compile_raises_no_alarm() -> None:
    made = bench("vit", "float16")
    rows = corpus.rows_of_legitimate(made, ["torch.compile"], [implementations.TorchCompiled(made)])
    assert [row.is_found for row in rows] == [False, False] and rows[1].verdict == "rounding"


def test_truth_names_the_op_that_was_changed_and_the_step() -> None:
    made = bench("llama", "float32")
    stale = plant(made.program, named("cache_stale_in_decode"), "")
    guilt = find_guilt(made.program, stale, made.inputs)
    assert [node.split("_")[0] for node in guilt.nodes] == ["index"] and list(guilt.nodes.values()) == [1]


def test_an_edit_without_effect_has_no_guilt() -> None:
    made = bench("llama", "float32")
    clean = Mutant(named("rope_sign"), made.program, {node.name: node.name for node in made.program.graph.nodes})
    assert not find_guilt(made.program, clean, made.inputs).nodes


def keys_moved(e: Edit) -> None:
    """The same vector is added to every key: no softmax can tell."""
    e.feed(e.find("scaled_dot_product_attention")[-1], 1, lambda key: e.call(aten.add.Tensor, key, 0.5))


def keys_moved_once(e: Edit) -> None:
    """The same, to the first key only."""

    def make(key: Node) -> Node:
        first = e.call(aten.add.Tensor, e.call(aten.slice.Tensor, key, 2, 0, 1), 0.5)
        return e.call(aten.slice_scatter.default, key, first, 2, 0, 1)

    e.feed(e.find("scaled_dot_product_attention")[-1], 1, make)


@pytest.mark.parametrize(("edit", "expected"), [(keys_moved, True), (keys_moved_once, False)])
def test_edits_without_effect_are_no_mistakes(edit: Callable[[Edit], None], expected: bool) -> None:
    made = bench("llama", "float32")
    mutant = plant(made.program, Mistake("moved", "graph", edit), "")
    assert is_equivalent(made.program, mutant, made.inputs) is expected


def test_a_loss_of_precision_is_not_nothing_in_float64() -> None:
    made = bench("llama", "float32")
    mutant = plant(made.program, named("operand_bfloat16"), "")
    assert not is_equivalent(made.program, mutant, made.inputs)


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


def test_an_effect_within_the_rounding_bound_is_beneath_what_values_can_show() -> None:
    made = bench("llama", "bfloat16")
    scaled = [plant(made.program, scaled_in_float32(factor), "") for factor in (1 + 2.0**-9, 1.1)]
    planted = [corpus.Planted(mutant, find_guilt(made.program, mutant, made.inputs)) for mutant in scaled]
    sides = [corpus.interpreted(made, item.mutant.program) for item in planted]
    rows = corpus.rows_of_mistakes(made, planted, "", sides)
    assert [row.is_beneath for row in rows] == [True, False]
    assert rows[0].effect <= 1 < rows[1].effect and not rows[0].is_found and rows[1].is_found


def test_a_program_without_a_place_for_a_mistake_says_so() -> None:
    with pytest.raises(DoesNotApply):
        plant(bench("llama", "float32").program, named("router_not_renormalized"), "")
