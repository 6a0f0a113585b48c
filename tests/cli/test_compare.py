"""`glass compare` and `glass show` from the command line to the screen, the JSON and the exit status."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from glassengine import build
from glassengine.cli.main import main
from glassengine.recording.write.writer import RecordingWriter


def glass(name: str, *arguments: object) -> int:
    return main([name, *map(str, arguments)])


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    x = torch.arange(12.0).reshape(3, 4) + 1
    torch.save({"mm": x, "ids": torch.tensor([3])}, tmp_path / "x.pt")
    torch.save({"mm": x * (1 + 1e-7), "ids": torch.tensor([3])}, tmp_path / "round.pt")
    bad = x.clone()
    bad[1, 2] = float("nan")
    torch.save({"mm": bad, "ids": torch.tensor([4])}, tmp_path / "bad.pt")
    torch.save({"mm": x}, tmp_path / "less.pt")
    torch.save({"other": x}, tmp_path / "other.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("candidate", "flags", "status"),
    [
        ("x.pt", [], 0),
        ("round.pt", [], 0),
        ("round.pt", ["--fail-on", "rounding"], 1),
        ("round.pt", ["--rtol", "0", "--atol", "0"], 1),
        ("bad.pt", [], 1),
        ("less.pt", [], 0),
        ("less.pt", ["--show-only", "ids", "--show-only", "mm"], 4),
        ("other.pt", [], 4),
        ("missing.pt", [], 2),
        ("x.pt", ["--device", "abacus"], 2),
        ("x.pt", ["--show-only", "nope"], 2),
        ("x.pt", ["--fail-on", "sometimes"], 2),
        ("x.pt", ["--transpose", "mm"], 1),
        ("x.pt", ["--floating-point-only", "--min-coverage", "1"], 0),
    ],
)
def test_exit_status(dumps: Path, candidate: str, flags: list[str], status: int) -> None:
    assert glass("compare", dumps / "x.pt", dumps / candidate, *flags) == status


def test_too_little_coverage_is_status_4(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"mm": torch.ones(3), "nn": torch.ones(3)}, dumps / "two.pt")
    torch.save({"mm": torch.ones(3)}, dumps / "one.pt")
    assert glass("compare", dumps / "two.pt", dumps / "one.pt") == 4
    assert (
        "NOT OK: too little was judged: only 50% of the baseline's float-valued sites were judged"
        in capsys.readouterr().out
    )


def test_the_screen_says_where_and_how_much(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glass("compare", dumps / "x.pt", dumps / "bad.pt")
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert shown.err == ""
    assert len(lines) < 45
    assert lines[0] == "NOT OK: 2 of 2 tensors are wrong"
    assert lines[1].startswith("next     glass compare ") and lines[2].startswith("compared ")
    assert lines[3].startswith("tensors  2 compared: 2 wrong; ")
    assert "first divergence: step 0, mm" in lines
    assert any("[1, 2]: baseline 7 | candidate nan; 1 of 12 elements" in line for line in lines)
    for row in ("baseline ", "candidate ", "abs error", "rel error"):
        assert any(line.startswith(row) for line in lines)
    for column in ("min", "mean", "median", "max", "std", "NaN", "Inf", "tensor"):
        assert column in shown.out
    assert "float32[3,4]" in shown.out
    assert lines.index(next(line for line in lines if line.startswith("wrong") and "mm" in line)) < lines.index(
        next(line for line in lines if line.startswith("wrong") and "ids" in line)
    )


def test_long_names_are_whole_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model." + "layers.0." * 20 + "[bold]mlp"
    torch.save({name: torch.ones(2)}, tmp_path / "x.pt")
    torch.save({name: torch.zeros(2)}, tmp_path / "y.pt")
    glass("compare", tmp_path / "x.pt", tmp_path / "y.pt")
    assert any(line.startswith("wrong") and name in line for line in capsys.readouterr().out.splitlines())


def test_unmatched_are_on_the_screen(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glass("compare", dumps / "x.pt", dumps / "less.pt")
    shown = capsys.readouterr().out
    assert "not judged: 1" in shown
    assert "1 of the baseline: the candidate has no tensor of this name, step and rank: ids" in shown


def test_json(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("compare", dumps / "x.pt", dumps / "bad.pt", "--json", "-") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["first_divergence"]["site"] == "mm"
    assert document["pairs"][0]["figures"]["max_abs_diff"] == "inf"
    assert {
        "schema_version", "ok", "verdict", "first_divergence", "origins", "counts", "pairs", "skipped", "environment",
    } <= document.keys()  # fmt: skip
    assert glass("compare", dumps / "x.pt", dumps / "bad.pt", "--json", dumps / "out.json") == 1
    assert capsys.readouterr().out.startswith("NOT OK")
    assert json.loads((dumps / "out.json").read_text()) == document


def test_the_documents_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # ditto compare a/step0.pt b/step0.pt --transpose mm_default --show-only ... --floating-point-only --device cpu
    x = {"input_ids": torch.arange(4), "mm_default": torch.randn(3, 4), "logits": torch.randn(2, 5)}
    y = {**x, "mm_default": x["mm_default"].T.contiguous(), "input_ids": torch.arange(4) + 1}
    for name, tensors in {"a": x, "b": y}.items():
        (tmp_path / name).mkdir()
        torch.save(tensors, tmp_path / name / "step0.pt")
    files = (tmp_path / "a" / "step0.pt", tmp_path / "b" / "step0.pt")
    assert glass("compare", *files) == 1
    flags = ("--transpose", "mm_default", "--floating-point-only", "--device", "cpu")
    assert glass("compare", *files, *flags) == 0
    capsys.readouterr()
    assert glass("compare", *files, *flags, "--show-only", "mm_default", "--show-only", "logits") == 0
    shown = capsys.readouterr().out
    for name in ("mm_default", "logits"):
        assert f"step 0, {name}: allclose(rtol=1.3e-06, atol=1e-05) pass, equal pass" in shown
    assert shown.count("abs error") == shown.count("rel error") == 2


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / name).mkdir()
        for step in range(5):
            tensors = {site: torch.full((2, 3), step + 1.0) for site in ("logits", "mm_default")}
            if (name, step) == ("b", 3):
                tensors["mm_default"][1, 2] = 9
            if (name, step) != ("c", 4):
                torch.save(tensors, tmp_path / name / f"step{step}.pt")
    return tmp_path


def test_two_directories_of_steps(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("compare", steps / "a", steps / "b") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NOT OK: 1 of 10 tensors is wrong"
    assert lines[3].startswith("tensors  10 compared: 1 wrong, 9 identical")
    assert "first divergence: step 3, mm_default" in lines
    assert [line.split()[:5] for line in lines if line.startswith("wrong")] == [
        ["wrong", "fail", "fail", "3", "mm_default"]
    ]
    assert glass("compare", steps / "a", steps / "c") == 4
    assert "2 of the baseline: the candidate has no step 4: logits, mm_default" in capsys.readouterr().out
    assert glass("compare", steps / "a", steps / "c", "--min-coverage", "0.8") == 0


@pytest.mark.parametrize(("candidates", "status"), [("aa", 0), ("ab", 1), ("ca", 4), ("cb", 1)])
def test_several_candidates(steps: Path, candidates: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("compare", steps / "a", *(steps / name for name in candidates)) == status
    assert "of 2 candidates are ok" in capsys.readouterr().out
    assert glass("compare", steps / "a", *(steps / name for name in candidates), "--json", "-") == status
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    assert [one["candidate"] for one in document["comparisons"]] == [str(steps / name) for name in candidates]


def test_a_map_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(2, 5, 12)
    torch.save({f"layers.{i}.q": x + i for i in range(2)}, tmp_path / "x.pt")
    torch.save({f"h.{i}.qkv": torch.cat([x + i, x, x], -1) for i in range(2)}, tmp_path / "y.pt")
    rule = {
        "baseline": "layers.*.q",
        "candidate": "h.*.qkv",
        "candidate_ops": [{"op": "split", "dim": -1, "parts": 3, "index": 0}],
    }
    (tmp_path / "map.json").write_text(json.dumps({"rules": [rule]}))
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt") == 4
    assert "--map FILE" in capsys.readouterr().err
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt", "--map", tmp_path / "map.json") == 0
    assert "by map: h.1.qkv" in capsys.readouterr().out
    (tmp_path / "map.json").write_text(json.dumps({"rules": [{**rule, "baseline": "layers.*.qq"}]}))
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt", "--map", tmp_path / "map.json") == 2
    assert "layers.0.q" in capsys.readouterr().err
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt", "--map", tmp_path / "none.json") == 2


def test_engines_side_by_side(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--input-text", "the first", "--max-new-tokens", "3")
    assert glass("compare", engine_directory, engine_directory, *flags, "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["agreement"], len(document["columns"])) == ("bitwise", 2)
    assert len(document["token_ids"][0]) == 3
    assert glass("compare", engine_directory, engine_directory, "--map", "map.json") == 2
    assert "--map: only for tensors" in capsys.readouterr().err


MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))

def model():
    return Model()

def inputs():
    return {"x": torch.ones(2, 4)}

def twice(graph_module):
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and "relu" in str(node.target):
            with graph_module.graph.inserting_after(node):
                doubled = graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
            node.replace_all_uses_with(doubled, lambda user: user is not doubled)
"""


def test_build_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made.py").write_text(MODEL)
    for name, passes in {"a": [], "b": [f"{tmp_path}/made.py:twice"]}.items():
        made = {"inputs": f"{tmp_path}/made.py:inputs", "passes": passes, "artifacts": tmp_path / name}
        build(f"{tmp_path}/made.py:model", tmp_path / f"engine_{name}", backend="eager", **made)
    assert glass("compare", tmp_path / "a", tmp_path / "a") == 0
    capsys.readouterr()
    assert glass("compare", tmp_path / "a", tmp_path / "b", "--json", "-") == 1
    stages = {stage["name"]: stage["status"] for stage in json.loads(capsys.readouterr().out)["stages"]}
    assert [name for name, status in stages.items() if status not in ("identical", "inherited")] == ["pass-twice"]
    assert glass("compare", tmp_path / "a", tmp_path / "b", tmp_path / "b") == 2
    assert glass("compare", tmp_path / "a", tmp_path / "b", "--show-only", "x") == 2
    # Planted: a build that was interrupted after its last stage. What it wrote is the same; nobody knows the rest.
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
    capsys.readouterr()
    assert glass("compare", tmp_path / "a", tmp_path / "c") == 4
    assert capsys.readouterr().out.startswith("no verdict: The same as far as they go, but a build did not end well")
    # A run with the same DEBUG_ARTIFACTS_DIR leaves its steps beside the artifacts of the build.
    for name in "ab":
        torch.save({"x": torch.ones(2)}, tmp_path / name / "step0.pt")
    capsys.readouterr()
    assert glass("compare", tmp_path / "a", tmp_path / "b") == 0
    assert "manifest.json" in capsys.readouterr().err
    assert glass("compare", tmp_path / "a" / "manifest.json", tmp_path / "b" / "manifest.json") == 1


def test_sides_of_different_kinds_are_refused(
    engine_directory: Path, dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert glass("compare", engine_directory, dumps / "x.pt") == 2
    shown = capsys.readouterr().err
    assert f"{engine_directory}: an engine; {dumps / 'x.pt'}: tensors" in shown.replace("\n", " ")
    assert glass("compare", dumps / "x.pt", dumps / "x.pt", "--input-text", "a", "--max-new-tokens", "2") == 2
    assert "--input-text, --max-new-tokens: only for an engine" in capsys.readouterr().err
    assert glass("compare", dumps / "x.pt") == 2


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with RecordingWriter(tmp_path / "r", metadata={"seed": 1}) as w:
        for step in range(2):
            w.write("model.layers.0.mlp", step, torch.tensor([1.0, 3.0, float("inf")]))
            w.write("model.norm", step, torch.tensor([True]))
            w.commit(step)
    return tmp_path / "r"


def test_show(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("show", recording, "layers.*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["0", "0", "model.layers.0.mlp", "float32[3]", "1", "2", "1", "3", "1.414", "0", "1"]
    assert glass("show", recording, "nothing") == 2
    assert glass("show", recording / "x") == 2


def test_show_json(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("show", recording, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["metadata"], document["complete"]) == ([0, 1], {"seed": 1}, True)
    assert [t["site"] for t in document["tensors"]] == ["model.layers.0.mlp", "model.norm"] * 2
    assert document["tensors"][0]["num_inf"] == 1


def test_show_says_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(1))
        w.commit(0)
        assert glass("show", tmp_path / "r") == 0
    assert capsys.readouterr().out.startswith("incomplete: it was never closed")


def recorded(path: Path, steps: int = 2, **metadata: object) -> Path:
    with RecordingWriter(path, metadata=metadata) as writer:
        for step in range(steps):
            writer.write("a", step, torch.arange(6.0) + step)
            writer.commit(step, token_ids=() if step else metadata.get("tokens", ()))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [[5]]}, "different token ids"),
        ({"steps": 3}, "--min-coverage"),
        ({"schema": 99}, "newer version"),
    ],
)
def test_incomparable_sides_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    ours = {"tokens": [[4]], **{key: value for key, value in change.items() if key != "schema"}}
    x = recorded(tmp_path / "x", **ours)  # type: ignore[arg-type]
    y = recorded(tmp_path / "y", tokens=[[4]])
    if "schema" in change:
        manifest = json.loads((y / "recording.json").read_text())
        (y / "recording.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    assert glass("compare", x, y) == 4
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_other_weights_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"class": "Net", "dtype": "float32"}
    x = recorded(tmp_path / "x", model_fingerprint="1", **facts)
    assert glass("compare", x, recorded(tmp_path / "y", model_fingerprint="2", **facts)) == 0
    assert "the weights are not the same" in capsys.readouterr().out
    assert glass("compare", x, recorded(tmp_path / "z", model_fingerprint="1", **facts)) == 0
    assert "the weights are not" not in capsys.readouterr().out


def test_names_of_others_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "fc\x1b[2J\u202eout\x07"
    for side, value in (("x", 1.0), ("y", 2.0)):
        torch.save({name: torch.full((4,), value)}, tmp_path / f"{side}.pt")
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt") == 1
    assert glass("compare", tmp_path / "x.pt", tmp_path / "y.pt", "--show-only", name + "s") == 2
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "fc\\x1b[2J\\u202eout" in text
        assert not set(text) & set(name) - set("fc[2Jout")
