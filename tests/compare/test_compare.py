"""Records are compared as they are: several candidates at once, directories of steps, records of other token ids."""

import inspect
import json
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.capture.record import record as record_model
from glassengine.compare.compare import compare, compare_many
from glassengine.compare.judge import PairJudge, PairVerdict
from glassengine.compare.matching.matching import MatchedPair
from glassengine.errors import CorruptError, IncomparableError, UnknownNameError, UsageError
from glassengine.progress import silent
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


NAMES = ("input_ids", "logits", "mm_default", "model.layers.0.mlp")


def step(number: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    return {"input_ids": torch.arange(6) + number, **{name: torch.randn(4, 8, generator=g) for name in NAMES[1:]}}


def dump(path: Path, steps: range = range(5)) -> Path:
    path.mkdir(parents=True)
    for number in steps:
        torch.save(step(number), path / f"step{number}.pt")
    return path


def test_one_tensor_of_one_step_differs(tmp_path: Path) -> None:
    x, y = dump(tmp_path / "x"), dump(tmp_path / "y")
    bad = step(3)
    bad["mm_default"][2, 5] += 0.5
    torch.save(bad, y / "step3.pt")
    result = compare(x, y)
    assert [(p.step, p.site) for p in result.pairs if p.verdict != "identical"] == [(3, "mm_default")]
    assert (result.counts["compared"], result.counts["wrong"], result.ok) == (20, 1, False)
    first = result.first_divergence
    assert first is not None
    assert (first.step, first.site) == (3, "mm_default")


def test_missing_steps_are_counted(tmp_path: Path) -> None:
    x, y = dump(tmp_path / "x"), dump(tmp_path / "y", range(4))
    (y / "step1.pt").unlink()
    result = compare(x, y, min_coverage=0.5)
    assert (result.ok, result.counts["missing_steps"], result.counts["unmatched_baseline"]) == (True, 2, 8)
    assert {s.reason for s in result.skipped} == {"the candidate has no step 1", "the candidate has no step 4"}
    assert not result.environment["candidate"]["complete"]
    low = compare(x, y)
    assert (low.ok, low.too_little, low.verdict) == (False, True, "identical")
    assert {s.reason for s in compare(y, x).skipped} == {"the baseline has no step 1", "the baseline has no step 4"}


def test_a_directory_of_steps_against_a_recording_and_arrays(tmp_path: Path) -> None:
    x = dump(tmp_path / "x", range(2))
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for number in range(2):
            for name, tensor in step(number).items():
                w.write(name, number, tensor)
            w.commit(number)
    (tmp_path / "a").mkdir()
    for number in range(2):
        for name, tensor in step(number).items():
            np.save(tmp_path / "a" / f"{name}-step{number}.npy", tensor.numpy())
    result = compare_many(x, [tmp_path / "r", tmp_path / "a"])
    assert [one.counts["identical"] for one in result.comparisons] == [8, 8]


def test_ranks_pair_with_ranks(tmp_path: Path) -> None:
    for side in "xy":
        dump(tmp_path / side, range(2))
        dump(tmp_path / side / "rank1", range(2))
    bad = step(1)
    bad["logits"] *= 2
    torch.save(bad, tmp_path / "y" / "rank1" / "step1.pt")
    result = compare(tmp_path / "x", tmp_path / "y")
    assert [(p.step, p.rank, p.site) for p in result.pairs if p.verdict == "wrong"] == [(1, 1, "logits")]


def test_many_is_as_bad_as_its_worst(tmp_path: Path) -> None:
    x, same, less, bad = (dump(tmp_path / name) for name in ("x", "same", "less", "bad"))
    (less / "step4.pt").unlink()
    torch.save({**step(0), "logits": step(0)["logits"] * 2}, bad / "step0.pt")
    good = compare_many(x, [same, x])
    assert (good.ok, good.verdict, good.too_little) == (True, "identical", False)
    little = compare_many(x, [same, less])
    assert (little.ok, little.verdict, little.too_little) == (False, "identical", True)
    worst = compare_many(x, [less, bad, same])
    assert (worst.ok, worst.verdict, worst.too_little) == (False, "wrong", False)
    assert [one.ok for one in worst.comparisons] == [False, False, True]
    document = json.loads(json.dumps(worst.to_dict(), allow_nan=False))
    assert document.keys() == {"schema_version", "ok", "verdict", "baseline", "comparisons", "too_little"}
    assert document["comparisons"][1] == compare(x, bad).to_dict()


def test_many_passes_every_option_on(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(2), "i": torch.ones(2).int()}, tmp_path / "x.pt")
    torch.save({"a": torch.ones(3, 2), "c": torch.ones(2) * 1.5, "i": torch.ones(2).int()}, tmp_path / "y.pt")
    options = {
        "map": {"b": "c"},
        "transpose": ["a"],
        "atol": 0.5,
        "rtol": 0.0,
        "show_only": ["a", "b"],
        "floating_point_only": True,
        "device": "cpu",
        "fail_on": "rounding",
        "min_coverage": 1.0,
        "min_snr": 1.0,
        "jobs": 1,
        "cluster": None,
        "first": False,
        "progress": silent,
    }
    assert options.keys() == {
        p.name for p in inspect.signature(compare).parameters.values() if p.kind == p.KEYWORD_ONLY
    }
    many = compare_many(tmp_path / "x.pt", [tmp_path / "y.pt"], **options)  # type: ignore[arg-type]
    alone = compare(tmp_path / "x.pt", tmp_path / "y.pt", **options)  # type: ignore[arg-type]
    assert many.comparisons == (alone,)
    assert {pair.site: pair.verdict for pair in alone.pairs} == {"a": "identical", "b": "rounding"}


def test_many_refuses_what_one_refuses(tmp_path: Path) -> None:
    x = dump(tmp_path / "x", range(1))
    with pytest.raises(UsageError, match="no candidate"):
        compare_many(x, [])
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(IncomparableError, match=r"nothing to compare(.|\n)*other\.pt"):
        compare_many(x, [x, tmp_path / "other.pt"])
    cut = dump(tmp_path / "cut", range(2))
    (cut / "step1.pt").write_bytes((cut / "step1.pt").read_bytes()[:400])
    with pytest.raises(CorruptError, match=r"step1\.pt"):
        compare_many(x, [x, cut])


@pytest.mark.parametrize(
    ("baseline", "candidate", "verdict"),
    [
        (torch.tensor([True, False]), torch.tensor([True, False]), "identical"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "wrong"),
        (torch.tensor([255], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8), "wrong"),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), "wrong"),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.full((2,), 1.125).to(torch.float8_e4m3fn), "rounding"),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.full((2,), 1.5).to(torch.float8_e4m3fn), "wrong"),
        (torch.ones(2).bfloat16(), torch.full((2,), 1.0078125).bfloat16(), "rounding"),
        (torch.ones(2).bfloat16(), torch.full((2,), 1.0625).bfloat16(), "wrong"),
        (torch.empty(0, 3), torch.empty(0, 3), "identical"),
        (torch.tensor(1.0), torch.tensor(1.0), "identical"),
        (torch.tensor([float("nan"), float("inf")]), torch.tensor([float("nan"), float("inf")]), "identical"),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), "wrong"),
    ],
)
def test_inputs_that_ditto_compare_could_not_judge(
    tmp_path: Path, baseline: torch.Tensor, candidate: torch.Tensor, verdict: str
) -> None:
    torch.save({"x": baseline}, tmp_path / "x.pt")
    torch.save({"x": candidate}, tmp_path / "y.pt")
    result = compare(tmp_path / "x.pt", tmp_path / "y.pt")
    assert result.verdict == verdict
    (pair,) = result.pairs
    assert pair.baseline is not None
    json.dumps(result.to_dict(), allow_nan=False)


def test_pairs_are_in_recorded_order_and_any_rank_transposes(tmp_path: Path) -> None:
    names = [f"t{i}" for i in (3, 1, 2, 0)]
    tensors = {name: torch.randn(2, 3, 4) for name in names}
    torch.save(tensors, tmp_path / "x.pt")
    torch.save({name: tensor.mT for name, tensor in reversed(tensors.items())}, tmp_path / "y.pt")
    result = compare(tmp_path / "x.pt", tmp_path / "y.pt", transpose=["t[0-3]"])
    assert ([pair.site for pair in result.pairs], result.verdict) == (names, "identical")


IDS = [1, 20, 30, 40, 50, 60]
SAMPLING = {"do_sample": False, "temperature": 1.0, "bos_token_id": 1}


def recorded(path: Path, ids: list[int], **metadata: Any) -> Path:
    with RecordingWriter(path, metadata=metadata) as writer:
        writer.write("a", 0, torch.ones(3))
        writer.commit(0, token_ids=[ids])
    return path


@pytest.mark.parametrize(
    ("ids", "ours", "theirs", "words"),
    [
        ([1, *IDS], {}, {}, r"row 0: BOS twice: the candidate begins with \[1, 1, 20"),
        ([7, *IDS], {}, {}, r"one id more at the front: the candidate begins with \[7, 1"),
        (IDS[1:], {"sampling": SAMPLING}, {}, r"no BOS: the baseline begins with \[1, 20"),
        (IDS[1:], {}, {}, r"one id fewer at the front"),
        ([1, 20, 31, 41, 50], {}, {}, r"from position 2 on, \[30, 40, 50, 60\] in the baseline, \[31, 41, 50\] in"),
        (IDS[:4], {}, {}, r"from position 4 on, \[50, 60\] in the baseline, nothing in the candidate"),
        (
            [1, 20, 9],
            {"prompt": "x y"},
            {"prompt": "x z"},
            r"the texts of the prompts differ: 'y', in the candidate 'z'",
        ),
        (
            [1, 20, 9],
            {"prompt": "x y"},
            {"prompt": "x y"},
            r"the text of the prompt is the same: the tokenizers differ",
        ),
        (
            [*IDS[:5], 61],
            {"prompt_lengths": [4], "sampling": SAMPLING},
            {"prompt_lengths": [4], "sampling": {**SAMPLING, "do_sample": True}},
            r"the prompts are the same, generated token 1 is another: [^$]*do_sample False in the baseline, True in",
        ),
    ],
)
def test_the_class_is_named(
    ids: list[int], ours: dict[str, Any], theirs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    x, y = recorded(tmp_path / "x", IDS, **ours), recorded(tmp_path / "y", ids, **theirs)
    with pytest.raises(IncomparableError, match=words) as refused:
        compare(x, y)
    is_generated = "the prompts are the same" in words
    assert ("--tokens-of" if is_generated else "glass check-prompt") in str(refused.value.hint)


def test_other_settings_on_the_same_ids_are_a_note(tmp_path: Path) -> None:
    x = recorded(tmp_path / "x", IDS, sampling=SAMPLING)
    y = recorded(tmp_path / "y", IDS, sampling={**SAMPLING, "repetition_penalty": 1.1})
    result = compare(x, y)
    words = "the settings of generation differ: repetition_penalty not set in the baseline, 1.1 in the candidate"
    assert result.ok and result.notes == (words,)
    assert compare(x, x).notes == () and compare(x, recorded(tmp_path / "z", IDS)).notes == ()
