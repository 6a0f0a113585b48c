"""Comparisons on a terminal: one line per candidate, one column per candidate, the worst tensor first."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console, RenderableType

from glassengine.compare.compare import compare, compare_many
from glassengine.report import terminal_compare, words


def text(renderable: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    x = {f"t{i:02d}": torch.ones(3, 4) for i in range(12)}
    for name, changes in {
        "x": {},
        "same": {},
        "bad": {"t07": x["t07"] + 0.5, "t03": x["t03"] * (1 + 1e-7), "t09": torch.full((3, 4), float("nan"))},
        "turned": {"t05": x["t05"].T.contiguous()},
    }.items():
        (tmp_path / name).mkdir()
        torch.save({**x, **changes}, tmp_path / name / "step0.pt")
    less = {name: tensor for name, tensor in x.items() if name != "t00"}
    (tmp_path / "less").mkdir()
    torch.save(less, tmp_path / "less" / "step0.pt")
    return tmp_path


def test_a_column_per_candidate_and_the_worst_first(sides: Path) -> None:
    names = ("same", "bad", "turned", "less")
    result = compare_many(sides / "x" / "step0.pt", [sides / name / "step0.pt" for name in names])
    lines = text(terminal_compare.comparisons(result))
    assert lines[0].startswith("NOT OK: 2 of 4 candidates are ok; baseline ")
    for name in names:
        assert any(f" {name}/step0.pt " in line for line in lines)
    (bad,) = (line for line in lines if line.startswith("NOT OK  bad/step0.pt"))
    assert bad.split()[2:] == ["bad/step0.pt", "wrong", "12", "2", "0", "1", "9", "0", "100.0%", "step", "0,", "t07"]
    table = lines[lines.index("verdict and largest absolute difference:") + 3 :]
    assert [line.split()[:2] for line in table[:4]] == [["0", "t05"], ["0", "t09"], ["0", "t07"], ["0", "t03"]]
    assert table[0].split()[2:] == ["identical", "identical", "wrong", "shape", "identical"]
    assert table[1].split()[2:] == ["identical", "wrong", "inf", "identical", "identical"]
    assert table[2].split()[2:] == ["identical", "wrong", "0.5", "identical", "identical"]
    assert table[4].split() == ["0", "t00", "identical", "identical", "identical", "not", "judged"]
    assert any("4 more tensors, none worse" in line for line in lines)
    assert lines[lines.index("less/step0.pt:") + 2 :] == [
        "not judged: 1",
        "  1 of the baseline: the candidate has no tensor of this name, step and rank: t00",
    ]


def test_all_are_ok(sides: Path) -> None:
    lines = text(terminal_compare.comparisons(compare_many(sides / "x", [sides / "same", sides / "x"])))
    assert lines[0].startswith("ok: 2 of 2 candidates are ok; ")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/step0.pt", "b/step0.pt"], ["a/step0.pt", "b/step0.pt"]),
        (["r/a/step0.pt", "r/b/step1.pt"], ["step0.pt", "step1.pt"]),
        (["a", "c/a"], ["a", "c/a"]),
        (["a", "a"], ["a", "a"]),
        ([""], [""]),
    ],
)
def test_short_names_tell_paths_apart(paths: list[str], names: list[str]) -> None:
    assert words.short_names(paths) == names


def test_each_tensor_passes_or_fails(sides: Path) -> None:
    result = compare(sides / "x", sides / "bad", show_only=["t03", "t07", "t09", "t11"])
    lines = text(terminal_compare.comparison(result))
    rows = [line.split() for line in lines if " t" in line and line.split()[0] in ("wrong", "rounding", "identical")]
    assert [row[:5] for row in rows] == [
        ["wrong", "fail", "fail", "0", "t09"],
        ["wrong", "fail", "fail", "0", "t07"],
        ["rounding", "pass", "fail", "0", "t03"],
        ["identical", "pass", "pass", "0", "t11"],
    ]
    titles = [line for line in lines if "allclose" in line]
    assert titles[2] == ("step 0, t03: allclose(rtol=1.3e-06, atol=1e-05) pass, equal fail")
    assert len(titles) == 4


def test_shapes_that_differ_say_what_would_help(sides: Path) -> None:
    lines = text(terminal_compare.comparison(compare(sides / "x", sides / "turned")))
    row = next(line for line in lines if line.startswith("  t05: "))
    assert "shapes differ: [3, 4] and [4, 3] (dimensions 0, 1); they agree when transposed: --transpose 't05'" in row
    assert not any(line.startswith("step 0, t00") for line in lines)
    assert any(line.startswith("... and 11 more: 11 identical") for line in lines)


def test_the_first_divergence_says_its_rank(tmp_path: Path) -> None:
    for side in "xy":
        (tmp_path / side / "rank1").mkdir(parents=True)
        torch.save({"a": torch.ones(2)}, tmp_path / side / "step0.pt")
        torch.save({"a": torch.ones(2) * (side == "x")}, tmp_path / side / "rank1" / "step0.pt")
    lines = text(terminal_compare.comparison(compare(tmp_path / "x", tmp_path / "y")))
    assert "first divergence: step 0, a (rank 1)" in lines


def test_a_pair_of_two_names_shows_both(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"b": torch.ones(2)}, tmp_path / "y.pt")
    lines = text(terminal_compare.comparison(compare(tmp_path / "x.pt", tmp_path / "y.pt", map={"a": "b"})))
    assert "  a: by map: b" in lines
    torch.save({"b": torch.zeros(2)}, tmp_path / "z.pt")
    lines = text(terminal_compare.comparison(compare(tmp_path / "x.pt", tmp_path / "z.pt", map={"a": "b"})))
    at = lines.index("first divergence: step 0, a")
    assert lines[at + 1] == "  candidate b"
