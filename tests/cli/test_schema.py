"""The published JSON schemas: current, closed, and true of what the commands really print."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from glassengine.cli.main import main
from glassengine.schemas import COMMANDS, schema
from glassengine.schemas.generate import generate

MODELS = """
import torch
from torch import nn
from glassengine.testing import models

class Net(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        return torch.tanh(self.fc(x)) * self.scale

def right():
    return Net()

def wrong():
    return Net(1.5)

def language():
    return models.llama()

def nan():
    net = Net()
    net.fc.weight.data[0, 0] = float("nan")
    return net

def inputs():
    return {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}

def ids():
    return {"input_ids": [5, 17, 99, 3, 42]}

def batches():
    return [inputs(), inputs()]

def mean(result):
    return result.mean()
"""

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs a command with `--json`, validates the document, and returns status and document."""
    (tmp_path / "nets.py").write_text(MODELS)

    def run(command: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        words = [str(word).replace("{nets}", str(tmp_path / "nets.py")) for word in arguments]
        capsys.readouterr()
        status = main([command, *words, "--json", "-q"])
        document = json.loads(capsys.readouterr().out)
        validate(command, document)
        return status, document

    return run


def validate(command: str, document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema(command)).validate(document)


def names_of(document: Any) -> set[str]:
    """Return the keys of every object in a document."""
    if isinstance(document, dict):
        return set(document).union(*map(names_of, document.values()))
    return set().union(*map(names_of, document)) if isinstance(document, list) else set()


def wordless(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: wordless(value) for key, value in part.items() if key != "description" or isinstance(value, dict)}
    return [wordless(value) for value in part] if isinstance(part, list) else part


@pytest.mark.parametrize("name", ["check", "compare"])
def test_the_file_is_what_the_classes_say(name: str, root: Path) -> None:
    file = root / "src/glassengine/schemas" / f"{name}.json"
    # A sentence that was worded anew since is no mistake; a key or type that is another is one.
    assert wordless(json.loads(file.read_text(encoding="utf-8"))) == wordless(generate(name)), "run `make schemas`"
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_every_key_of_the_design_is_there_by_its_name() -> None:
    comparison = schema("check")["$defs"]["Comparison"]["properties"]
    assert {"schema_version", "ok", "verdict", "first_divergence", "origins", "counts", "pairs", "skipped"} <= set(
        comparison
    )
    divergence = schema("check")["$defs"]["Divergence"]["properties"]
    assert {
        "level",
        "step",
        "site",
        "node",
        "candidate_site",
        "source",
        "verdict",
        "noise_ratio",
        "bound_ratio",
    } <= set(divergence)
    assert {"introduced", "inherited", "hints", "reproduction"} <= set(divergence)
    assert not names_of(schema("compare")) & {"rho", "beta"}


CHECK = ("check", "{nets}:right", "--inputs", "{nets}:inputs")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ((*CHECK, "--backend", "eager"), 0),
        ((*CHECK, "--candidate", "{nets}:wrong"), 1),
        ((*CHECK, "--candidate", "{nets}:nan", "--metrics"), 1),
        ((*CHECK, "--candidate", "{nets}:right", "--drift"), 0),
        ((*CHECK, "--candidate", "{nets}:missing"), 2),
        pytest.param(
            ("check", "{nets}:language", "--inputs", "{nets}:ids", "--backend", "eager", "--steps", "1"),
            0,
            marks=pytest.mark.slow,
        ),
        (("check-training", "{nets}:right", "--inputs", "{nets}:batches", "--loss", "{nets}:mean"), 0),
    ],
)
def test_documents_of_checks(run: Run, words: tuple[str, ...], status: int) -> None:
    found, document = run(*words)
    assert found == status and document["ok"] == (status == 0)
    if "{nets}:language" in words:
        assert document["severity"]["engine"]["num_tokens"]
        # A step reads the tokens given, then one that was chosen after the other; ids, as there is no tokenizer.
        (case,) = document["inputs"]
        assert case["texts"][0] == "5 17 99 3 42" and len(case["texts"]) == case["num_steps"] > 1
        assert all(text.isdigit() for text in case["texts"][1:])
    if document.get("reads"):
        sites = {pair["site"] for pair in document["pairs"]}
        assert sites & document["reads"].keys() and any(sites & set(names) for names in document["reads"].values())
    assert all(
        pair["dtype"] and pair["shape"] is not None for pair in document.get("pairs", ()) if pair["level"] != "update"
    )
    if status == 1:
        # What is validated is no empty list.
        assert document["first_divergence"]["noise_ratio"] is not None or "nan" in str(document)
        assert any(pair["figures"] for pair in document["pairs"])
        values = [pair["values"] for pair in document["pairs"] if pair["values"]]
        assert bool(values) == ("check" in words[0]) and all(one["worst"] and one["axes"] for one in values)


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    x = torch.arange(12.0).reshape(3, 4) + 1
    torch.save({"mm": x, "ids": torch.tensor([3])}, tmp_path / "x.pt")
    torch.save({"mm": x * 1.01, "ids": torch.tensor([3])}, tmp_path / "wrong.pt")
    torch.save({"mm": torch.full((3, 4), torch.inf)}, tmp_path / "inf.pt")
    torch.save({"other": torch.ones(2)}, tmp_path / "other.pt")
    for name, values in (("a", "--values"), ("light", "--no-values")):
        net = [f"{tmp_path}/nets.py:right", "--inputs", f"{tmp_path}/nets.py:inputs"]
        (tmp_path / "nets.py").write_text(MODELS)
        assert main(["record", *net, "-o", str(tmp_path / name), values, "-q"]) == 0
    return tmp_path


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("x.pt", "x.pt"), 0),
        (("x.pt", "wrong.pt"), 1),
        (("x.pt", "inf.pt"), 1),
        (("x.pt", "other.pt"), 4),
        (("x.pt", "wrong.pt", "x.pt"), 1),
        (("a", "a"), 0),
        (("a", "light"), 4),
        (("a", "missing"), 2),
    ],
)
def test_documents_of_records(run: Run, sides: Path, names: tuple[str, ...], status: int) -> None:
    found, document = run("compare", *(sides / name for name in names))
    assert found == status and document["ok"] == (status == 0)


def test_documents_of_engines_and_artifacts(run: Run, engine_directory: Path, sides: Path) -> None:
    words = ["--input-text", "a", "--max-new-tokens", "2"]
    assert run("compare", engine_directory, engine_directory, *words)[0] == 0
    for name in ("right", "wrong"):
        build = ["build", f"{sides}/nets.py:{name}", str(sides / f"e-{name}"), "--inputs", f"{sides}/nets.py:inputs"]
        assert main([*build, "--backend", "eager", "--artifacts", str(sides / f"art-{name}"), "-q"]) == 0
    assert run("compare", sides / "art-right", sides / "art-right")[0] == 0
    status, document = run("compare", sides / "art-right", sides / "art-wrong")
    assert status == 1 and any(stage["changes"] for stage in document["stages"])


def test_planted_keys_are_found(run: Run, sides: Path) -> None:
    _, document = run("compare", sides / "x.pt", sides / "wrong.pt")

    def refused(change: Callable[[dict[str, Any]], object]) -> None:
        changed = copy.deepcopy(document)
        change(changed)
        with pytest.raises(jsonschema.ValidationError):
            validate("compare", changed)

    refused(lambda planted: planted.update(new_key=1))
    refused(lambda planted: planted["pairs"][0].update(rho=1.0))
    refused(lambda planted: planted["counts"].update(others=0))
    refused(lambda planted: planted["first_divergence"].pop("noise_ratio"))
    refused(lambda planted: planted["pairs"][0]["figures"].update(max_abs_diff="huge"))
    refused(lambda planted: planted.update(schema_version=2))
    refused(lambda planted: planted.update(verdict="fine"))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_prints_a_schema(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out) == schema(name)
    for _ in range(2):  # a schema is replaced as a document is
        assert main(["schema", name, "--json", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == schema(name) and capsys.readouterr().out == ""
    assert main(["schema"]) == 0 and f"{name} " in capsys.readouterr().out
    assert main(["schema", "--json"]) == 0 and json.loads(capsys.readouterr().out)["schemas"][name].startswith("urn:")
    assert main(["schema", "build"]) == 2
    assert "check-training" in capsys.readouterr().err
