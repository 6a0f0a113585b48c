"""`glass record`: models on given inputs, unmodified scripts, dry runs and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from glassengine.cli.main import main
from glassengine.cli.record import ScriptLine, read_script_line
from glassengine.errors import UsageError
from glassengine.recording import background as worker
from glassengine.recording.reader import Recording
from tests import children
from tests.capture.test_script_recorder import save_double
from tests.test_writing import largest_file

FACTORIES = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())

def inputs():
    return [{"input": torch.ones(1, 2)}, {"input": torch.zeros(4, 2)}]
"""

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
    def forward(self, *, x):
        return self.fc(x)

if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        loss = nn.MSELoss()(net(x=torch.ones(1, 2)), torch.zeros(1, 2))
        loss.backward()
        optimizer.step()
    compiled = torch.compile(Net(), backend="eager")
    with torch.no_grad():
        compiled(x=torch.ones(3, 2))
    print(sys.argv[1:], __name__)
    {ending}
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FACTORIES)
    return tmp_path / "net.py"


def test_a_model_on_given_inputs(factories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    assert main(["record", f"{factories}:model", "--inputs", f"{factories}:inputs", "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"recorded {out}: 2 steps, 12 tensors, 320 bytes of values" in shown.out
    assert f"glass show {out}" in shown.err
    opened = Recording.open(out)
    assert opened.complete and opened.steps == [0, 1] and opened.metadata["model_fingerprint"]
    assert opened.sites(0) == [".:in.input", "0:in[0]", "0", "1:in[0]", "1", "."]
    assert main(["record", f"{factories}:model", "--inputs", f"{factories}:inputs", "-o", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_dry_run_and_budget(factories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    command = ["record", f"{factories}:model", "--inputs", f"{factories}:inputs", "-o", str(out)]
    assert main([*command, "--dry-run"]) == 0
    assert "would record: 2 steps, 12 tensors, 320 bytes of values" in capsys.readouterr().out
    assert not out.exists()
    flags = ["--steps", "1", "--sites", "0*", "--byte-budget", "0.05k", "--json"]
    assert main([*command, *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_steps"], document["num_tensors"], document["num_left_out"]) == (1, 1, 1)
    assert document["value_bytes"] == 32


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "1-"], "0-3,7"),
        (["--byte-budget", "much"], "500M"),
        (["--gradients"], "glass record --gradients --optimizer -o DIR -- train.py"),
        (["--sites", "nothing"], "unknown site 'nothing'"),
        (["--max-new-tokens", "3"], "only a model that generates"),
    ],
)
def test_mistakes(
    factories: Path, tmp_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["record", f"{factories}:model", "--inputs", f"{factories}:inputs", "-o", str(tmp_path / "r")]
    assert main([*command, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ('{"input": torch.ones(1, 2), "mask": None}', ["not the arguments of the model", "'mask'", "expected: input"]),
        ('{"input": torch.ones(1, 5)}', ["the model raised on its inputs, in 0", "cannot be multiplied"]),
    ],
)
def test_inputs_that_the_model_does_not_take(
    factories: Path, tmp_path: Path, inputs: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    factories.write_text(f"{FACTORIES}\ndef wrong():\n    return {inputs}\n")
    assert main(["record", f"{factories}:model", "--inputs", f"{factories}:wrong", "-o", str(tmp_path / "r")]) == 2
    shown = capsys.readouterr().err
    assert all(text in shown for text in said) and "bug" not in shown


def test_whether_it_survives_a_kill(factories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = worker.ring_file
    monkeypatch.setattr(worker, "ring_file", lambda path, sizes: made.append(path) or real(path, sizes))
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.nn.ReLU()(torch.ones(2))\n")
    targets = [f"{factories}:model", "--inputs", f"{factories}:inputs"], ["--", str(script)]
    for number, target in enumerate(targets):
        for durable in (True, False):
            path = tmp_path / f"r{number}-{durable}"
            flags = [] if durable else ["--no-durable"]
            assert main(["record", "-o", str(path), *flags, *target]) == 0
            assert bool(made) is durable, target
            made.clear()


def test_targets_that_cannot_be_recorded(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", f"{factories}:model"]) == 2
    assert "--inputs" in capsys.readouterr().err
    assert main(["record", "--", "no-such-script.py"]) == 2
    assert "no such script" in capsys.readouterr().err


def run_script(
    tmp_path: Path, *command: str, ending: str = "pass", **variables: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("{ending}", ending))
    return children.run(
        [sys.executable, *command],
        imports=children.COMPILING,
        cwd=tmp_path,
        timeout=600,
        env={**os.environ, **variables},
    )


def test_an_unmodified_script(tmp_path: Path) -> None:
    done = run_script(tmp_path, "-m", "glassengine.cli", "record", "-o", "out", "--", "train.py", "2", "--flag")
    assert (done.returncode, done.stdout) == (0, "['2', '--flag'] __main__\n"), done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"Net", "Net-2", "MSELoss", "MSELoss-2"}
    opened = Recording.open(tmp_path / "out" / "Net")
    assert opened.complete and opened.steps == [0, 1]
    assert opened.sites() == [".:in.x", "fc:in[0]", "fc", "."]
    compiled = Recording.open(tmp_path / "out" / "Net-2")
    assert compiled.sites() == [".:in.x", "."] and compiled.tensor(".").shape == (3, 2)


@pytest.mark.parametrize("module", [pytest.param("package", marks=pytest.mark.slow), "package.tools.run"])
def test_a_module(tmp_path: Path, module: str) -> None:
    ending = "print(sys.argv[0], __spec__.name, __package__)"
    script = textwrap.dedent(SCRIPT).replace("{ending}", ending)
    tools = tmp_path / "package" / "tools"
    tools.mkdir(parents=True)
    (tmp_path / "package" / "helper.py").write_text("import sys")
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text("from .helper import sys\n" + script)
    (tools / "run.py").write_text("from ..helper import sys\n" + script)
    python = run_script(tmp_path, "-m", module, "2", "--flag", ending=ending)
    done = run_script(
        tmp_path, "-m", "glassengine.cli", "record", "-o", "out", "--", "-m", module, "2", "--flag", ending=ending
    )
    assert (done.returncode, done.stdout) == (python.returncode, python.stdout) == (0, python.stdout), done.stderr
    assert "['2', '--flag'] __main__\n" in done.stdout
    assert Recording.open(tmp_path / "out" / "Net").sites() == [".:in.x", "fc:in[0]", "fc", "."]


@pytest.mark.parametrize("module", ["no_such", "no_such.module", "tests_without_main", "..", "torch._C"])
def test_modules_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests_without_main").mkdir()
    assert main(["record", "--", "-m", module]) == 2
    assert "no such module" in capsys.readouterr().err and not (tmp_path / "glass-recording").exists()
    (tmp_path / "tests_without_main" / "broken").mkdir()
    (tmp_path / "tests_without_main" / "broken" / "__init__.py").write_text("raise RuntimeError('planted')")
    assert main(["record", "--", "-m", "tests_without_main.broken.run"]) == 2
    assert "RuntimeError: planted" in capsys.readouterr().err
    assert main(["record", "--", "-m"]) == 2
    assert "no module is named" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "status"), [("raise KeyError('planted')", 1), ("sys.exit(7)", 7)])
def test_a_script_ends_as_it_would(tmp_path: Path, ending: str, status: int) -> None:
    done = run_script(tmp_path, "-m", "glassengine.cli", "record", "-o", "out", "--", "train.py", "1", ending=ending)
    assert done.returncode == status
    if status == 1:
        unseen, first, *_ = done.stderr.splitlines()
        assert unseen.startswith("warning: not seen: fc runs inside of compiled code")
        assert first == "Traceback (most recent call last):"
        assert "KeyError: 'planted'" in done.stderr and "glassengine" not in done.stderr.split("KeyError")[0]
    opened = Recording.open(tmp_path / "out" / "Net")
    assert opened.steps == [0] and not opened.complete


def test_one_import_records(tmp_path: Path) -> None:
    code = "import sys, glassengine.auto, runpy; sys.argv[1:] = ['2']; runpy.run_path('train.py', run_name='__main__')"
    done = run_script(tmp_path, "-c", code, GLASS_RECORD_DIR="here")
    assert done.returncode == 0, done.stderr
    assert Recording.open(tmp_path / "here" / "Net").steps == [0, 1]
    assert Recording.open(tmp_path / "here" / "Net").complete


def test_sessions_of_onnx_runtime(tmp_path: Path) -> None:
    save_double(tmp_path / "double.onnx")
    (tmp_path / "serve.py").write_text(
        "import numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession('double.onnx')\n"
        "for i in range(3): session.run(None, {'x': numpy.full(2, i, numpy.float32)})\n"
    )
    done = run_script(tmp_path, "-m", "glassengine.cli", "record", "-o", "out", "serve.py")
    assert done.returncode == 0, done.stderr
    opened = Recording.open(tmp_path / "out" / "double")
    assert opened.complete and opened.steps == [0, 1, 2]
    assert torch.equal(opened.tensor(".:out.y", 2), torch.full((2,), 4.0))
    assert torch.equal(opened.tensor(".:in.x", 1), torch.ones(2))


def test_a_disk_that_fills_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "model = torch.nn.Flatten\n"
        "def inputs():\n    return [{'input': torch.full((1024, 256), float(step))} for step in range(12)]\n"
    )
    net = tmp_path / "net.py"
    with largest_file((1 << 18) + (6 << 20)):
        status = main(["record", f"{net}:model", "--inputs", f"{net}:inputs", "-o", str(tmp_path / "r")])
    said = capsys.readouterr().err
    assert status == 2 and "the recording cannot be written" in said
    opened = Recording.open(tmp_path / "r")
    assert (
        not opened.complete
        and opened.steps
        and all(float(opened.tensor(".", step)[0, 0]) == step for step in opened.steps)
    )


def test_a_disk_that_fills_up_while_an_engine_runs(
    engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(engine_directory), "--input-text", "ab", "--max-new-tokens", "32", "--record"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    whole = Recording.open(tmp_path / "whole")
    half = sum(entry.nbytes for entry in whole.entries) // 2
    capsys.readouterr()
    with largest_file((1 << 18) + half):
        status = main([*command, str(tmp_path / "r")])
    said = capsys.readouterr().err
    assert status == 2 and "the recording cannot be written" in said and "completed steps are safe" in said
    opened = Recording.open(tmp_path / "r")
    assert not opened.complete and 0 < len(opened.steps) < len(whole.steps)
    for entry in opened.entries:
        assert torch.equal(opened.tensor(entry), whole.tensor(entry.site, entry.step))


def test_f40_the_directory_for_artifacts_gets_the_steps_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\nnet = torch.nn.Linear(2, 2).requires_grad_(False)\n"
        "for i in range(2): net(torch.full((2,), float(i)))\n"
    )
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", str(tmp_path / "artifacts"))
    command = ["record", "--overwrite", "-o", str(tmp_path / "out"), "--", str(tmp_path / "script.py")]
    assert main(command) == 0
    found = torch.load(tmp_path / "artifacts" / "Linear" / "step1.pt", weights_only=True)
    opened = Recording.open(tmp_path / "out")
    assert list(found) == [".:in[0]", "."] and torch.equal(found["."], opened.tensor(".", 1))
    assert "min 1" in (tmp_path / "artifacts" / "Linear" / "step1.txt").read_text()
    assert f"wrote the tensors of 2 steps to {tmp_path / 'artifacts' / 'Linear'}" in capsys.readouterr().err
    assert main(command) == 0  # an earlier run's files are not mixed with the new ones
    assert (tmp_path / "artifacts" / "Linear" / "earlier-001" / "step1.pt").is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["gguf:model.gguf", "--sites", "*"], "a serving engine is recorded whole"),
        (["gguf:model.gguf", "--dry-run"], "a serving engine is recorded whole"),
        (["net.py:model", "--as-deployed"], "--as-deployed, --library and --python are for"),
        (["gguf:model.gguf"], "no such GGUF file"),
        (["genai:folder"], "no such file"),
    ],
)
def test_flags_of_serving_engines(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", *flags, "-o", "rec"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "rec").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x.py -a", ScriptLine("x.py", ("-a",))),
        ("-m pkg.mod a", ScriptLine("pkg.mod", ("a",), is_module=True)),
        ("python x.py a", ScriptLine("x.py", ("a",))),
        ("python3.11 -u -W error -X dev -Wonce x.py -u", ScriptLine("x.py", ("-u",))),
        ("python3 -m mod -a", ScriptLine("mod", ("-a",), is_module=True)),
        ("python -uB no-ending a", ScriptLine("no-ending", ("a",))),
        ("model.onnx", None),
        ("python", None),
        ("some/model", None),
    ],
)
def test_f41_lines_that_run_a_script(line: str, expected: ScriptLine | None) -> None:
    assert read_script_line(line.split()) == expected


def test_f41_this_python_by_its_path_and_others() -> None:
    assert read_script_line([sys.executable, "x.py"]) == ScriptLine("x.py", ())
    with pytest.raises(UsageError, match="/opt/other/bin/python -m glassengine record"):
        read_script_line(["/opt/other/bin/python", "x.py"])


@pytest.mark.parametrize(
    ("line", "said"), [("python -c pass", "script.py"), ("torchrun x.py", "torchrun ... -m glass")]
)
def test_f41_lines_that_cannot_be_recorded(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_script_line(line.split())


def test_f41_scripts_without_an_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train"
    script.write_text("#!/usr/bin/env python3\nimport torch\ntorch.nn.ReLU()(torch.ones(2))\n")
    assert read_script_line([str(script), "a"]) == ScriptLine(str(script), ("a",))
    assert main(["record", "-o", str(tmp_path / "out"), "--", "python", str(script)]) == 0
    assert "glass show" in capsys.readouterr().err
    script.write_text("#!/bin/sh\n")
    assert read_script_line([str(script)]) is None
