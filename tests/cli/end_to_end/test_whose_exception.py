"""What the user's code raises: whose it was, its type and message, and the line; never a bug of Glass Engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glassengine.cli.main import main

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)

class Raises(Net):
    def forward(self, x):
        y = self.fc(x)
        raise ValueError("the port is not finished")

class Renamed(Net):
    def forward(self, hidden):
        assert hidden.shape[-1] == 5, "five are needed"
        return self.fc(hidden)

class Good(Net):
    def forward(self, hidden):
        return self.fc(hidden)

class Trained(Net):
    def forward(self, x, y):
        return (self.fc(x).sum(-1) - y).square().mean()

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise OSError("no backward")

class TrainedBackward(Trained):
    def forward(self, x, y):
        return Backward.apply(super().forward(x, y))

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("the rate is zero")

def net(): return Net().eval()
def raises(): return Raises().eval()
def renamed(): return Renamed().eval()
def good(): return Good().eval()
def trained(): return Trained()
def trained_backward(): return TrainedBackward()
def factory(): raise KeyError("no weights")
def inputs(): return {"x": torch.ones(2, 4)}
def wide(): return {"x": torch.ones(2, 5)}
def other(): return {"z": torch.ones(2, 5)}
def no_inputs(): raise IndexError("no batch")
def pass_(module): raise LookupError("no node")
def batches(): return [{"x": torch.ones(2, 4), "y": torch.ones(2)}] * 2
def no_optimizer(module): raise RuntimeError("no rate")
def bad_optimizer(module): return Optimizer(module.parameters(), lr=0.1)
def loss(result): raise EOFError("no loss")
def scheduled(module):
    made = torch.optim.SGD(module.parameters(), lr=0.1)
    def rate(step):
        if step: raise FloatingPointError("no rate")
        return 1.0
    return made, torch.optim.lr_scheduler.LambdaLR(made, rate)
def right_optimizer(module): return torch.optim.SGD(module.parameters(), lr=0.1)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECK = "check mine.py:net --inputs mine.py:inputs "
TRAIN = "check-training mine.py:trained --inputs mine.py:batches "


@pytest.mark.parametrize(
    ("line", "whose", "raised"),
    [
        (CHECK + "--candidate mine.py:raises", "the candidate cannot run", "ValueError: the port is not finished"),
        (CHECK + "--candidate mine.py:renamed", "the candidate's forward raised", "AssertionError: five are needed"),
        (
            "check mine.py:raises --inputs mine.py:inputs --candidate mine.py:net",
            "mine.py:raises cannot run on these inputs: its forward raised in Raises",
            "ValueError: the port is not finished",
        ),
        (
            "check mine.py:net --inputs mine.py:wide --candidate mine.py:net",
            "mine.py:net cannot run on these inputs: its forward raised in fc",
            "RuntimeError: mat1",
        ),
        ("build mine.py:raises --inputs mine.py:inputs", "mine.py:raises cannot run", "ValueError: the port"),
        (CHECK + "--candidate mine.py:factory", "mine.py:factory raised", "KeyError: 'no weights'"),
        ("check mine.py:net --inputs mine.py:no_inputs", "mine.py:no_inputs raised", "IndexError: no batch"),
        (CHECK + "--pass mine.py:pass_ --backend eager", "pass mine.py:pass_ failed", "LookupError: no node"),
        (TRAIN + "--optimizer mine.py:no_optimizer", "makes the optimizer raised", "RuntimeError: no rate"),
        (TRAIN + "--optimizer mine.py:bad_optimizer", "the optimizer Optimizer raised", "ZeroDivisionError: the rate"),
        (TRAIN + "--optimizer mine.py:scheduled", "the scheduler LambdaLR raised", "FloatingPointError: no rate"),
        (TRAIN + "--loss mine.py:loss", "the loss function raised", "EOFError: no loss"),
        (TRAIN + "--candidate mine.py:trained_backward", "the backward of TrainedBackward raised", "OSError: no back"),
        (
            "check-training mine.py:raises --inputs mine.py:inputs",
            "the forward of Raises raised",
            "ValueError: the port is not finished",
        ),
    ],
)
def test_u2_whose_exception_it_was(
    line: str, whose: str, raised: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), "-q"]) in (2, 4)
    said = capsys.readouterr().err
    assert whose in said and raised in said and re.search(r"mine\.py:\d+: ", said), said
    assert "bug" not in said and "Traceback" not in said and "do not match those of the baseline" not in said


def test_u2_inputs_that_fit_neither_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine.py:net", "--candidate", "mine.py:good", "--inputs", "mine.py:other", "-q"]) == 2
    said = capsys.readouterr().err
    assert "the inputs fit neither side: the baseline's forward raised in Net" in said
    assert "unexpected keyword argument 'z'" in said


def test_u2_code_that_raises_nothing_is_judged(here: Path) -> None:
    assert main((CHECK + "--candidate mine.py:good -q").split()) == 0
    assert main((TRAIN + "--candidate mine.py:trained --optimizer mine.py:right_optimizer -q").split()) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("check mine.py:net mine.py:good --candidate mine.py:good", "the candidate is given twice"),
        ("check-training mine.py:net mine.py:good --candidate mine.py:good", "the candidate is given twice"),
        ("check mine.py:net --inputs prompts.txt", "prompts are for a language model"),
        ("check gguf:nothing.gguf", "neither a directory nor an id of the hub"),
        ("check http:nothing:x", "neither a directory nor an id of the hub"),
        ("replay prompts.npz", "not a packed snapshot"),
        ("snapshot show prompts.npz", "not a packed snapshot"),
    ],
)
def test_u2_usages_that_had_no_good_message(
    line: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prompts.txt", "prompts.npz"):
        (here / name).write_text("hello\n")
    assert main([*line.split(), "-q"]) in (2, 4)
    assert message in capsys.readouterr().err
