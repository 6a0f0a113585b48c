"""Parts of several ranks against one process: put together, and what went wrong in between is named."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glassengine.cli.main import main
from glassengine.compare import compare
from glassengine.compare.ranks.assembly import assembled
from glassengine.errors import CorruptError, IncomparableError, UsageError
from glassengine.recording.layout.layout import Sharding
from glassengine.recording.layout.noise_floor import FILE, StoredFloor, write_noise_floor
from glassengine.recording.reader import Recording
from glassengine.recording.source import RankRecordings, open_source
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison

Tensors = Mapping[str, Tensor]

B, S, D, H, F = 2, 5, 8, 4, 12


def record(path: Path, tensors: Tensors, *, rank: int = 0, shardings: Mapping[str, Sharding] | None = None) -> Path:
    with RecordingWriter(path, metadata={}) as w:
        for site, tensor in tensors.items():
            w.write(site, 0, tensor, rank=rank, sharding=(shardings or {}).get(site))
        w.commit(0)
    return path


def record_ranks(path: Path, each: list[Tensors]) -> Path:
    for rank, tensors in enumerate(each):
        record(path / f"rank{rank}", tensors, rank=rank)
    return path


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole() -> dict[str, Tensor]:
    """A column-parallel and a row-parallel layer with a bias, as one process computes them; and a cache."""
    x, up, down, bias = randn(B, S, D), randn(F, D, seed=1), randn(D, F, seed=2), randn(D, seed=3)
    fc = x @ up.T
    inter = fc.relu()
    return {
        "mlp:in[0]": x,
        "mlp.fc": fc,
        "mlp.act": inter,
        "mlp.proj": inter @ down.T + bias,
        "mlp:kv.key": randn(B, H, S, 3, seed=4),
        "mask": torch.ones(B, S, dtype=torch.bool),
    }


def parts(count: int = 2) -> list[dict[str, Tensor]]:
    """The same in `count` ranks."""
    found, x, up, down, bias = whole(), randn(B, S, D), randn(F, D, seed=1), randn(D, F, seed=2), randn(D, seed=3)
    fcs = [x @ piece.T for piece in up.chunk(count)]
    sums = [fc.relu() @ piece.T for fc, piece in zip(fcs, down.chunk(count, 1), strict=True)]
    reduced = torch.stack(sums).sum(0) + bias
    return [
        {
            "mlp:in[0]": x,
            "mlp.fc": fc,
            "mlp.act": fc.relu(),
            "mlp.proj": reduced,
            "mlp:kv.key": key,
            "mask": found["mask"],
        }
        for fc, key in zip(fcs, found["mlp:kv.key"].chunk(count, 1), strict=True)
    ]


@pytest.fixture
def judged(tmp_path: Path) -> Callable[[Tensors, list[Tensors]], Comparison]:
    numbers = itertools.count()

    def judge(baseline: Tensors, ranks: list[Tensors], **options: Any) -> Comparison:
        n = next(numbers)
        return compare(record(tmp_path / f"x{n}", baseline), record_ranks(tmp_path / f"y{n}", ranks), **options)

    return judge


Judge = Callable[..., Comparison]


@pytest.mark.parametrize("count", [2, 4])
def test_columns_are_concatenated_and_reduced_rows_are_taken_once(count: int, judged: Judge) -> None:
    result = judged(whole(), parts(count))
    assert (result.ok, result.coverage, result.counts["compared"], result.counts["unmatched_candidate"]) == (
        True,
        1.0,
        6,
        0,
    )
    assert result.environment["candidate"]["arrangements"] == {
        "in every rank": 3,
        "concatenated along dimension 2": 2,
        "concatenated along dimension 1": 1,
    }
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_baseline_may_be_the_one_of_several_ranks(tmp_path: Path) -> None:
    x, y = record_ranks(tmp_path / "x", parts()), record(tmp_path / "y", whole())
    assert compare(x, y).ok
    wrong = {**whole(), "mlp.fc": whole()["mlp.fc"].roll(1, 0)}
    found = compare(x, record(tmp_path / "z", wrong)).first_divergence
    assert found is not None and found.site == "mlp.fc"


def _unreduced() -> list[dict[str, Tensor]]:
    each = parts()
    for rank, (tensors, piece) in enumerate(zip(each, randn(D, F, seed=2).chunk(2, 1), strict=True)):
        tensors["mlp.proj"] = tensors["mlp.act"] @ piece.T + (randn(D, seed=3) if rank == 0 else 0)
    return each


def _with_bias_twice() -> list[dict[str, Tensor]]:
    each = parts()
    return [{**tensors, "mlp.proj": tensors["mlp.proj"] + randn(D, seed=3)} for tensors in each]


def _exchanged() -> list[dict[str, Tensor]]:
    first, second = parts()
    return [{**first, "mlp.fc": second["mlp.fc"]}, {**second, "mlp.fc": first["mlp.fc"]}]


def _exchanged_of_seven() -> list[dict[str, Tensor]]:
    each: list[dict[str, Tensor]] = [{"wide": piece} for piece in randn(B, 14).chunk(7, 1)]
    each[2]["wide"], each[5]["wide"] = each[5]["wide"], each[2]["wide"]
    return each


def _wrong_in_one_part() -> list[dict[str, Tensor]]:
    first, second = parts()
    return [first, {**second, "mlp.fc": second["mlp.fc"] * 1.5}]


def _wrong_in_one_copy() -> list[dict[str, Tensor]]:
    first, second = parts()
    return [first, {**second, "mlp.proj": second["mlp.proj"].roll(1, -1)}]


@pytest.mark.parametrize("count", [2, 4])
def test_collectives_in_another_order(count: int, judged: Judge) -> None:
    q, k = ([randn(B, S, D, seed=rank + first) for rank in range(count)] for first in (10, 20))
    bias = randn(D, seed=5)
    right = {"x": randn(B, S, D), "q": sum(q) + bias, "k": sum(k)}
    # The last rank adds up k where the others add up q.
    sums = sum(q[:-1]) + k[-1], sum(k[:-1]) + q[-1]
    each = [{"x": right["x"], "q": sums[0] + bias, "k": sums[1]} for _ in range(count - 1)]
    found = judged(right, [*each, {"x": right["x"], "q": sums[1] + bias, "k": sums[0]}]).first_divergence
    assert found is not None and (found.site, found.rank) == ("q", None if count == 2 else count - 1)
    assert "in k, and the other way round: collectives are called in another order" in found.hints[0].text


@pytest.mark.parametrize(
    ("each", "baseline", "site", "kind", "text"),
    [
        (_unreduced, whole, "mlp.proj", "reduction", "the results of ranks 0, 1 add up to the baseline"),
        (_with_bias_twice, whole, "mlp.proj", "bias", "a bias added in each of 2 ranks"),
        (_exchanged, whole, "mlp.fc", "order", "in the order of ranks 1, 0 they agree"),
        (_exchanged_of_seven, lambda: {"wide": randn(B, 14)}, "wide", "order", "ranks 0, 1, 5, 3, 4, 2, 6 they agree"),
        (_wrong_in_one_part, whole, "mlp.fc", "rank", "wrong in the part of rank 1, right in those of the others"),
        (_wrong_in_one_copy, whole, "mlp.proj", "rank", "wrong in rank 1, right in the others"),
    ],
)  # fmt: skip
def test_planted_mistakes_of_parallel_layers_are_named(
    each: Callable[[], list[Tensors]], baseline: Callable[[], Tensors], site: str, kind: str, text: str, judged: Judge
) -> None:
    found = judged(baseline(), each()).first_divergence
    assert found is not None and found.site == site
    assert found.hints[0].evidence == kind and text in found.hints[0].text


def test_an_error_of_one_rank_is_not_hidden_by_the_others(judged: Judge) -> None:
    for bad in range(3):
        each: list[Tensors] = [{"y": randn(4, 4)} for _ in range(3)]
        each[bad] = {"y": randn(4, 4) + 1}
        result = judged({"y": randn(4, 4)}, each)
        assert result.verdict == "wrong"
        assert result.environment["candidate"]["arrangements"] == {"in every rank, which are not the same": 1}
    # Nor does NaN on all sides make a difference.
    void = torch.full((4, 4), torch.nan)
    result = judged({"y": void}, [{"y": void}, {"y": void}])
    assert result.environment["candidate"]["arrangements"] == {"in every rank": 1}
    # Nor does a rank hide that has no number where the others have one.
    hole = randn(4, 4)
    hole[1, 1] = torch.nan
    assert judged({"y": randn(4, 4)}, [{"y": randn(4, 4)}, {"y": hole}]).verdict == "wrong"


def test_ranks_that_differ_by_rounding_are_rounding(judged: Judge) -> None:
    assert judged({"y": randn(4, 4)}, [{"y": randn(4, 4)}, {"y": randn(4, 4) * (1 + 2e-7)}]).verdict == "rounding"


@pytest.mark.parametrize("sizes", [(6, 6), (4, 4, 4), (6, 3, 3), (8, 2, 2)])
def test_each_rank_has_its_share_of_each_piece_of_a_fused_projection(sizes: tuple[int, ...], judged: Judge) -> None:
    fused = randn(B, S, sum(sizes) * 2)
    split = [piece.chunk(2, -1) for piece in fused.split([2 * size for size in sizes], -1)]
    each = [{"qkv": torch.cat([pieces[rank] for pieces in split], -1)} for rank in range(2)]
    result = judged({"qkv": fused}, each)
    assert (result.ok, result.verdict) == (True, "identical")
    assert list(result.environment["candidate"]["arrangements"]) == [
        f"concatenated along dimension 2 in {len(sizes)} pieces"
    ]
    # Where the values are in no arrangement those of the baseline, it stays wrong.
    wrong = judged({"qkv": fused}, [each[0], {"qkv": each[1]["qkv"] + 1}])
    assert wrong.verdict == "wrong" and wrong.first_divergence is not None


def test_parts_that_several_ranks_have(judged: Judge) -> None:
    # Four ranks, two key heads: 0 and 1 have the first, 2 and 3 the second.
    key = randn(B, 2, S, 3)
    assert judged({"k": key}, [{"k": key[:, [i // 2]]} for i in range(4)]).verdict == "identical"
    # Batch and heads alternate: 0 and 2 have the first half of the columns.
    wide = randn(B, 8)
    assert judged({"w": wide}, [{"w": wide[:, i % 2 * 4 :][:, :4]} for i in range(4)]).verdict == "identical"
    other = [{"w": wide[:, i % 2 * 4 :][:, :4] + (i == 1)} for i in range(4)]
    assert judged({"w": wide}, other).verdict == "wrong"


def test_data_parallel_ranks_have_rows_of_their_own(tmp_path: Path) -> None:
    rows, ids = randn(4, 6), [[1, 2], [3, 4]]
    with RecordingWriter(tmp_path / "x", metadata={}) as w:
        w.write("y", 0, rows)
        w.commit(0, token_ids=ids)
    for rank in range(2):
        with RecordingWriter(tmp_path / "ranks" / f"rank{rank}", metadata={}) as w:
            w.write("y", 0, rows[2 * rank :][:2], rank=rank)
            w.commit(0, token_ids=ids[rank : rank + 1])
    assert compare(tmp_path / "x", tmp_path / "ranks").verdict == "identical"


def test_pipeline_stages_have_sites_of_their_own(judged: Judge) -> None:
    x = {"layers.0": randn(B, 4), "layers.1": randn(B, 4, seed=1)}
    result = judged(x, [{"layers.0": x["layers.0"]}, {"layers.1": x["layers.1"]}])
    assert result.verdict == "identical" and result.environment["candidate"]["arrangements"] == {"of one rank": 2}


def test_parts_that_do_not_fit_are_listed_and_not_ok(judged: Judge) -> None:
    square = randn(4, 4)
    thirds = [{"y": square[i // 2 * 2 :][:2, i % 2 * 2 :][:, :2], "z": square} for i in range(3)]
    result = judged({"y": square, "z": square}, thirds)
    assert (result.ok, result.too_little, result.counts["compared"]) == (False, True, 1)
    (skipped,) = [item for item in result.skipped if item.site == "y"]
    assert skipped.reason == "the parts of 3 ranks, [2, 2], do not make up [4, 4]"
    result = judged({"y": square, "z": square}, [{"y": square[:1], "z": square}, {"y": square[:2], "z": square}])
    assert "[1, 4], [2, 4], do not make up [4, 4]" in next(i.reason for i in result.skipped if i.site == "y")
    # A shape that has nothing to do with parts is a shape that differs.
    result = judged({"y": square}, [{"y": square[:3]}, {"y": square[:3]}])
    assert result.pairs[0].judged_by == "shape"


def test_maps_name_tensors_of_ranks(judged: Judge) -> None:
    renamed = [{f"h.{site}": tensor for site, tensor in tensors.items()} for tensors in parts()]
    rules: dict[str, Any] = {"rules": [{"baseline": "mlp.*", "candidate": "h.mlp.*"}]}
    result = judged(whole(), renamed, map=rules, show_only=["mlp.fc", "mlp.act", "mlp.proj"])
    assert (result.ok, result.counts["compared"]) == (True, 3)
    rules = {"rules": [{"baseline": "mlp.fc", "candidate": "h.mlp.fc", "candidate_ops": [{"op": "flatten"}]},
                       {"baseline": "mlp.proj", "candidate": "h.mlp.proj"}]}  # fmt: skip
    result = judged(whole(), renamed, map=rules)
    assert "where a map changes the layout" in next(item.reason for item in result.skipped if item.site == "mlp.fc")


def test_sides_of_several_ranks_each_are_compared_rank_by_rank(tmp_path: Path) -> None:
    x, y = record_ranks(tmp_path / "x", parts()), record_ranks(tmp_path / "y", _wrong_in_one_part())
    result = compare(x, y)
    assert result.counts["compared"] == 12
    assert [(pair.site, pair.rank) for pair in result.pairs if pair.verdict == "wrong"] == [("mlp.fc", 1)]


def test_ranks_are_judged_by_the_noise_floor_of_each(tmp_path: Path) -> None:
    """Twice as far off as rank 0 may be is rounding in rank 1, whose own noise is larger."""
    noise = [1e-5, 1e-3]
    record_ranks(tmp_path / "x", [{"y": randn(4, 4, seed=rank)} for rank in range(2)])
    for rank, size in enumerate(noise):
        power = float(randn(4, 4, seed=rank).square().mean())
        slices = tuple(np.full(4, size**2) for _ in range(2))
        floors = {("y", 0, rank): StoredFloor(size**2, power, slices)}
        write_noise_floor(tmp_path / "x" / f"rank{rank}", floors, "by hand")
    for bad, verdict in ((1, "rounding"), (0, "wrong")):
        each = [{"y": randn(4, 4, seed=rank) + (noise[1] if rank == bad else 0)} for rank in range(2)]
        result = compare(tmp_path / "x", record_ranks(tmp_path / f"y{bad}", each))
        assert (result.verdict, result.first_divergence and result.first_divergence.rank) == (
            verdict,
            None if verdict == "rounding" else 0,
        )
        assert "noise floor" in {pair.judged_by for pair in result.pairs}
    (tmp_path / "x" / "rank1" / FILE).unlink()
    assert compare(tmp_path / "x", tmp_path / "y1").verdict == "wrong"


def _place(rank: int, placements: tuple[str, ...], mesh: tuple[int, ...], shape: tuple[int, ...]) -> Sharding:
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), mesh))
    return Sharding(shape, placements, mesh, (), coordinate)


def _distribute(tensor: Tensor, placements: tuple[str, ...], mesh: tuple[int, ...]) -> list[tuple[Tensor, Sharding]]:
    """Spread a tensor as torch does: along the first dimension of the mesh first."""
    found = []
    for rank in range(torch.Size(mesh).numel()):
        sharding = _place(rank, placements, mesh, tuple(tensor.shape))
        part = tensor
        for text, size, at in zip(placements, mesh, sharding.coordinate, strict=True):
            if text.startswith("S"):
                part = part.chunk(size, int(text[2:-1]))[at]
            elif text == "P(sum)":
                part = part * (0.25 if at == 0 else 0.75 / (size - 1))
        found.append((part, sharding))
    return found


@pytest.mark.parametrize(
    ("placements", "mesh"),
    [
        (("S(1)",), (2,)),
        (("R", "S(0)"), (2, 2)),
        (("S(0)", "S(0)"), (2, 2)),
        (("S(0)", "S(1)"), (2, 3)),
        (("P(sum)", "S(1)"), (2, 2)),
        (("P(avg)",), (2,)),
        (("R", "R"), (2, 2)),
    ],
)
def test_distributed_tensors_are_put_together_as_they_say(
    placements: tuple[str, ...], mesh: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = randn(4, 6)
    each = _distribute(tensor, placements, mesh)
    for rank, (part, sharding) in enumerate(each):
        record(tmp_path / "y" / f"rank{rank}", {"w": part}, rank=rank, shardings={"w": sharding})
    result = compare(record(tmp_path / "x", {"w": tensor}), tmp_path / "y")
    assert result.verdict in ("identical", "rounding")
    assert list(result.environment["candidate"]["arrangements"]) == ["distributed tensors"]
    # Each of the parts counts: whichever is changed, it shows.
    for rank, (part, sharding) in enumerate(each):
        path = tmp_path / f"z{rank}"
        for other, (right, of) in enumerate(each):
            record(path / f"rank{other}", {"w": right}, rank=other, shardings={"w": of})
        (path / f"rank{rank}").rename(tmp_path / f"away{rank}")
        record(path / f"rank{rank}", {"w": part + 1}, rank=rank, shardings={"w": sharding})
        assert compare(tmp_path / "x", path).verdict == "wrong"


def test_copies_know_their_ranks() -> None:
    each = _distribute(randn(4, 6), ("R", "S(0)"), (2, 2))
    copies = assembled([(rank, part, sharding) for rank, (part, sharding) in enumerate(each)])
    assert [copy.ranks for copy in copies] == [(0, 1), (2, 3)]
    assert all(torch.equal(copy.tensor, randn(4, 6)) for copy in copies)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rank: {"placements": ("S(0)",) if rank else ("S(1)",)}, "the ranks contradict each other"),
        (lambda rank: {"mesh": (3,)}, "recorded are 2 of the 3 parts"),
        (lambda rank: {"coordinate": (0,)}, "recorded are 1 of the 2 parts"),
        (lambda rank: {"placements": ("_S(0, 2)",)}, "parts that are placed as _S(0, 2) cannot be put together"),
        (lambda rank: {"placements": ("S(7)",)}, "impossible"),
    ],
)
def test_distributed_tensors_that_cannot_be_put_together(
    change: Callable[[int], dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    for rank in range(2):
        known = {"shape": (4, 6), "placements": ("S(0)",), "mesh": (2,), "names": (), "coordinate": (rank,)}
        sharding = Sharding(**{**known, **change(rank)})
        tensors = {"w": randn(2, 6), "other": randn(3)}
        record(tmp_path / "y" / f"rank{rank}", tensors, rank=rank, shardings={"w": sharding})
    result = compare(record(tmp_path / "x", {"w": randn(4, 6), "other": randn(3)}), tmp_path / "y")
    assert not result.ok and reason in next(item.reason for item in result.skipped if item.site == "w")


def test_recordings_of_ranks_are_one_source(tmp_path: Path) -> None:
    source = open_source(record_ranks(tmp_path / "y", parts()))
    assert isinstance(source, RankRecordings)
    assert source.complete and source.metadata["num_ranks"] == 2
    assert {entry.rank for entry in source.entries} == {0, 1}
    second = next(entry for entry in source.entries if (entry.site, entry.rank) == ("mlp.fc", 1))
    assert torch.equal(source.tensor(second), parts()[1]["mlp.fc"])
    with pytest.raises(UsageError, match="no recording found") as refused:
        Recording.open(tmp_path / "y")
    assert refused.value.hint == f"that of one rank: {tmp_path / 'y' / 'rank0'}"
    # Of three ranks the one in the middle is missing.
    record(tmp_path / "y" / "rank3", parts()[0], rank=3)
    assert not open_source(tmp_path / "y").complete
    (tmp_path / "y" / "rank1" / "recording.json").write_text("{")
    with pytest.raises(CorruptError):
        open_source(tmp_path / "y")


def test_the_screen_says_how_and_gives_the_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = record(tmp_path / "x", whole()), record_ranks(tmp_path / "y", _unreduced())
    assert main(["compare", str(x), str(y)]) == 1
    shown = capsys.readouterr().out
    assert "first divergence: step 0, mlp.proj" in shown
    assert "the results of ranks 0, 1 add up to the baseline: a reduction (all-reduce) is missing" in shown
    assert "of several ranks, the tensors of the candidate were put together: 2 in every rank; 2 concatenated" in shown
    assert main(["compare", str(x), str(record_ranks(tmp_path / "z", parts()))]) == 0


def test_rows_padded_to_another_length_per_rank_are_said_to_be_why(tmp_path: Path) -> None:
    ids = torch.arange(32).reshape(4, 8)
    ids[:2, 6:] = 0
    one = record(tmp_path / "one", {".:in.input_ids": ids, "x": ids.float()})
    each = [{".:in.input_ids": part, "x": part.float()} for part in (ids[:2, :6], ids[2:])]
    with pytest.raises(IncomparableError, match=r"do not make up \[4, 8\]; so 1 more(.|\n)*one length"):
        compare(one, record_ranks(tmp_path / "ranks", each))


VOCAB = 26


def looked_up(ranks: int, how: str, *, wrong: str = "") -> tuple[dict[str, Tensor], list[Tensors]]:
    """A vocabulary in shares, padded to as many rows in each rank, its ids and results masked outside of the module.

    Args:
        ranks: How many.
        how: "zero" looks up the first row in place of those of others, "ends" the first or the last one, "inside" masks
            in the module, "reads all" leaves the numbers to the module.
        wrong: What the last rank, or all of them, have wrong.
    """
    table, ids = randn(VOCAB, D), torch.randint(0, VOCAB, (B, 9), generator=torch.Generator().manual_seed(5))
    size = -(-VOCAB // ranks)
    x = torch.nn.functional.embedding(ids, table)
    norm = torch.nn.functional.layer_norm
    one = {"embed:in[0]": ids, "embed": x, "norm": norm(x, (D,)), "head": norm(x, (D,)) @ table.T}
    padded = torch.cat([table, torch.zeros(size * ranks - VOCAB, D)])
    each, terms = [], []
    for rank in range(ranks):
        is_last = rank == ranks - 1
        own = padded[rank * size : (rank + 1) * size].clone()
        number = ids - rank * size + (wrong == "off by one" and is_last)
        absent = (number < 0) | (number >= size)
        local = number.clamp(0, size - 1) if how == "ends" else number.masked_fill(absent, 0)
        if wrong == "scaled row" and is_last:
            own[int(local[~absent][0])] *= 1.3
        found = torch.nn.functional.embedding(local, own)
        term = found if wrong == "not masked" else found.masked_fill(absent[..., None], 0)
        terms.append(term)
        given = ids if how in ("inside", "reads all") else local
        each.append({"embed:in[0]": given, "embed": term if how == "inside" else found, "own": own})
    total = each[-1]["embed"] if wrong == "not added up" else torch.stack(terms).sum(0)
    made: list[Tensors] = []
    for rank, seen in enumerate(each):
        y = norm(terms[rank] if wrong == "not added up" else total, (D,))
        head = y @ seen["own"].T * (1.2 if wrong == "behind" and rank == 0 else 1)
        made.append({"embed:in[0]": seen["embed:in[0]"], "embed": seen["embed"], "norm": y, "head": head})
    return one, made


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["zero", "ends", "inside", "reads all"])
def test_f59_a_vocabulary_in_shares_is_right_wherever_its_mask_is(ranks: int, how: str, tmp_path: Path) -> None:
    one, each = looked_up(ranks, how)
    result = compare(record(tmp_path / "one", one), record_ranks(tmp_path / "ranks", each))
    assert (result.ok, result.coverage, result.first_divergence) == (True, 1.0, None), result.not_ok_because


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("wrong", "site", "rank"),
    [
        ("off by one", "embed", None),
        ("scaled row", "embed", None),
        ("not masked", "norm", None),
        ("not added up", "embed", None),
        ("behind", "head", 0),
    ],
)
def test_f59_a_mistake_in_it_or_behind_it_is_found(
    ranks: int, wrong: str, site: str, rank: int | None, tmp_path: Path
) -> None:
    one, each = looked_up(ranks, "zero", wrong=wrong)
    result = compare(record(tmp_path / "one", one), record_ranks(tmp_path / "ranks", each))
    found = result.first_divergence
    assert not result.ok and found is not None and (found.site, found.rank) == (site, rank)


def test_f59_copies_of_which_one_is_wrong_are_no_shares_of_a_table(tmp_path: Path) -> None:
    x = randn(B, S, D)
    other = x.clone()
    other[0, 1:3] = 0.5
    each: list[Tensors] = [{"x": x, "y": x.relu()}, {"x": other, "y": x.relu()}]
    result = compare(record(tmp_path / "one", {"x": x, "y": x.relu()}), record_ranks(tmp_path / "ranks", each))
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == "x"
