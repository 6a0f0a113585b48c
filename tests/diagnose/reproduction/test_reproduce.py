"""Reproductions: each fails as long as the mistake is there and passes without it, with nothing but torch."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.cli.main import main
from glassengine.diagnose import check
from glassengine.diagnose.reproduction.files import FILES, Reproduction, run_reproduction, write_reproduction
from glassengine.diagnose.reproduction.template import comment, function_source
from glassengine.errors import UsageError
from glassengine.judge.pieces import Piece, piece_of
from glassengine.results import Comparison
from glassengine.testing import models
from tests import children

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.up.weight.data[3, 5] *= {factor}

    def forward(self, x):
        return {forward}

def model():
    return Net().eval()

def inputs():
    return {{"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}}
"""
RIGHT = "self.down(torch.relu(self.norm(self.up(x))))"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "baseline.py"
    path.write_text(MODEL.format(forward=RIGHT, factor=1))
    return path


def checked(baseline: Path, directory: Path, **options: Any) -> Comparison:
    return check(f"{baseline}:model", inputs=f"{baseline}:inputs", reproduction=directory, **options)


def about(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "reproduction.json").read_text())
    return found


def edit(directory: Path, old: str, new: str) -> None:
    path = directory / "test_repro.py"
    text = path.read_text()
    head, candidate, rest = text.partition("def candidate")
    assert rest.count(old) == 1
    path.write_text(head + candidate + rest.replace(old, new))


@pytest.fixture(scope="module")
def scaled(baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reproduction of a factor that somebody wrote into the candidate."""
    folder: Path = tmp_path_factory.mktemp("scaled")
    forward = RIGHT.replace("self.up(x))", "self.up(x)) * 1.01")
    (folder / "candidate.py").write_text(MODEL.format(forward=forward, factor=1))
    found = checked(baseline, folder / "repro", candidate=f"{folder}/candidate.py:model").first_divergence
    assert found is not None and found.reproduction == str(folder / "repro")
    return folder / "repro"


def test_an_edit_of_a_models_source_fails_until_it_is_undone(scaled: Path) -> None:
    assert sorted(path.name for path in scaled.iterdir()) == sorted(FILES)
    told = about(scaled)
    assert told["runner"] == "eager" and told["level"] == "candidate" and "candidate.py:" in told["candidate source"]
    text = (scaled / "test_repro.py").read_text()
    # Its graph is the op of the baseline, and what the candidate has in its place.
    expected, candidate = text.partition("def candidate")[0].partition("def expected")[2], text.partition("def cand")[2]
    assert expected.count("torch.ops.") == 1
    assert candidate.partition("def disagreement")[0].count("torch.ops.") <= 2
    assert "further from float64 than rounding explains" in run_reproduction(scaled)
    kept = (scaled / "test_repro.py").read_text()
    try:
        edit(scaled, ", 1.01)", ", 1.0)")
        assert run_reproduction(scaled) == ""
    finally:
        (scaled / "test_repro.py").write_text(kept)


def test_the_report_has_all_that_a_maintainer_asks_for(scaled: Path) -> None:
    text = (scaled / "issue.md").read_text()
    site = about(scaled)["site"]
    assert text.startswith(f"# {site}: ")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *("## First wrong operation", "## Values", "## Minimal script", "## Environment")
    ]
    (found, wanted, room) = re.search(
        r"the candidate has (\S+), float64 gives (\S+); rounding explains (\S+)\. ", text
    ).groups()  # type: ignore[union-attr]
    assert float(found) == pytest.approx(float(wanted) * 1.01, rel=1e-4) and float(room) < 1e-4
    assert (scaled / "test_repro.py").read_text().rstrip() in text
    assert f"- torch {torch.__version__}" in text and "- command: `" in text


def test_a_reproduction_needs_torch_and_safetensors_only(scaled: Path, tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.modules['glassengine'] = None; sys.path[:0] = []; runpy.run_path({!r}, run_name={!r})"
    )
    path = str(scaled / "test_repro.py")
    done = subprocess.run(
        [sys.executable, "-I", "-c", code.format(path, "__main__")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "further from float64 than rounding explains" in done.stderr
    assert "glassengine" not in done.stderr
    # As a test of pytest: what float64 gives is stored, what the candidate gives is wrong.
    code = "import test_repro as t; t.test_expected_is_what_float64_gives(); t.test_actual_agrees_with_expected()"
    done = children.run([sys.executable, "-c", code], cwd=scaled)
    assert done.returncode == 1 and "AssertionError" in done.stderr and "test_actual_agrees" in done.stderr


def test_a_bug_of_a_pass_fails_until_it_is_undone(baseline: Path, tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text(
        textwrap.dedent(
            """
            def wrong_epsilon(module):
                for node in module.graph.nodes:
                    if "layer_norm" in node.name:
                        node.args = (*node.args[:4], 0.5, *node.args[5:])
            """
        )
    )
    folder = tmp_path / "repro"
    result = checked(baseline, folder, passes=[f"{tmp_path}/passes.py:wrong_epsilon"], backend="eager")
    found = result.first_divergence
    assert found is not None and found.level.startswith("pass ") and found.reproduction == str(folder)
    assert "wrong_epsilon" in about(folder)["level"]
    assert "further from float64" in run_reproduction(folder)
    edit(folder, "0.5", "1e-05")
    assert run_reproduction(folder) == ""


def test_a_wrong_weight_fails_until_it_is_the_baselines(baseline: Path, tmp_path: Path) -> None:
    (tmp_path / "candidate.py").write_text(MODEL.format(forward=RIGHT, factor=-2))
    folder = tmp_path / "repro"
    result = checked(baseline, folder, candidate=f"{tmp_path}/candidate.py:model")
    assert result.first_divergence is not None and result.first_divergence.reproduction == str(folder)
    assert result.first_divergence in result.origins
    tensors = about(folder)["tensors"]
    assert sorted(text.partition(" (")[0] for name, text in tensors.items() if name.startswith("w")) == [
        "up.bias",
        "up.weight",
        "up.weight",
    ]
    assert "further from float64" in run_reproduction(folder)
    weights = load_file(folder / "weights.safetensors")
    ours, theirs = (
        next(name for name, text in tensors.items() if text.startswith(f"up.weight ({side})"))
        for side in ("baseline", "candidate")
    )
    save_file(weights | {theirs: weights[ours].clone()}, folder / "weights.safetensors")
    assert run_reproduction(folder) == ""


@pytest.mark.slow
def test_a_candidate_in_a_coarser_dtype(tmp_path: Path, token_ids: str, llama: nn.Module) -> None:
    candidate: Any = models.llama()
    candidate.model.layers[1].mlp.down_proj.weight.data[3] *= 2
    folder = tmp_path / "repro"
    found = check(llama, candidate=candidate.to(torch.bfloat16), inputs=token_ids, reproduction=folder)
    assert found.first_divergence is not None and found.first_divergence.site.endswith("mlp.down_proj/linear.0")
    assert about(folder)["runner"] == "eager" and "further from float64" in run_reproduction(folder)
    weights, tensors = load_file(folder / "weights.safetensors"), about(folder)["tensors"]
    ours, theirs = (
        next(name for name, text in tensors.items() if f"({side})" in text) for side in ("baseline", "candidate")
    )
    # Rounding of the weights to bfloat16 alone is no failure.
    save_file(weights | {theirs: weights[ours].to(torch.bfloat16)}, folder / "weights.safetensors")
    assert run_reproduction(folder) == ""


@pytest.mark.slow
def test_a_bug_of_inductor_fails_as_long_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "relu.py"
    path.write_text(MODEL.format(forward="torch.relu(self.up(x))", factor=1))
    folder = tmp_path / "repro"
    with torch._inductor.config.patch("cpp.inject_relu_bug_TESTING_ONLY", "accuracy"):
        result = checked(path, folder, backend="inductor")
        found = result.first_divergence
        assert found is not None and found.level in ("op-by-op", "engine") and found.site == "./relu.0"
        assert about(folder)["runner"] in ("inductor", "aot_inductor")
        assert "further from float64" in run_reproduction(folder)
        # The report has the call of torch's own minifier, which says that the result is wrong.
        (script,) = re.findall(r"^```python\n(import torch\n.*?)```$", (folder / "issue.md").read_text(), re.S | re.M)
        monkeypatch.syspath_prepend(folder)
        exec(script, {})
        assert capsys.readouterr().out == "False\n"
    text = (folder / "test_repro.py").read_text()
    assert text.partition("def candidate")[2].count("torch.ops.") == 1
    assert run_reproduction(folder) == ""


def test_graphs_that_cannot_be_exported_are_kept_as_recorded(baseline: Path, tmp_path: Path) -> None:
    # It can be traced by nothing: it raises under every mode that traces.
    alone = "torch.utils._python_dispatch._get_current_dispatch_mode() is None"
    forward = f"self.down(torch.relu(self.norm(self.up(x)))) * (1.01 if {alone} else 1 // 0)"
    (tmp_path / "port.py").write_text(MODEL.format(forward=forward, factor=1))
    folder = tmp_path / "repro"
    result = checked(baseline, folder, candidate=f"{tmp_path}/port.py:model", min_coverage=0.0)
    found = result.first_divergence
    assert found is not None and found.level == "candidate, untouched" and about(folder)["runner"] == "recorded"
    assert "further from float64" in run_reproduction(folder)
    actual = load_file(folder / "actual.safetensors")
    save_file({name: tensor / 1.01 for name, tensor in actual.items()}, folder / "actual.safetensors")
    assert run_reproduction(folder) == ""


def test_a_clean_model_leaves_nothing_behind(baseline: Path, tmp_path: Path) -> None:
    result = checked(baseline, tmp_path / "repro", candidate=f"{baseline}:model")
    assert result.ok and result.first_divergence is None
    assert not (tmp_path / "repro").exists()


def test_the_command_says_where_the_test_is(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("baseline.py").write_text(baseline.read_text())
    Path("candidate.py").write_text(MODEL.format(forward=RIGHT.replace("relu", "tanh"), factor=1))
    command = ["check", "baseline.py:model", "--inputs", "baseline.py:inputs", "--candidate", "candidate.py:model"]
    assert main(command) == 1
    assert "--reproduction DIR" in capsys.readouterr().out
    folder = tmp_path / "repro"
    assert main([*command, "--reproduction", str(folder), "--json", str(tmp_path / "check.json")]) == 1
    assert f"python {folder}/test_repro.py" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["first_divergence"]["reproduction"] == str(folder)


def test_a_directory_with_other_files_is_refused_before_anything_runs(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    command = ["check", f"{baseline}:model", "--inputs", f"{baseline}:model", "--reproduction", str(tmp_path)]
    assert main(command) == 2
    assert "holds other files than a reproduction" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "notes.txt")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_answer_outlives_a_reproduction_that_cannot_be_written(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "candidate.py").write_text(MODEL.format(forward=RIGHT.replace("relu", "tanh"), factor=1))
    (tmp_path / "file").write_text("mine")
    command = ["check", f"{baseline}:model", "--inputs", f"{baseline}:inputs"]
    command += ["--candidate", f"{tmp_path}/candidate.py:model", "--reproduction", f"{tmp_path}/file/below"]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "first divergence" in shown.out and "no reproduction in" in shown.err


def test_an_op_that_cannot_be_written_leaves_the_recorded_result(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "candidate.py").write_text(MODEL.format(forward=RIGHT.replace("relu", "tanh"), factor=1))

    def refused(*arguments: Any, **options: Any) -> str:
        raise UsageError("a literal cannot be written as source")

    monkeypatch.setattr("glassengine.diagnose.reproduction.files.function_source", refused)
    found = checked(baseline, tmp_path / "repro", candidate=f"{tmp_path}/candidate.py:model").first_divergence
    assert found is not None and found.reproduction and about(tmp_path / "repro")["runner"] == "recorded"
    assert "further from float64" in run_reproduction(tmp_path / "repro")


def piece() -> Piece:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    module = make_fx(lambda x: torch.nn.functional.gelu(x.masked_fill(x > 1, -torch.inf).t(), approximate="tanh"))(x)
    values = {"x_1": x}
    found = piece_of([node for node in module.graph.nodes if node.op == "call_function"], _all(module, values))
    assert found is not None
    return found


def _all(module: torch.fx.GraphModule, values: dict[str, Any]) -> dict[str, Any]:
    from glassengine.judge.pieces import NodeRecorder

    recorder = NodeRecorder(module)
    recorder.run(*values.values())
    return recorder.values


def small(**changes: Any) -> Reproduction:
    found = piece()
    exact = found.exact()
    allowed = [torch.zeros(value.shape, dtype=torch.float64) + 1e-6 for value in exact]
    given = {"about": {"site": "a"}, "runner": "eager", "exact": found, "candidate": found, **changes}
    return Reproduction(**given, expected=exact, allowed=allowed, actual=found.run())


def test_source_computes_what_the_graph_computes() -> None:
    found = piece()
    (name,) = found.inputs
    scope: dict[str, Any] = {"torch": torch}
    exec(function_source("f", found, {name: "x0"}) + function_source("g", found, {name: "x0"}, float64=True), scope)
    for function, inputs, results in (
        ("f", found.inputs[name], found.run()),
        ("g", found.inputs[name].double(), found.exact()),
    ):
        torch.testing.assert_close(scope[function](inputs)[0], results[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", ["a\nimport os", "a\r\x0cb", "\u2028x", '"""', "\\", "\udcff", "x" * 10_000])
def test_texts_of_a_model_stay_comments(text: str, tmp_path: Path) -> None:
    assert len(comment(text).splitlines()) == 1 and comment(text).isascii()
    about = {"site": text, "source": f"{text}\nraise SystemExit('ran')"}
    write_reproduction(tmp_path / "repro", small(about=about, sites={"e:x_1": text, "c:x_1": text}))
    assert run_reproduction(tmp_path / "repro") == ""


@pytest.mark.parametrize("key", ["x=1", "a b", "é;", "import", ""])
def test_a_name_that_is_no_name_is_never_written(key: str) -> None:
    found = piece()
    found.ops[-1].kwargs = {key: 1}
    with pytest.raises(UsageError, match="cannot be written as source"):
        function_source("f", found, dict.fromkeys(found.inputs, "x0"))


def test_an_earlier_reproduction_is_put_away(tmp_path: Path) -> None:
    write_reproduction(tmp_path, small(about={"site": "first"}))
    write_reproduction(tmp_path, small(about={"site": "second"}))
    assert about(tmp_path)["site"] == "second" and about(tmp_path / "earlier-001")["site"] == "first"
    assert run_reproduction(tmp_path / "earlier-001") == ""


def test_a_full_disk_leaves_the_earlier_one(tmp_path: Path) -> None:
    write_reproduction(tmp_path, small(about={"site": "first"}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(OSError, match="too large"):
            write_reproduction(tmp_path, small(about={"site": "second"}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert about(tmp_path / "earlier-001")["site"] == "first"
    assert not (tmp_path / "reproduction.json").exists()
    write_reproduction(tmp_path, small(about={"site": "third"}))
    assert run_reproduction(tmp_path) == ""
