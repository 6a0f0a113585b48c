"""`glass check` through the command line: exit status, streams, JSON, messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glassengine.cli.main import main

FACTORIES = """
import torch
from torch import nn
from glassengine.testing import models

def clean():
    return models.llama(num_hidden_layers=1)

def wrong():
    model = clean()
    model.model.layers[0].mlp.down_proj.weight.data[7] *= 1.5
    return model

def vision():
    return models.vision()

class Nested(nn.Module):
    def forward(self, batch):
        return batch["x"] + batch["y"]

def nested():
    return Nested()

def fails():
    raise ValueError("no weights here")
"""

Run = Callable[..., int]


@pytest.fixture
def factories(tmp_path: Path) -> str:
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    return str(file)


@pytest.fixture
def ids(tmp_path: Path) -> str:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"input_ids": [5, 17, 99, 3, 42]}))
    return str(file)


def test_a_clean_ladder_exits_0(factories: str, ids: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{factories}:clean", "--backend", "eager", "--inputs", ids, "--steps", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ok: ")
    for level in ("exported program", "engine", "release"):
        assert f"\n{level} " in printed.out
    assert "exporting the program" in printed.err and "exporting" not in printed.out


def test_a_mistake_exits_1_and_json_is_one_document(
    factories: str, ids: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "check",
        f"{factories}:clean",
        "--candidate",
        f"{factories}:wrong",
        "--inputs",
        ids,
        "--steps",
        "0",
        "--json",
        "-",
        "-q",
    ]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["ok"] is False and data["first_divergence"]["site"] == "model.layers.0.mlp.down_proj/linear.0"
    assert printed.err == ""


def test_json_to_a_file_keeps_the_screen(
    factories: str, ids: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    arguments = [
        "check",
        f"{factories}:clean",
        f"{factories}:wrong",  # without --candidate
        "--inputs",
        ids,
        "--steps",
        "0",
        "--json",
        str(target),
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "first divergence: model.layers.0.mlp.down_proj/linear.0" in out
    assert "down_proj.weight differs in 128 of 8192 elements" in out
    assert json.loads(target.read_text())["verdict"] == "wrong"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere/at/all"], 2, "unknown model"),
        (["{file}:missing"], 2, "unknown function"),
        (["{file}:fails"], 2, "ValueError: no weights here"),
        (["{file}:nested"], 2, "give inputs with --inputs"),
        (["{file}:clean", "--inputs", "nothing.json"], 2, "nothing.json"),
        (["{file}:clean", "--dtype", "float99"], 2, "unknown dtype"),
        # Said before anything is loaded.
        (["nowhere/at/all", "--backend", "inducktor"], 2, "nearest: inductor"),
        (["{file}:clean", "--candidate", "{file}:wrong", "--backend", "eager"], 2, "remove them"),
        (["{file}:clean", "{file}:wrong", "--candidate", "{file}:wrong"], 2, "the candidate is given twice"),
        (["{file}:clean", "{file}:wrnog"], 2, "unknown function"),
        (["{file}:clean", "--candidate", "{file}:vision", "--inputs", "{ids}"], 4, "do not match those of"),
        (
            ["{file}:clean", "--pass", "{file}:missing", "--backend", "eager", "--inputs", "{ids}"],
            2,
            "unknown function",
        ),
    ],
)
def test_bad_input(
    arguments: list[str], status: int, message: str, factories: str, ids: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.format(file=factories, ids=ids) for text in arguments]
    assert main(["check", *filled]) == status
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.out == ""


def test_ids_outside_of_the_vocabulary(factories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"input_ids": [5, 4000]}))
    assert main(["check", f"{factories}:clean", "--backend", "eager", "--inputs", str(file)]) == 2
    assert "outside" in capsys.readouterr().err


def test_an_engine_as_candidate(factories: str, ids: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(tmp_path / "engine")
    assert main(["build", f"{factories}:wrong", engine, "--backend", "eager", "-q"]) == 0
    assert main(["check", f"{factories}:wrong", "--candidate", engine, "--inputs", ids, "--steps", "1"]) == 0
    assert "release" in capsys.readouterr().out
    assert main(["check", f"{factories}:clean", "--candidate", engine, "--inputs", ids, "--steps", "1"]) == 1
    assert "first divergence: model.layers.0.mlp.down_proj/linear.0" in capsys.readouterr().out


TRAINING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.down(torch.tanh(self.up(x)))[:, 0] - y).square()

def baseline():
    torch.manual_seed(0)
    return Net()

def wrong():
    net = baseline()
    net.down.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 1.1,))
    return net

def inputs():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(5, 4, generator=generator), "y": torch.randn(5, generator=generator)} for _ in range(2)]

def mean(result):
    return result.mean()

def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)

def faster(module):
    return torch.optim.SGD(module.parameters(), lr=0.2)
"""


@pytest.fixture
def training(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that gives the command line of a training check with more flags."""
    file = tmp_path / "training.py"
    file.write_text(TRAINING)

    def command(**names: str) -> list[str]:
        flags = [part for flag, name in names.items() for part in (f"--{flag.replace('_', '-')}", f"{file}:{name}")]
        return [
            "check-training",
            f"{file}:baseline",
            "--inputs",
            f"{file}:inputs",
            "--loss",
            f"{file}:mean",
            *flags,
        ]

    return command


@pytest.mark.parametrize(
    ("names", "status", "level"),
    [
        ({"candidate": "wrong"}, 1, "backward"),
        ({"optimizer": "sgd", "candidate_optimizer": "faster"}, 1, "update"),
        ({"candidate": "baseline", "optimizer": "sgd"}, 0, None),
    ],
)
def test_training_steps(
    training: Callable[..., list[str]],
    names: dict[str, str],
    status: int,
    level: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*training(**names), "--json", "-"]) == status
    found = json.loads(capsys.readouterr().out)["first_divergence"]
    assert (found and found["level"]) == level and (found is None or found["step"] == 0)


def test_flags_of_the_other_check_and_no_inputs(
    training: Callable[..., list[str]], factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*training(), "--backend", "eager"]) == 2
    assert "--backend" in capsys.readouterr().err
    assert main(["check", f"{factories}:clean", "--optimizer", f"{factories}:clean"]) == 2
    assert "--optimizer" in capsys.readouterr().err
    command = training()
    del command[2:4]
    assert main(command) == 2
    assert "--inputs" in capsys.readouterr().err
