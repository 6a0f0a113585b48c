"""What is asked for by name: refused at once, with what there is, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import asked
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program import load_model

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)

def optimizer(module):
    return torch.optim.SGD(module.parameters())

def net():
    return Net().eval()

def _own():
    return None

made = net
"""
DYNAMIC = "globals()['late'] = lambda: None\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"mine.py": FILE, "dynamic.py": DYNAMIC, "broken.py": "def f(:\n", "empty.py": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = [
    (["check", "mine.py:net", "--dtype", "float99"], "unknown dtype"),
    (["check", "nowhere/at/all"], "unknown model directory"),
    (["check", "missing.py:net"], "no such file: missing.py"),
    (["check", "mine.py"], "mine.py:net"),
    (["check", "mine.py:nett"], "nearest: net"),
    (["check", "broken.py:f"], "SyntaxError"),
    (["check", "mine.py:net", "--candidate", "missing.py:net"], "no such file"),
    (["check", "mine.py:net", "--candidate", "mine.py"], "mine.py:net"),
    (["check", "mine.py:net", "--inputs", "nothing.npz"], "unknown inputs file"),
    (["check", "mine.py:net", "--inputs", "mine.py:inputs"], "unknown function"),
    (["check", "mine.py:net", "--pass", "mine.py:pass_"], "unknown function"),
    (["check", "mine.py:net", "--backend", "inducktor"], "nearest: inductor"),
    (["check", "mine.py:net", "--candidate", "mine.py:net", "--backend", "eager"], "build an engine of BASELINE"),
    (["check", "mine.py:net", "--candidate", "mine.py:net", "--all-levels"], "are for engines"),
    (
        ["check", "mine.py:net", "--candidate", "gguf:a.gguf", "--quantize", "Q4_0"],
        "for the engine that a check builds",
    ),
    (["check", "mine.py:net", "--candidate", "mine.py:net", "--tensor-parallel", "2"], "is for the engine"),
    (["check", "mine.py:net", "--candidate", "mine.py:net", "--quantize", "Q8_0"], "is for the engine"),
    (["check-training", "mine.py:net", "--optimizer", "mine.py:sgd"], "unknown function"),
    (["check-training", "mine.py:net", "--loss", "missing.py:loss"], "no such file"),
    (["build", "mine.py:net", "--dtype", "int4"], "unknown dtype"),
    (["build", "empty.py"], "file.py:function"),
    (["sites", "nowhere/at/all"], "unknown model directory"),
    (["run", "nothing", "--input-text", "a"], "unknown engine directory"),
    (["record", "--", "missing.py"], "no such script"),
    (["watch", "missing.py", "--", "missing.py"], "glass watch 'a.py ARGS' -- b.py ARGS"),
    (["record", "mine.py:net", "--inputs", "nothing.pt"], "unknown inputs file"),
    (["show", "nothing"], "no such file"),
    (["replay", "nothing"], "no such file"),
    (["snapshot", "show", "nothing"], "no such file"),
    (["compare", "nothing.npz", "nothing2.npz"], "no such file"),
    (["report", "nothing.json", "-o", "x"], "cannot be read"),
]


def test_u3_what_cannot_be_there_is_refused_before_torch_is_imported(here: Path) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from glassengine.cli.main import main\n"
        "found = []\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        status = main(line)\n"
        "    found.append([status, said.getvalue(), 'torch' in sys.modules or 'transformers' in sys.modules])\n"
        "print(json.dumps(found))\n"
    )
    words = [sys.executable, "-c", code, json.dumps([line for line, _ in WRONG])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    for (line, message), (status, said, has_torch) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert (status, has_torch) == (2, False) and message in said, (line, said)


def test_u3_what_is_there_is_not_refused(here: Path) -> None:
    for spec in ("mine.py:net", "mine.py:made", "mine.py:Net", "dynamic.py:late", "package.module:name", "org/name"):
        assert asked.model(spec) == spec
    for spec in ("s3://bucket/model", "gguf:file.gguf", "vllm:folder", str(here)):
        assert asked.model(spec) == spec
    assert asked.inputs("mine.py:net") == "mine.py:net"
    assert asked.functions(["mine.py:optimizer"]) == ["mine.py:optimizer"] and asked.functions(None) is None
    assert asked.function("dynamic.py:anything") == "dynamic.py:anything"


def test_u2_a_file_without_a_function_names_those_that_it_has(here: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.py:net, mine\.py:optimizer") as caught:
        glass.check("mine.py")
    assert "_own" not in str(caught.value)
    (here / "many.py").write_text("".join(f"def f{number}():\n    pass\n" for number in range(30)))
    with pytest.raises(UsageError, match=r"many\.py:f7, \.\.\.$"):
        asked.model("many.py")
    with pytest.raises(UnknownNameError, match="one of net, optimizer"):
        load_model("mine.py:zzz")


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("fp16 half F16 float16 torch.float16", torch.float16),
        ("bf16 BF16 bfloat16 torch.bfloat16", torch.bfloat16),
        ("fp32 float single float32", torch.float32),
        ("fp64 double", torch.float64),
    ],
)
def test_u2_usual_names_of_dtypes_are_known(names: str, dtype: torch.dtype) -> None:
    for name in names.split():
        assert load_model(nn.Linear(2, 2), dtype=name).module.weight.dtype is dtype
    assert asked.dtype("auto") == "auto" and asked.dtype(None) is None


@pytest.mark.parametrize("name", ["int4", "fp8", "float99", ""])
def test_u2_other_names_of_dtypes_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype"):
        asked.dtype(name or "none")
