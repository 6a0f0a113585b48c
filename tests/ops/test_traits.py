"""The claims of the table of ops, tried on torch: what an op moves, multiplies, chooses, draws and rounds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils import _pytree as pytree

from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops import traits
from glassengine.ops.row import NOTHING, OpTraits, Rounding, argument
from glassengine.ops.traits import TABLE, base_name, named, traits_of, traits_of_target

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, Z = numbers(3, 4), numbers(3, 4, seed=1), numbers(3, 4, seed=2)
IMAGE, KERNEL = numbers(2, 4, 6, 6), numbers(5, 4, 3, 3)
PLACES = torch.tensor([2, 0, 1])
SOME = X > 0

# Arguments that say what an op is for, tried in this order; ops that take none of them have calls of their own below.
USUAL: list[tuple[Any, ...]] = [
    (X,), (X, Y), (X, Y, Z), (X, 0.5), (X, 2), (X, 0), (X, [0]), (X, 0, 1), (X, 0, PLACES), (X, 1, 0, 2), (X, [1, 0]),
    (X, [3, 4]), (X, [2, 2]), (IMAGE,), (IMAGE, [3, 3]), (IMAGE, 2), (IMAGE, [1, 1, 1, 1]), ([X, Y],),
    (X, -1.0, 1.0), (X, SOME, 0.5), (SOME, X, Y), ([3, 4],), ([3, 4], 0.5), (5,), (X, [3, 4], 0.5), (X, 0, False),
]  # fmt: skip
OWN: dict[str, list[Call]] = {
    "addmm": [(aten.addmm.default, (numbers(5), X, numbers(4, 5)))],
    "addmv": [(aten.addmv.default, (numbers(3), X, numbers(4)))],
    "addbmm": [(aten.addbmm.default, (numbers(5), numbers(2, 3, 4), numbers(2, 4, 5)))],
    "baddbmm": [(aten.baddbmm.default, (numbers(2, 3, 5), numbers(2, 3, 4), numbers(2, 4, 5)))],
    "bmm": [(aten.bmm.default, (numbers(2, 3, 4), numbers(2, 4, 5)))],
    "conv1d": [(aten.conv1d.default, (numbers(2, 4, 9), numbers(6, 2, 3), numbers(6), [1], [0], [1], 2))],
    "conv2d": [(aten.conv2d.default, (IMAGE, KERNEL, numbers(5)))],
    "conv3d": [(aten.conv3d.default, (numbers(1, 2, 4, 4, 4), numbers(3, 2, 2, 2, 2), numbers(3)))],
    "conv_transpose1d": [
        (aten.conv_transpose1d.default, (numbers(2, 6, 9), numbers(6, 1, 3), numbers(2), [1], [0], [0], 2))
    ],
    "conv_transpose2d": [(aten.conv_transpose2d.input, (numbers(2, 5, 6, 6), numbers(5, 2, 3, 3), numbers(2)))],
    "conv_transpose3d": [(aten.conv_transpose3d.input, (numbers(1, 5, 4, 4, 4), numbers(5, 1, 2, 2, 2), numbers(1)))],
    "convolution": [
        (aten.convolution.default, (IMAGE, KERNEL, numbers(5), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        (
            aten.convolution.default,
            (numbers(2, 5, 6, 6), numbers(5, 2, 3, 3), numbers(2), [1, 1], [0, 0], [1, 1], True, [0, 0], 1),
        ),
    ],
    "_convolution": [
        (
            aten._convolution.default,
            (IMAGE, KERNEL, numbers(5), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, True),
        )
    ],
    "dot": [(aten.dot.default, (numbers(7), numbers(7, seed=1)))],
    "einsum": [(aten.einsum.default, ("ij,kj->ik", [X, numbers(5, 4)]))],
    "linear": [(aten.linear.default, (X, numbers(5, 4), numbers(5)))],
    "matmul": [(aten.matmul.default, (numbers(2, 3, 4), numbers(2, 4, 5)))],
    "mm": [(aten.mm.default, (X, numbers(4, 5)))],
    "mv": [(aten.mv.default, (X, numbers(4)))],
    "embedding": [(aten.embedding.default, (X, PLACES))],
    "gather": [(aten.gather.default, (X, 1, torch.tensor([[3, 0], [1, 1], [2, 0]])))],
    "scatter": [(aten.scatter.src, (X, 1, torch.tensor([[3, 0], [1, 2], [2, 0]]), Y))],
    "scatter_add": [(aten.scatter_add.default, (X, 1, torch.tensor([[3, 0], [1, 2], [2, 0]]), Y))],
    "index": [(aten.index.Tensor, (X, [PLACES]))],
    "index_put": [(aten.index_put.default, (X, [PLACES], Y))],
    "index_add": [(aten.index_add.default, (X, 0, PLACES, Y))],
    "index_copy": [(aten.index_copy.default, (X, 0, PLACES, Y))],
    "topk": [(aten.topk.default, (X, 2)), (aten.topk.default, (X, 2, 0, False))],
    "scaled_dot_product_attention": [
        (aten.scaled_dot_product_attention.default, (numbers(1, 2, 3, 4), numbers(1, 2, 5, 4), numbers(1, 2, 5, 4)))
    ],
    "prelu": [(aten.prelu.default, (numbers(2, 4), numbers(4)))],
    "upsample_nearest2d": [(aten.upsample_nearest2d.default, (IMAGE, [9, 12]))],
    "upsample_bilinear2d": [(aten.upsample_bilinear2d.default, (IMAGE, [9, 4], False))],
    "upsample_bicubic2d": [(aten.upsample_bicubic2d.default, (IMAGE, [9, 4], False))],
    "_upsample_bilinear2d_aa": [(aten._upsample_bilinear2d_aa.default, (numbers(1, 1, 24, 24), [5, 4], False))],
    "_upsample_bicubic2d_aa": [(aten._upsample_bicubic2d_aa.default, (numbers(1, 1, 24, 24), [5, 4], False))],
    "adaptive_avg_pool1d": [(aten.adaptive_avg_pool1d.default, (numbers(2, 4, 9), [4]))],
    "adaptive_avg_pool3d": [(aten.adaptive_avg_pool3d.default, (numbers(1, 2, 6, 6, 6), [3, 4, 2]))],
    "_to_copy": [(aten._to_copy.default, (X,))],
    "to": [(aten.to.dtype, (X, torch.float32))],
    "type_as": [(aten.type_as.default, (X, X.float()))],
    "softmax": [(aten.softmax.int, (X, -1))],
    "_softmax": [(aten._softmax.default, (X, -1, False))],
}


@functools.cache
def calls_of(name: str) -> tuple[Call, ...]:
    """Return calls of an op that torch takes."""
    if name in OWN:
        return tuple(OWN[name])
    found: list[Call] = []
    packet = next((getattr(aten, own) for own in (name, f"{name}_") if hasattr(aten, own)), None)
    for overload in () if packet is None else packet.overloads():
        target = getattr(packet, overload)
        if "out" in overload or any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.returns):
            continue
        for args in USUAL:
            # A call that torch does not take is refused with its arguments in words, which takes most of the time.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "__repr__", object.__repr__)
                try:
                    makes = leaves(target(*args))
                except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                    continue
            if makes:  # not of Python's numbers
                found.append((target, args))
    return tuple(found)


def named_with(**claims: Any) -> list[str]:
    """Return the ops with these traits."""
    return [name for name, row in TABLE.items() if all(getattr(row, key) == value for key, value in claims.items())]


Check = Callable[[Any, tuple[Any, ...]], None]


def of_each_call(*names: str) -> Callable[[Check], Callable[[str], None]]:
    """Make a test of each of these ops out of a check of one of its calls."""

    def made(check: Check) -> Callable[[str], None]:
        @pytest.mark.parametrize("name", names)
        def test(name: str) -> None:
            for target, args in calls_of(name):
                check(target, args)

        test.__doc__ = check.__doc__
        return test

    return made


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def changed(args: tuple[Any, ...], change: Any) -> tuple[Any, ...]:
    """Return arguments with other floating tensors."""
    return pytree.tree_map(lambda v: change(v) if isinstance(v, Tensor) and v.is_floating_point() else v, args)


def test_the_vocabulary_has_rows_and_no_op_has_two() -> None:
    assert len(TABLE) > 250 and all(isinstance(row, OpTraits) for row in TABLE.values())
    tried = {name for name in TABLE if calls_of(name)}
    assert len(tried) > 0.8 * len(TABLE), sorted(TABLE.keys() - tried)


def test_an_op_with_two_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "_rows", lambda: iter([("add sub", OpTraits()), ("mul sub", OpTraits())]))
    with pytest.raises(ValueError, match="sub has two rows"):
        traits._table()


def test_what_drops_nothing_draws_nothing() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not traits_of(graph.call_function(flash, (x, x, x))).is_random
    assert traits_of(graph.call_function(flash, (x, x, x, 0.1))).is_random
    assert traits_of(graph.call_function(aten.native_dropout.default, (x, 0.5, True))).is_random
    assert not traits_of(graph.call_function(aten.native_dropout.default, (x, 0.5, False))).is_random


def test_of_what_has_no_row_torch_says_whether_it_is_random_and_in_place() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert traits_of(x) is NOTHING
    assert "copysign" not in TABLE and traits_of(graph.call_function(aten.copysign.Tensor, (x, x))).in_place
    assert "cauchy" not in TABLE and traits_of(graph.call_function(aten.cauchy.default, (x,))).is_random
    assert traits_of(graph.call_function(aten.max.other, (x, x))).in_place
    assert not traits_of(graph.call_function(aten.max.dim, (x, 0))).in_place
    attention = graph.call_function(aten.scaled_dot_product_attention.default, (x, x, x))
    assert torch.Tag.nondeterministic_seeded in attention.target.tags and not traits_of(attention).is_random  # type: ignore[union-attr]


@of_each_call(*named_with(rounding=Rounding.MOVES))
def test_moves_make_no_new_numbers(target: Any, args: tuple[Any, ...]) -> None:
    given = [leaf.double().flatten() for leaf in leaves(args)]
    given.append(torch.tensor([v for v in pytree.tree_leaves(args) if isinstance(v, (int, float))] + [1, math.inf]))
    known = torch.cat([part.double() for part in given])
    known = torch.cat([known, -known, torch.zeros(1)])
    for result in leaves(target(*args)):
        if result.is_floating_point() and target is not aten.arange.default:
            assert bool(torch.isin(result, known).all())


@of_each_call(*named_with(holds=True))
def test_what_holds_values_makes_no_others_of_numbers_that_are_not_negative(target: Any, args: tuple[Any, ...]) -> None:
    """A sign, or the place of a value, is no value: planted below."""
    assert holds(target, changed(args, lambda x: x.abs().float().to(x.dtype)))


def holds(target: Any, args: tuple[Any, ...]) -> bool:
    """Return whether each result is an element of what is read, or a number that the program writes."""
    own = [leaf.double().flatten() for leaf in leaves(args) if leaf.is_floating_point()]
    written = [v for v in pytree.tree_leaves(args) if isinstance(v, (int, float))]
    known = torch.cat([*own, torch.tensor([0.0, 1.0, *written]).double()])
    made = [leaf.double() for leaf in leaves(target(*args)) if leaf.is_floating_point()]  # not the bits of a number
    return all(bool(torch.isin(leaf, known).all()) for leaf in made)


@pytest.mark.parametrize("name", ["neg", "sqrt", "square"])
def test_others_hold_none(name: str) -> None:
    assert not TABLE[name].holds and not holds(getattr(aten, name).default, (X.abs() + 2,))


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.condition is not None])
def test_conditions_are_bools_that_decide(name: str) -> None:
    """Other bools make another result of the same numbers."""
    condition, tried = TABLE[name].condition, 0
    given = {"where": (SOME, X, Y), "masked_fill": (X, SOME, 0.5), "masked_scatter": (X, SOME, Y)}
    args: list[Any] = list(given.get(name, (SOME,) if condition == 0 else (X, SOME)))
    for overload in getattr(aten, name).overloads():
        if overload in ("default", "self", "Scalar"):
            target = getattr(getattr(aten, name), overload)
            if name == "where" and overload != "self":
                continue
            before = target(*args)
            after = target(*[~arg if i == condition else arg for i, arg in enumerate(args)])
            assert before.shape != after.shape or not torch.equal(before, after)
            tried += 1
    assert tried


@pytest.mark.parametrize("name", named_with(kind="sum"))
def test_a_sum_adds_up_all_of_an_axis(name: str) -> None:
    made = getattr(torch, name)(X, 1)
    assert torch.allclose(made * (X.shape[1] if name == "mean" else 1), X[:, 0] + X[:, 1] + X[:, 2] + X[:, 3])


@of_each_call(*named_with(in_place=True))
def test_in_place_is_in_place(target: Any, args: tuple[Any, ...]) -> None:
    own = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    other = args[own].clone()
    other[1, 2] = ~other[1, 2] if other.dtype is torch.bool else other[1, 2] + 0.5
    before, after = (target(*args[:own], x, *args[own + 1 :]) for x in (args[own], other))
    for one, two in zip(leaves(before), leaves(after), strict=True):
        if one.shape == other.shape:
            differs = ~((one == two) | (one.isnan() & two.isnan()))
            differs[1, 2] = False
            assert not bool(differs.any())


@of_each_call(*named_with(correctly_rounded=True))
def test_float32_is_float64_rounded_once(target: Any, args: tuple[Any, ...]) -> None:
    narrow = changed(args, lambda x: x.float())
    result, exact = (leaves(target(*one))[0] for one in (narrow, changed(narrow, lambda x: x.double())))
    assert torch.equal(result.nan_to_num(7.0), exact.to(result.dtype).nan_to_num(7.0))


@of_each_call(*named_with(keeps_whole=True))
def test_whole_numbers_stay_whole(target: Any, args: tuple[Any, ...]) -> None:
    whole = changed(args, lambda x: (4 * x).round())
    if all(not isinstance(v, float) or v.is_integer() for v in pytree.tree_leaves(args)):
        for result in leaves(target(*whole)):
            assert torch.equal(result, result.round())


@of_each_call(*named_with(commutes=True))
def test_operands_may_be_exchanged(target: Any, args: tuple[Any, ...]) -> None:
    if len(args) == 2 and all(isinstance(arg, Tensor) for arg in args):
        assert torch.equal(target(*args), target(*reversed(args)))


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.domain])
def test_a_domain_has_a_border(name: str) -> None:
    edge = torch.tensor(-1.0 if TABLE[name].domain == "positive" else 0.0).double()
    others = {"pow": (edge, 0.5), "div": (X, edge), "true_divide": (X, edge)}
    result = getattr(torch, name)(*others.get(name, (edge,)))
    assert not bool(result.isfinite().any())


@of_each_call(*named_with(addend=0), *named_with(addend=2))
def test_what_is_added_is_no_factor(target: Any, args: tuple[Any, ...]) -> None:
    place = traits_of_target(target).addend
    assert place is not None
    alone = target(*args[:place], torch.zeros_like(args[place]), *args[place + 1 :])
    twice = target(*args[:place], 2 * args[place], *args[place + 1 :])
    assert torch.allclose(twice - alone, 2 * (target(*args) - alone)) and not torch.equal(twice, alone)
    for factor in {0, 1, 2} - {place}:
        scaled = [3 * arg if i == factor else arg for i, arg in enumerate(args)]
        assert torch.allclose(target(*scaled) - (target(*args) - alone), 3 * alone)


WITH_SUMS = [name for name, row in TABLE.items() if row.terms is not None]
EXACTLY = (Rounding.PRODUCT, Rounding.CONVOLUTION)


@pytest.mark.parametrize("name", WITH_SUMS)
def test_a_sum_has_as_many_terms_as_elements_that_it_depends_on(name: str) -> None:
    """Products are counted exactly; of windows that overlap, the root of the number may be off by two."""
    tried = 0
    row = TABLE[name]
    assert row.terms is not None
    for target, args in calls_of(name):
        floats = [leaf for leaf in leaves(args) if leaf.is_floating_point()]
        factor = floats[1] if row.addend == 0 else floats[0]
        given = factor.clone().requires_grad_()
        own = pytree.tree_map(lambda v, a=factor, b=given: b if v is a else v, args)
        result = target(*own)
        result = result if isinstance(result, Tensor) else result[0]
        if not result.is_floating_point() or not result.requires_grad:
            continue
        each = [torch.autograd.grad(one, given, retain_graph=True, allow_unused=True)[0] for one in result.flatten()]
        number = max((int((slope != 0).sum()) for slope in each if slope is not None), default=0)
        counted = row.terms(args, result.detach())
        tried += 1
        if row.rounding in EXACTLY and name != "einsum":
            assert counted == number, f"{target}: {counted} of {number}"
        else:
            assert 4 * counted >= number, f"{target}: {counted} of {number}"
    assert tried


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.choice is not None])
def test_choices_are_where_they_are_said_to_be(name: str) -> None:
    choice = TABLE[name].choice
    assert choice is not None
    tried = 0
    for target, args in calls_of(name):
        graph = Graph()
        node = graph.call_function(target, args)
        along = argument(node, "dim")
        results = target(*args)
        several = isinstance(results, (tuple, list))
        if not several and (choice.values and choice.places):
            continue  # of two tensors, or of all elements
        assert several == (choice.values and choice.places)
        dim = along[0] if isinstance(along, (list, tuple)) and along else along
        if not isinstance(dim, int) or not leaves(args)[0].dim():
            continue
        x = args[0]
        if not several and results.dim() < x.dim() - 1:
            continue  # of all elements
        tried += 1
        descending = bool(argument(node, choice.flag)) if choice.flag else choice.descending
        ordered = x.sort(dim=dim, descending=descending).values
        values = results[0] if several else results if choice.values else None
        places = results[1] if several else results if choice.places else None
        if places is not None:
            kept = places if places.dim() == x.dim() else places.unsqueeze(dim)
            found = x.gather(dim, kept)
            assert values is None or torch.equal(found, values if values.dim() == x.dim() else values.unsqueeze(dim))
            values = found
        assert values is not None
        values = values if values.dim() == x.dim() else values.unsqueeze(dim)
        last = values.shape[dim] - 1 if choice.running else 0
        assert torch.equal(values.select(dim, last), ordered.select(dim, 0))
    assert tried


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if not row.is_unwritten and calls_of(n)])
def test_random_ops_and_no_others_draw_anew(name: str) -> None:
    for target, args in calls_of(name):
        kept = [changed(args, torch.clone) for _ in range(2)]
        first, second = (leaves(target(*own)) for own in kept)
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
        if not traits_of_target(target).is_random:
            assert same, target


@of_each_call(*named_with(reads_sizes=True))
def test_what_reads_sizes_reads_no_values(target: Any, args: tuple[Any, ...]) -> None:
    if not named(base_name(target)).is_unwritten:
        results = [target(*own) for own in (args, changed(args, lambda x: x + 1))]
        assert all(torch.equal(a, b) for a, b in zip(*map(leaves, results), strict=True))


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.table is not None])
def test_tables_are_read_by_their_indices(name: str) -> None:
    table = TABLE[name].table
    packet = getattr(aten, name)
    assert table is not None
    schema = next(getattr(packet, o)._schema for o in packet.overloads() if "out" not in o and "list" not in o.lower())
    assert schema.arguments[table[0]].name in ("self", "weight")
    assert schema.arguments[table[1]].name in ("index", "indices")


@of_each_call(*named_with(hidden="stays"), *named_with(hidden="moves"))
def test_what_hides_goes_on_hiding_where_its_value_goes(target: Any, args: tuple[Any, ...]) -> None:
    """Where all values hide, each result does, or it is a constant: what a padding or a triangle fills in, say."""
    kind = traits_of_target(target).kind
    if (
        not any(leaf.is_floating_point() for leaf in leaves(args))
        or kind == "constant"
        or (kind == "factor" and not isinstance(args[1], Tensor))
    ):
        return
    for hides in (-1e9, -math.inf):
        hidden = changed(args, lambda x, value=hides: torch.full_like(x, value))
        if kind == "factor" or (kind == "term" and "sub" in str(target)):  # by what is no mask
            hidden = (hidden[0], *changed(args[1:], lambda x: torch.full_like(x, 0.5)))
        for result in (leaf for leaf in leaves(target(*hidden)) if leaf.is_floating_point()):
            others = result[~(result <= HIDDEN)]
            given = [v for v in pytree.tree_leaves(args) if isinstance(v, (int, float))]
            assert bool(torch.isin(others, torch.tensor([0.0, 1.0, *given]).double()).all())
            is_filled = any(isinstance(v, (int, float)) for v in args[1:]) or traits_of_target(target).reads_sizes
            assert is_filled or not result.numel() or bool((result <= HIDDEN).any()), target


@of_each_call(*named_with(hidden="ignored"))
def test_what_ignores_what_hides_makes_the_same_of_all_of_it(target: Any, args: tuple[Any, ...]) -> None:
    results = []
    for hides in (-1e4, -1e9, -math.inf, torch.finfo(torch.float32).min):
        x = args[0].clone()
        x[..., 1:3] = hides
        results += [leaves(target(x, *args[1:]))]
    if argument(Graph().call_function(target, args), "dim") in (1, -1, [1], None):
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.is_periodic])
def test_waves_repeat(name: str) -> None:
    wave = getattr(torch, name)
    assert torch.allclose(wave(X), wave(X + 2 * math.pi))


def test_arguments_are_found_by_name_wherever_they_stand() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    by_place = graph.call_function(aten.topk.default, (x, 2, 0, False))
    by_name = graph.call_function(aten.topk.default, (x, 2), {"dim": 0, "largest": False})
    for node, name in itertools.product((by_place, by_name), ("dim", "largest", "sorted")):
        assert argument(node, name) == {"dim": 0, "largest": False, "sorted": True}[name]
    assert argument(by_place, "stable") is None
    assert argument(graph.call_function(aten.sort.stable, (x,), {"stable": True}), "dim") == -1
