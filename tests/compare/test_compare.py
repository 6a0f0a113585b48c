"""glass.compare: every verdict, every reason for not being ok, and nothing skipped in silence."""

import json
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.capture.record import record as record_model
from glassengine.compare import compare
from glassengine.compare.judge import PairJudge, PairVerdict
from glassengine.compare.matching.matching import MatchedPair
from glassengine.errors import IncomparableError, UnknownNameError, UsageError
from glassengine.recording.write.writer import RecordingWriter

Tensors = Mapping[tuple[int, str], torch.Tensor]


def record(path: Path, tensors: Tensors, **metadata: Any) -> Path:
    with RecordingWriter(path, metadata=metadata) as w:
        for step in dict.fromkeys(step for step, _ in tensors):
            for (at, site), tensor in tensors.items():
                if at == step:
                    w.write(site, step, tensor, node=f"node_{site}")
            w.commit(step)
    return path


def tensors() -> dict[tuple[int, str], torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {(step, site): torch.randn(4, 6, generator=g) for step in range(2) for site in ("a", "b", "c", "d")}


def changed(changes: Tensors) -> dict[tuple[int, str], torch.Tensor]:
    return {**tensors(), **changes}


def test_identical(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "x", tensors()), record(tmp_path / "y", tensors()))
    assert (result.ok, result.verdict, result.coverage, result.first_divergence) == (True, "identical", 1.0, None)
    assert result.counts == {
        "compared": 8, "identical": 8, "rounding": 0, "suspicious": 0, "wrong": 0, "inherited": 0,
        "unmatched_baseline": 0, "unmatched_candidate": 0, "not_recorded": 0, "missing_steps": 0,
    }  # fmt: skip
    assert {pair.judged_by for pair in result.pairs} == {"tolerance (uncalibrated)"}
    json.dumps(result.to_dict(), allow_nan=False)


def test_rounding_and_fail_on(tmp_path: Path) -> None:
    x = record(tmp_path / "x", tensors())
    y = record(tmp_path / "y", changed({(1, "b"): tensors()[1, "b"] * (1 + 1e-7)}))
    assert (compare(x, y).ok, compare(x, y).verdict) == (True, "rounding")
    strict = compare(x, y, fail_on="rounding")
    assert (strict.ok, strict.not_ok_because) == (False, "1 of 8 tensors is rounding or worse")
    assert compare(x, y, rtol=0, atol=0).verdict == "wrong"
    assert compare(x, y, fail_on="suspicious").ok


def test_a_planted_error_is_found_where_it_first_is(tmp_path: Path) -> None:
    bad = tensors()[1, "b"].clone()
    bad[2, 3] += 0.5
    x = record(tmp_path / "x", tensors(), sources={"b": "model.py:7: y = x * w"})
    y = record(tmp_path / "y", changed({(1, "b"): bad, (1, "d"): tensors()[1, "d"] * 100}))
    result = compare(x, y)
    assert (result.ok, result.verdict, result.not_ok_because) == (False, "wrong", "2 of 8 tensors are wrong")
    first = result.first_divergence
    assert first is not None
    assert (first.step, first.site, first.node, first.source) == (1, "b", "node_b", "model.py:7: y = x * w")
    assert result.origins == (first,)
    pair = next(p for p in result.pairs if (p.step, p.site) == (1, "b"))
    assert pair.figures is not None
    assert pair.figures.worst_index == (2, 3)
    assert pair.figures.max_abs_diff == pytest.approx(0.5)
    assert pair.figures.num_beyond_tolerance == 1
    assert pair.baseline is not None
    assert pair.abs_error is not None
    assert pair.abs_error.max == pair.figures.max_abs_diff


def test_nan_on_one_side_is_wrong_whatever_the_tolerance(tmp_path: Path) -> None:
    bad = tensors()[0, "a"].clone()
    bad[0, 0] = math.nan
    x, y = record(tmp_path / "x", tensors()), record(tmp_path / "y", changed({(0, "a"): bad}))
    assert compare(x, y, rtol=1e9, atol=1e9).verdict == "wrong"
    assert compare(y, y).verdict == "identical"


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    x = record(tmp_path / "x", tensors())
    y = record(tmp_path / "y", changed({(0, "a"): tensors()[0, "a"].t(), (0, "b"): tensors()[0, "b"].bfloat16()}))
    result = compare(x, y)
    found = {(p.step, p.site): p for p in result.pairs}
    assert (found[0, "a"].verdict, found[0, "a"].figures) == ("wrong", None)
    assert found[0, "a"].reason == (
        "shapes differ: [4, 6] and [6, 4] (dimensions 0, 1); they agree when transposed: --transpose 'a'"
    )
    assert (found[0, "b"].verdict, found[0, "b"].reason) == ("rounding", "dtypes differ: float32 and bfloat16")
    first = result.first_divergence
    assert first is not None
    assert first.site == "a"
    with pytest.raises(UnknownNameError):
        compare(x, y, transpose=["aa"])
    only = compare(x, y, show_only=["a"], transpose=["a"])
    assert {(p.step, p.verdict) for p in only.pairs} == {(0, "identical"), (1, "wrong")}


def test_transposing_a_vector_makes_no_sense(tmp_path: Path) -> None:
    torch.save({"v.weight": torch.ones(3), "w.weight": torch.ones(2, 3)}, tmp_path / "x.pt")
    torch.save({"v.weight": torch.ones(3), "w.weight": torch.ones(3, 2)}, tmp_path / "y.pt")
    with pytest.raises(UsageError, match="cannot be transposed"):
        compare(tmp_path / "x.pt", tmp_path / "y.pt", transpose=["v.weight"])
    # A pattern leaves the vectors among what it names as they are.
    assert compare(tmp_path / "x.pt", tmp_path / "y.pt", transpose=["*.weight"]).verdict == "identical"


def test_transpose_applies_to_the_baseline(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, 2)}, tmp_path / "x.pt")
    torch.save({"y": torch.ones(2, 2)}, tmp_path / "y.pt")
    with pytest.raises(UnknownNameError, match="unknown tensor 'y'"):
        compare(tmp_path / "x.pt", tmp_path / "y.pt", transpose=["y"], map={"x": "y"})


def test_integers_are_exact(tmp_path: Path) -> None:
    torch.save({"ids": torch.tensor([5000, 6000]), "x": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"ids": torch.tensor([5000, 6001]), "x": torch.ones(2)}, tmp_path / "y.pt")
    assert compare(tmp_path / "x.pt", tmp_path / "y.pt", rtol=1.0, atol=1.0).verdict == "wrong"
    result = compare(tmp_path / "x.pt", tmp_path / "y.pt", floating_point_only=True)
    assert (result.ok, result.counts["compared"]) == (True, 1)
    assert [(s.site, s.reason) for s in result.skipped] == [("ids", "not floating point")]


def test_unmatched_are_counted_and_listed(tmp_path: Path) -> None:
    left = {k: v for k, v in tensors().items() if k != (0, "d")}
    right = {k: v for k, v in tensors().items() if k != (1, "a")}
    result = compare(record(tmp_path / "x", left), record(tmp_path / "y", right), min_coverage=0.8)
    assert result.ok
    assert (result.counts["unmatched_baseline"], result.counts["unmatched_candidate"]) == (1, 1)
    assert [(s.side, s.step, s.site) for s in result.skipped] == [("baseline", 1, "a"), ("candidate", 0, "d")]
    assert result.coverage == pytest.approx(6 / 7)
    low = compare(tmp_path / "x", tmp_path / "y")
    assert (low.ok, low.verdict) == (False, "identical")
    assert low.not_ok_because == "only 85.7% of the baseline's float-valued sites were judged (--min-coverage 0.9)"


def test_coverage_counts_float_valued_tensors(tmp_path: Path) -> None:
    ids = {f"i{i}": torch.arange(3) for i in range(20)}
    torch.save({"x": torch.ones(2), **ids}, tmp_path / "x.pt")
    torch.save({"y": torch.ones(2), **ids}, tmp_path / "y.pt")
    result = compare(tmp_path / "x.pt", tmp_path / "y.pt")
    assert (result.coverage, result.ok) == (0.0, False)


def test_asked_for_and_not_judged_is_not_ok(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "y.pt")
    result = compare(tmp_path / "x.pt", tmp_path / "y.pt", show_only=["a", "b"], min_coverage=0)
    assert (result.ok, result.not_ok_because) == (False, "asked for and not judged: b")


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"b": torch.ones(2)}, tmp_path / "y.pt")
    torch.save({"b": "text"}, tmp_path / "z.pt")
    for other in ("y.pt", "z.pt"):
        with pytest.raises(IncomparableError, match="nothing to compare"):
            compare(tmp_path / "x.pt", tmp_path / other)
    torch.save({"ids": torch.arange(3)}, tmp_path / "i.pt")
    with pytest.raises(IncomparableError, match="nothing to compare"):
        compare(tmp_path / "i.pt", tmp_path / "i.pt", floating_point_only=True)


def test_recordings_without_values_say_so(tmp_path: Path) -> None:
    for name in ("x", "y"):
        with record_model(torch.nn.ReLU(), tmp_path / name, values=False) as recorder:
            recorder.model(torch.ones(2))
    with pytest.raises(IncomparableError, match=r"2 without values(.|\n)*hint: record values, without --no-values"):
        compare(tmp_path / "x", tmp_path / "y")


def test_other_tokens_are_incomparable(tmp_path: Path) -> None:
    x = record(tmp_path / "x", tensors(), token_ids=[[1, 2], [3, 4]])
    y = record(tmp_path / "y", tensors(), token_ids=[[1, 2], [3, 5]])
    with pytest.raises(IncomparableError, match=r"different token ids(.|\n)*row 1"):
        compare(x, y)
    assert compare(x, record(tmp_path / "z", tensors(), token_ids=[[1, 2], [3, 4]])).ok
    assert compare(x, record(tmp_path / "w", tensors())).ok


def test_steps_and_ranks_pair_separately(tmp_path: Path) -> None:
    for name in "xy":
        with RecordingWriter(tmp_path / name, metadata={}) as w:
            for rank in (0, 1):
                w.write("a", 0, torch.full((2,), float(rank + (rank and name == "y"))), rank=rank)
            w.commit(0)
    result = compare(tmp_path / "x", tmp_path / "y")
    assert [(pair.rank, pair.verdict) for pair in result.pairs] == [(0, "identical"), (1, "wrong")]


def test_an_incomplete_side_is_said(tmp_path: Path) -> None:
    x = record(tmp_path / "x", tensors())
    with pytest.raises(KeyError), RecordingWriter(tmp_path / "y", metadata={"environment": {"torch": "2"}}) as w:
        for (step, site), tensor in tensors().items():
            w.write(site, step, tensor)
            if site == "d":
                w.commit(step)
        raise KeyError
    result = compare(x, tmp_path / "y")
    assert result.environment["candidate"] == {"torch": "2", "complete": False}


def test_values_that_are_no_tensor_are_listed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "when": "today"}, tmp_path / "x.pt")
    result = compare(tmp_path / "x.pt", tmp_path / "x.pt")
    assert [(s.side, s.site, s.reason) for s in result.skipped] == [
        ("baseline", "when", "not a tensor: str"),
        ("candidate", "when", "not a tensor: str"),
    ]
    assert result.counts["not_recorded"] == 2


def test_statistics_are_for_the_worst_or_for_what_was_asked(tmp_path: Path) -> None:
    bad = {key: value + (0.1 if key == (1, "d") else 0) for key, value in tensors().items()}
    x, y = record(tmp_path / "x", tensors()), record(tmp_path / "y", bad)
    shown = [(p.step, p.site) for p in compare(x, y).pairs if p.baseline is not None]
    assert (1, "d") in shown
    assert len(shown) == 3
    asked = compare(x, y, show_only=["a", "b"])
    assert all(p.baseline is not None for p in asked.pairs)
    assert {p.site for p in asked.pairs} == {"a", "b"}
    assert {s.reason for s in asked.skipped} == {"not selected by --show-only"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rtol": -1.0}, "--rtol"),
        ({"atol": math.nan}, "--atol"),
        ({"min_coverage": 2.0}, "--min-coverage"),
        ({"fail_on": "identical"}, "--fail-on"),
        ({"device": "abacus"}, "device cannot be used"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=message):
        compare(tmp_path / "x.pt", tmp_path / "x.pt", **arguments)


def dumped(directory: Path, name: str, **tensors: torch.Tensor) -> Path:
    (directory / name).mkdir()
    torch.save({key.replace("__", ":out[0]"): value for key, value in tensors.items()}, directory / name / "step0.pt")
    return directory / name


def test_f41_the_first_result_of_several_is_the_only_one_of_another_version(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    old = dumped(tmp_path, "old", layer__=x, fake_gpt_attention_plugin_1=x, head=x)
    new = dumped(tmp_path, "new", layer=x + 1, gpt_attention_plugin_1=x, head=x)
    result = compare(old, new)
    verdicts = {pair.site: pair.verdict for pair in result.pairs}
    assert verdicts == {"layer:out[0]": "wrong", "fake_gpt_attention_plugin_1": "identical", "head": "identical"}
    assert not result.skipped and compare(new, new).ok


def test_names_of_another_spelling_do_not_take_the_place_of_namesakes(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    old = dumped(tmp_path, "old", layer__=x + 1, layer=x)
    new = dumped(tmp_path, "new", layer=x)
    result = compare(old, new, min_coverage=0)
    assert [(pair.site, pair.verdict) for pair in result.pairs] == [("layer", "identical")]
    other = dumped(tmp_path, "other", layer=torch.arange(6.0))
    with pytest.raises(IncomparableError):
        compare(dumped(tmp_path, "one", layer__=x), other)


def test_f39_a_string_names_one_pattern(tmp_path: Path) -> None:
    one = dumped(tmp_path, "one", abc=torch.ones(2), other=torch.ones(2))
    assert [pair.site for pair in compare(one, one, show_only="abc").pairs] == ["abc"]


def test_threads_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {(1, site): tensors()[1, site] * 1.5 for site in ("b", "d")}
    x, y = record(tmp_path / "x", tensors()), record(tmp_path / "y", changed(bad))
    expected = compare(x, y, jobs=1).to_dict()
    names = set()

    def judged(judge: PairJudge, match: MatchedPair) -> PairVerdict:
        names.add(threading.current_thread().name.partition("_")[0])
        return of_pair(judge, match)

    of_pair = PairJudge.judged
    monkeypatch.setattr(PairJudge, "judged", judged)
    monkeypatch.setattr(sys.modules["glassengine.compare.compare"], "_BYTES_FOR_THREADS", 0)
    monkeypatch.setattr("glassengine.environment.num_cpus", lambda: 2)
    assert compare(x, y).to_dict() == expected
    assert names == {"judge"}
