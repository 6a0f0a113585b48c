"""Several candidates at once, and directories of steps: what differs is named exactly, what is missing is counted."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from glassengine.compare.compare import compare
from glassengine.compare.many import compare_many
from glassengine.errors import CorruptError, IncomparableError, UsageError
from glassengine.progress import silent
from glassengine.recording.write.writer import RecordingWriter

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
