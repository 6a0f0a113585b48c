"""Guesses at what went wrong in a run of several processes, from the parts of one tensor alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import SourceWrapper, is_of_activation, is_of_parameter
from glassengine.compare.ranks.assembly import EXPLAINED, MEAN, SUM, Assembly, error_of
from glassengine.compare.ranks.ranks import AssembledRanks
from glassengine.compare.ranks.spread import RankArrangement, RankPart, sample_of
from glassengine.errors import shortened
from glassengine.numerics.distances import tensor_hints
from glassengine.recording.layout.layout import Entry
from glassengine.results import FLAGGED, Hint, Pair
from glassengine.sites import ROOT

_MAX_NAMED = 16
"""Ranks that are listed one by one."""
_MAX_TRIED = 64


def rank_hints(source: AssembledRanks, entry: Entry, whole: Tensor) -> tuple[Hint, ...]:
    """Return what explains that `entry` is not `whole`: a reduction that is missing, an order, a rank, a bias."""
    judged = source.tensor(entry)
    if judged.shape != whole.shape or whole.dtype is torch.bool or whole.is_complex():
        return ()
    error = error_of(judged, whole)
    if not 0 < error < math.inf:
        return ()
    assembly, _ = source.assembly(entry)
    if not whole.is_floating_point():
        return (
            *_of_twins(assembly, whole),
            *_of_order(assembly, whole, error),
            *_of_ranks(source, entry, whole),
        )
    layout = source.layout(entry.step)
    num_groups = 1 if layout is None else layout.num_groups
    found = [
        *_of_calls(source, entry),
        *_of_sums(assembly, entry.site, whole, error),
        *_of_doubled(assembly, entry.site, judged, whole, error),
        *_of_updates(source, entry, judged, whole, error, num_groups),
        *_of_unequal_rows(source, entry, whole, error),
        *_of_data(judged, entry.site, whole, error, num_groups),
        *_of_order(assembly, whole, error),
        *_of_gathered(assembly, judged, whole, error),
    ]
    if not found:
        found += _of_ranks(source, entry, whole)
    if not found and len(assembly.ranks) > 1 and _error_but_for_a_vector(judged, whole) <= EXPLAINED * error:
        text = (
            f"every row is off by the same vector: is a bias added in each of {len(assembly.ranks)} ranks, or in none?"
        )
        found.append(Hint("scale", text, 0.8, evidence="bias"))
    if whole.numel() == 1 and float(whole):
        found.append(
            Hint(
                "scale",
                f"the candidate is {float(judged) / float(whole):.6g} times the baseline",
                0.7,
                evidence="values",
            )
        )
    return (*found, *tensor_hints(whole.double(), judged, None))


def out_of_order(source: AssembledRanks, entry: Entry) -> tuple[list[int], str] | None:
    """Return the fewer ranks that have here what the others have of another tensor, and the other way round; its site.

    Each rank adds up what comes first in it: two sums called in another order are the same two sums in other places.
    """
    here = {rank: tensor for rank, tensor, _ in source.local_parts(entry)}
    groups: list[list[int]] = []
    for rank, tensor in here.items():
        own = next((group for group in groups if torch.equal(here[group[0]], tensor)), None)
        own.append(rank) if own is not None else groups.append([rank])
    if len(groups) != 2 or len({tensor.shape for tensor in here.values()}) > 1:
        return None
    few, many = sorted(groups, key=len)
    # What is added later (a bias, a residual) is the same in all ranks.
    apart = here[few[0]].double() - here[many[0]].double()
    size = error_of(apart, torch.zeros_like(apart))
    others = [one for one in source.entries if (one.step, one.shape) == (entry.step, entry.shape)]
    for other in [one for one in others if one.site != entry.site][:_MAX_TRIED]:
        there = {rank: tensor for rank, tensor, _ in source.local_parts(other)}
        if there.keys() == here.keys() and there[few[0]].shape == apart.shape:
            back = there[many[0]].double() - there[few[0]].double()
            if error_of(back, apart) <= EXPLAINED * size:
                return few, other.site
    return None


def wrong_ranks(source: AssembledRanks, entry: Entry, whole: Tensor) -> tuple[int, ...]:
    """Return the ranks that have `entry` wrong; none if all have, or if unknown."""
    errors = source.errors(entry, whole)
    if errors is None or len(errors) < 2:
        return ()
    worst = max(errors.values())
    wrong = tuple(sorted(rank for rank, size in errors.items() if size > EXPLAINED * worst))
    return wrong if len(wrong) < len(errors) else ()


def hints_of_copies(parts: Sequence[RankPart], site: str, whole: Tensor) -> tuple[Hint, ...]:
    """Return what explains that no rank has `whole`, which all should have."""
    if not whole.is_floating_point() or any(part.tensor.shape != whole.shape for part in parts):
        return ()
    everywhere = (None,) * whole.dim()
    way = RankArrangement(tuple(whole.shape), (everywhere,) * len(parts), ((),) * len(parts), ())
    is_one = all(torch.equal(parts[0].tensor, part.tensor) for part in parts[1:])
    assembly = Assembly(tuple(parts), way, differ=not is_one)
    judged = assembly.whole(whole)
    error = error_of(judged, whole)
    if not 0 < error < math.inf:
        return ()
    return (*_of_sums(assembly, site, whole, error), *tensor_hints(whole.double(), judged, None))


def _of_calls(source: AssembledRanks, entry: Entry) -> Iterator[Hint]:
    """Yield that ranks call collectives in another order."""
    found = out_of_order(source, entry)
    if found is not None:
        text = f"rank {_names(found[0])} has here what the others have in {found[1]}, and the other way round"
        yield Hint("swapped", f"{text}: collectives are called in another order there", 0.97, evidence="order")


def _of_sums(assembly: Assembly, site: str, whole: Tensor, error: float) -> Iterator[Hint]:
    if max(map(len, assembly.cells())) < 2 or not assembly.differ:
        return
    ranks = _names(assembly.ranks)
    total = Assembly(assembly.parts, assembly.way, SUM, differ=True).whole(whole)
    if error_of(total, whole) <= EXPLAINED * error:
        text = f"the results of ranks {ranks} add up to the baseline: a reduction (all-reduce) is missing"
        yield Hint("other", text, 0.95, evidence="reduction")
    elif _error_but_for_a_vector(total, whole) <= EXPLAINED * error:
        text = f"the results of ranks {ranks} add up to the baseline but for the same vector in every row"
        yield Hint(
            "other",
            f"{text}: a reduction (all-reduce) is missing, and each rank adds the bias",
            0.9,
            evidence="reduction",
        )
    elif is_of_parameter(site):
        mean = Assembly(assembly.parts, assembly.way, MEAN, differ=True).whole(whole)
        if error_of(mean, whole) <= EXPLAINED * error:
            text = f"those of ranks {ranks} average to the baseline: they are never averaged, or after the backward"
            yield Hint(
                "other", f"{text}; with optimizer=... what is made of them is recorded, too", 0.95, evidence="reduction"
            )


def _of_doubled(assembly: Assembly, site: str, judged: Tensor, whole: Tensor, error: float) -> Iterator[Hint]:
    """Yield that what all ranks have in common was added up more than once."""
    count = len(assembly.ranks)
    if assembly.differ or is_of_parameter(site) or len(assembly.ranks) < 2 or whole.dim() < 2:
        return
    rows, theirs = (_centered(x.double()) for x in (judged, whole))
    power = float(theirs.square().sum())
    factor = round(float((rows * theirs).sum()) / power) if power else 0
    if factor < 2 or count % factor or error_of(rows, factor * theirs) > EXPLAINED * error:
        return
    is_all = error_of(judged.double(), factor * whole.double()) <= EXPLAINED * error
    but = "" if is_all else " but for the same vector in every row (a bias, added later)"
    yield Hint(
        "other", f"{factor} times the baseline{but}: is a reduction (all-reduce) done twice?", 0.9, evidence="reduction"
    )


def _of_updates(
    source: AssembledRanks, entry: Entry, judged: Tensor, whole: Tensor, error: float, num_groups: int
) -> Iterator[Hint]:
    """Yield that an update is off by a multiple of the gradient."""
    path, _, port = entry.site.partition(":")
    gradient = source.counterpart(entry.step, f"{path}:grad") if port == "param" and num_groups > 1 else None
    if gradient is None or gradient.shape != whole.shape or not (power := float(gradient.double().square().sum())):
        return
    difference = judged.double() - whole.double()
    factor = float((difference * gradient.double()).sum()) / power
    if error_of(difference, factor * gradient.double()) <= EXPLAINED * error:
        text = f"the update is off by {factor:.3g} times the gradient: another learning rate"
        yield Hint(
            "scale",
            f"{text}, or gradients of {num_groups} ranks are added up and not averaged",
            0.8,
            evidence="average",
        )


def _of_twins(assembly: Assembly, whole: Tensor) -> Iterator[Hint]:
    """Yield which ranks were given the same where each should have a part of its own."""
    if len(set(assembly.way.cells)) < len(assembly.parts):
        return
    for i, part in enumerate(assembly.parts):
        twins = [one for one in assembly.parts[:i] if torch.equal(one.tensor, part.tensor)]
        if twins and not torch.equal(part.tensor, assembly.place(i, whole)):
            text = f"ranks {_names(twins[0].ranks)} and {_names(part.ranks)} have the same"
            yield Hint("swapped", f"{text}, and no rank has what the baseline has in that place", 0.9, evidence="order")
            return


def _of_data(judged: Tensor, site: str, whole: Tensor, error: float, num_groups: int) -> Iterator[Hint]:
    """Yield what became of a mean over the rows of all ranks."""
    if num_groups < 2 or not (is_of_parameter(site) or is_of_activation(site)):
        return
    for factor, text in (
        (num_groups, f"{num_groups} times the baseline: gradients of {num_groups} ranks are added up, not averaged"),
        (1 / num_groups, f"a {num_groups}th of the baseline: averaged over ranks whose losses are sums, not means"),
    ):
        if is_of_parameter(site) and error_of(judged / factor, whole) <= EXPLAINED * error:
            yield Hint("scale", text, 0.9, evidence="average")


def _of_unequal_rows(source: AssembledRanks, entry: Entry, whole: Tensor, error: float) -> Iterator[Hint]:
    """Yield that a mean of means is wrong if ranks have different numbers of rows."""
    rows = source.num_rows(entry.step)
    assembly, _ = source.assembly(entry)
    parts = [part for part in assembly.parts if len(part.ranks) == 1 and part.ranks[0] in rows]
    if len(set(rows.values())) < 2 or len(parts) < len(assembly.parts) or assembly.way.dims:
        return
    counts = [rows[part.ranks[0]] for part in parts]
    weighted = sum(part.tensor.double() * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    if isinstance(weighted, Tensor) and error_of(weighted.to(whole.dtype), whole) <= EXPLAINED * error:
        text = f"ranks {_names(assembly.ranks)} have {_names(counts)} rows, and theirs are means over these"
        yield Hint("scale", f"{text}: the baseline is the mean weighted by the rows", 0.9, evidence="average")


def _of_order(assembly: Assembly, whole: Tensor, error: float) -> Iterator[Hint]:
    """Yield in which other order the parts agree: each is looked for in all places at once."""
    parts, way = assembly.parts, assembly.way
    if not way.dims or len(set(way.cells)) < len(parts) or len({part.tensor.shape for part in parts}) > 1:
        return
    tensors = [part.tensor.double() for part in parts]
    places = [assembly.place(i, whole).double() for i in range(len(parts))]
    ranks = [_names(part.ranks) for part in parts]
    for is_centered in (False, True):
        ours, theirs = ([_centered(x) for x in side] if is_centered else side for side in (tensors, places))
        order = torch.cdist(torch.stack(list(map(sample_of, theirs))), torch.stack(list(map(sample_of, ours)))).argmin(
            1
        )
        if order.tolist() == list(range(len(parts))) or len(set(order.tolist())) < len(parts):
            continue
        left = math.sqrt(sum(error_of(ours[j], theirs[i]) ** 2 for i, j in enumerate(order.tolist())) / len(parts))
        if left > EXPLAINED * error:
            continue
        moved = [i for i, j in enumerate(order.tolist()) if i != j]
        if len(parts) <= _MAX_NAMED:
            agrees = f"in the order of ranks {', '.join(ranks[j] for j in order.tolist())} they agree"
        else:
            swaps = ", ".join(f"{ranks[int(order[i])]} for {ranks[i]}" for i in moved[:_MAX_NAMED])
            agrees = f"with the part of rank {swaps} they agree"
        if is_centered:
            text = "but for one vector in every row: shards of the weight are exchanged, those of the bias are not"
            yield Hint("swapped", f"{agrees} {text}", 0.9, evidence="order")
        else:
            yield Hint("swapped", f"{agrees}: shards are exchanged", 0.95, evidence="order")
        return


def _of_gathered(assembly: Assembly, judged: Tensor, whole: Tensor, error: float) -> Iterator[Hint]:
    """Yield that all ranks have the same, put side by side from parts in another order."""
    count = len(assembly.ranks)
    if assembly.differ or assembly.way.dims or count < 2:
        return
    for dim, size in enumerate(whole.shape):
        if size % count:
            continue
        ours, theirs = (torch.stack(x.double().chunk(count, dim)) for x in (judged, whole))
        wanted, found = (torch.stack(list(map(sample_of, x))) for x in (theirs, ours))
        order = torch.cdist(wanted, found).argmin(1)
        if sorted(order.tolist()) == list(range(count)) and error_of(ours[order], theirs) <= EXPLAINED * error:
            named = ", ".join(map(str, order.tolist()[:_MAX_NAMED]))
            text = f"the {count} parts along dimension {dim} agree in the order {named}"
            yield Hint("swapped", f"{text}: they are gathered in another order", 0.95, evidence="order")
            return


def _of_ranks(source: AssembledRanks, entry: Entry, whole: Tensor) -> Iterator[Hint]:
    wrong = wrong_ranks(source, entry, whole)
    if wrong:
        assembly, _ = source.assembly(entry)
        if len(set(assembly.way.cells)) > 1 or len(assembly.parts) == 1:
            text = f"wrong in the part of rank {_names(wrong)}, right in those of the others"
        else:
            text = f"wrong in rank {_names(wrong)}, right in the others"
        yield Hint("other", text, 0.9, evidence="rank")


def _centered(x: Tensor) -> Tensor:
    """Return what is left of each row without what all rows have."""
    return x - x.reshape(-1, x.shape[-1]).mean(0) if x.dim() > 1 else x


def _error_but_for_a_vector(x: Tensor, whole: Tensor) -> float:
    """Return the error that is left when every row may be off by the same vector; infinite of a single row."""
    difference = x.double() - whole.double()
    rows = difference.reshape(-1, difference.shape[-1]) if difference.dim() else difference.reshape(1, 1)
    return error_of(rows.mean(0).expand_as(rows), rows) if len(rows) > 1 else math.inf


def _names(ranks: Iterable[int]) -> str:
    return shortened(ranks, _MAX_NAMED)


def rank_and_hints(
    number: int, pairs: Sequence[Pair], judged: Sequence[MatchedPair], left: SourceWrapper, right: SourceWrapper
) -> tuple[int | None, tuple[Hint, ...]]:
    """Return the rank that has a tensor wrong, None where all that have it do or there is one; and hints.

    Args:
        number: Of the pair.
        pairs: All verdicts.
        judged: What was judged.
        left: The baseline, put together where it is.
        right: The candidate, likewise.
    """
    match = judged[number]
    if left.is_assembled or right.is_assembled:
        if match.rule is not None:
            return None, ()
        ours, theirs = match.baseline, match.candidates[0]
        if right.is_assembled:
            return of_parts(cast(AssembledRanks, right), theirs, left.tensor(ours))
        return of_parts(cast(AssembledRanks, left), ours, right.tensor(theirs))
    if all(entry.rank == match.baseline.rank for entry in left.entries):
        return None, ()
    place = (match.baseline.step, match.baseline.site)
    there = [i for i, one in enumerate(judged) if (one.baseline.step, one.baseline.site) == place and one.rule is None]
    wrong = [i for i in there if pairs[i].verdict in FLAGGED]
    if len(there) < 2:
        return match.baseline.rank, ()
    if len(wrong) < len(there):
        named = ", ".join(str(pairs[i].rank) for i in wrong)
        return match.baseline.rank, (
            Hint("other", f"wrong in rank {named}, right in the others", 0.9, evidence="rank"),
        )
    baselines = [left.tensor(judged[i].baseline) for i in there]
    if not all(torch.equal(baselines[0], other) for other in baselines[1:]):
        return None, ()
    parts = [RankPart((pairs[i].rank,), right.tensor(judged[i].candidates[0])) for i in there]
    return None, hints_of_copies(parts, match.baseline.site, baselines[0])


def of_parts(side: AssembledRanks, entry: Entry, whole: Tensor) -> tuple[int | None, tuple[Hint, ...]]:
    """Return the rank that has its part of a tensor wrong, None where all that have it do; and hints."""
    absent = _absent(side, entry)
    if absent and side.tensor(entry).shape != whole.shape:
        named, around = ", ".join(map(str, absent)), _around(entry.site)
        text = f"rank {named} has none, though it ran {around}: a call was left out there"
        return absent[0] if len(absent) == 1 else None, (Hint("other", text, 0.9, evidence="rank"),)
    ranks = side.ranks_of(entry.step, entry.site)
    wrong = wrong_ranks(side, entry, whole) or (ranks if len(ranks) == 1 else ())
    rank = next(iter(wrong), None)
    if rank is None and (moved := out_of_order(side, entry)) is not None and 2 * len(moved[0]) < len(ranks):
        rank = moved[0][0]
    return rank, (*_without_update(side, entry, rank), *rank_hints(side, entry, whole))


def _without_update(side: AssembledRanks, entry: Entry, rank: int | None) -> tuple[Hint, ...]:
    """Return that the one rank which is wrong left an update out that the others made."""
    if rank is None:
        return ()
    steps = {}
    for before in side.entries:
        if before.step < entry.step and before.site.endswith(":param"):
            there = side.ranks_of(before.step, before.site)
            module = before.site.partition(":")[0].rpartition(".")[0]
            if rank not in there and rank in side.ranks_of(before.step, module or ROOT):
                steps[before.step] = there
    if not steps:
        return ()
    step, there = min(steps.items())
    named = ", ".join(map(str, there))
    return (
        Hint("other", f"rank {rank} updated no parameters in step {step}, rank {named} did", 0.95, evidence="rank"),
    )


def _absent(side: AssembledRanks, entry: Entry) -> list[int]:
    """Return the ranks that recorded the module around that of `entry`, and not `entry`."""
    if entry.site.partition(":")[0] == ROOT:
        return []
    found = side.ranks_of(entry.step, _around(entry.site))
    return sorted(set(found) - set(side.ranks_of(entry.step, entry.site)))


def _around(site: str) -> str:
    return site.partition(":")[0].partition("@")[0].rpartition(".")[0] or ROOT
