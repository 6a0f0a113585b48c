"""The same numbers with other dimensions."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics.arrangements import Arrangement, arrangements

CASES = {
    "channels last": ("bchw->bhwc", {"b": 2, "c": 3, "h": 5, "w": 7}),
    "tokens first": ("sbd->bsd", {"s": 9, "b": 2, "d": 12}),
    "heads apart": ("bs(hd)->bhsd", {"b": 2, "s": 9, "h": 3, "d": 4}),
    "heads among the rows": ("(bh)sd->bhsd", {"b": 2, "s": 9, "h": 3, "d": 4}),
    "heads beside each other": ("(bh)sd->bs(hd)", {"b": 2, "s": 9, "h": 3, "d": 4}),
    "tokens first with heads among the rows": ("s(bh)d->bhsd", {"b": 2, "s": 9, "h": 3, "d": 4}),
    "tokens in one row": ("(bs)d->bsd", {"b": 2, "s": 9, "d": 12}),
    "one more": ("obsd->bsd", {"o": 1, "b": 2, "s": 9, "d": 12}),
    "transposed": ("bqk->bkq", {"b": 2, "q": 5, "k": 5}),
    "places of an image": ("b(hw)c->bchw", {"b": 2, "h": 5, "w": 7, "c": 3}),
}


def written(tensor: torch.Tensor, rule: str, sizes: dict[str, int]) -> torch.Tensor:
    """Rearrange: names in brackets are merged."""
    left, right = rule.split("->")
    parts = [c for c in left if c.isalpha() and c in right]
    moved = tensor.reshape([sizes[c] for c in parts]).permute(
        [parts.index(c) for c in right if c.isalpha() and c in parts]
    )
    return moved.reshape(packed(right, sizes))


def packed(side: str, sizes: dict[str, int]) -> list[int]:
    shape: list[int] = []
    inside = False
    for c in side:
        if c in "()":
            inside = c == "("
            shape += [1] if inside else []
        elif inside:
            shape[-1] *= sizes[c]
        else:
            shape.append(sizes[c])
    return shape


@pytest.mark.parametrize("rule, sizes", CASES.values(), ids=CASES)
def test_one_of_few_arrangements_is_the_right_one_and_goes_back(rule: str, sizes: dict[str, int]) -> None:
    theirs = torch.randn(packed(rule.split("->")[0], sizes))
    ours = written(theirs, rule, sizes)
    offered = list(arrangements([(s,) for s in theirs.shape], [(s,) for s in ours.shape]))
    right = [one for one in offered if torch.equal(one.apply(theirs, ours.shape), ours)]
    assert len(offered) <= 24 and right
    assert torch.equal(right[0].inverse.apply(ours, theirs.shape), theirs)


@pytest.mark.parametrize("rule, sizes", CASES.values(), ids=CASES)
def test_it_holds_for_other_numbers_of_rows_and_tokens(rule: str, sizes: dict[str, int]) -> None:
    theirs = torch.randn(packed(rule.split("->")[0], sizes))
    ours = written(theirs, rule, sizes)
    found = next(
        one
        for one in arrangements([(s,) for s in theirs.shape], [(s,) for s in ours.shape])
        if torch.equal(one.apply(theirs, ours.shape), ours)
    )
    more = {name: size + (name in "bs") for name, size in sizes.items()}
    theirs = torch.randn(packed(rule.split("->")[0], more))
    ours = written(theirs, rule, more)
    assert found.fits(theirs.shape, ours.shape)
    assert torch.equal(found.apply(theirs, ours.shape), ours)


def test_numbers_that_do_not_fit_have_no_arrangement() -> None:
    assert not list(arrangements([(2,), (9,)], [(3,), (5,)]))
    assert not list(arrangements([(6,), (4,)], [(3,), (5,)]))


def test_a_dimension_of_parts_that_no_shape_tells_apart_has_them_as_they_were() -> None:
    """Experts and their rows lie in one dimension on both sides; only their product is known."""
    how = Arrangement(theirs=((0, 1),), ours=((1, 0),), sizes=(2, 3))
    assert how.apply(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    assert how.apply(torch.arange(12)).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
