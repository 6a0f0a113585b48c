"""`glass run --snapshot`, and `glass snapshot`: from the command line to what is printed and the exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main

PROMPT = "Hey, are you conscious?"


def glass_(*arguments: object) -> int:
    return main(list(map(str, arguments)))


@pytest.fixture(scope="module")
def dump(engine_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return snapshots of a prefill and two decode steps; do not change them."""
    directory = tmp_path_factory.mktemp("snapshots") / "dump"
    run = ["run", engine_directory, "--input-text", PROMPT, "--max-new-tokens", 3, "-q", "--snapshot", directory]
    assert glass_(*run) == 0
    return directory


def test_an_engine_leaves_a_snapshot_of_each_step(dump: Path, engine_directory: Path) -> None:
    paths = sorted(dump.iterdir())
    name = glass.load(engine_directory).executable.name.replace("/", ".")
    assert [path.name.partition("-executable")[0] for path in paths] == [f"{name}-process000000"] * 3
    assert [path.name[-6:] for path in paths] == ["000000", "000001", "000002"]
    found = [glass.snapshots.Snapshot.open(path) for path in paths]
    assert [snapshot.kind for snapshot in found] == ["engine"] * 3
    # Weights and graph once on disk, whatever the number of steps.
    for file in ("weights-0.safetensors", "graph.pt2"):
        assert len({(path / file).stat().st_ino for path in paths}) == 1
    # Without the engine, the graph gives the token that the engine chose.
    token = glass.load(engine_directory).generate(PROMPT, max_new_tokens=3).token_ids[0]
    for step, snapshot in enumerate(found):
        with torch.no_grad():
            results = dict(zip(snapshot.output_names, snapshot.graph.graph_module(*snapshot.arguments()), strict=True))
        assert int(results["logits"][0, -1].argmax()) == token[step]


def test_show_lists_a_directory(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass_("snapshot", "show", dump) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("every" in line and "graph, inputs" in line for line in lines[2:])
    assert glass_("snapshot", "show", dump, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["reason"] for entry in document["snapshots"]] == ["every"] * 3


def test_show_tells_what_a_snapshot_holds(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(dump.iterdir())[1]
    assert glass_("snapshot", "show", path, "--statistics") == 0
    text = capsys.readouterr().out
    assert "execution 1 of" in text and "(engine)" in text and "taken because: every" in text
    line = next(line for line in text.splitlines() if line.startswith("input_ids"))
    assert "int64[1,1]" in line and "no outputs were kept" in text
    assert glass_("snapshot", "show", path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["execution"] == 1
    assert {entry["name"] for entry in document["inputs"]} >= {"input_ids", "attention_mask", "past_key_0"}


def test_pack_makes_one_file_that_says_the_same(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(dump.iterdir())[0]
    packed = tmp_path / "sent.safetensors"
    assert glass_("snapshot", "pack", path, "-o", packed) == 0
    assert f"packed {packed}: {packed.stat().st_size:,} bytes" in capsys.readouterr().out
    shown = []
    for source in (path, packed):
        assert glass_("snapshot", "show", source) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert glass_("snapshot", "pack", path, "-o", packed) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert glass_("snapshot", "pack", path, "-o", packed, "--overwrite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["packed"] == str(packed)
    assert glass_("snapshot", "pack", path, "-o", tmp_path / "no" / "x.safetensors") == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("shows", "x"), 2, "nearest: show"),
        (("show", "nowhere"), 2, "no such file"),
        (("show", "DUMP", "-o", "x"), 2, "go with pack"),
        (("pack", "DUMP"), 2, "one of its 3 snapshots"),
        (("pack", "x", "--statistics"), 2, "goes with show"),
    ],
)
def test_mistakes_are_told(
    dump: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    assert glass_("snapshot", *(dump if word == "DUMP" else word for word in arguments)) == status
    assert message in capsys.readouterr().err


def test_a_damaged_snapshot_ends_with_status_4(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sorted(dump.iterdir())[0], copy)
    (copy / "meta.json").write_text("{}")
    assert glass_("snapshot", "show", copy) == 4
    assert "the description of the snapshot copy is damaged" in capsys.readouterr().err


@pytest.fixture(scope="module")
def infected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an engine with a weight that makes NaN in the second layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(3e38)
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e5)
        model.model.layers[1].self_attn.k_proj.weight.mul_(-1e5)
    directory = tmp_path_factory.mktemp("infected") / "engine"
    return glass.build(model.eval(), directory, backend="eager").directory


def test_a_nan_stops_an_engine_and_names_the_op(
    infected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", infected, "--input-ids", tmp_path / "ids.json", "--max-new-tokens", 4, "--snapshot", tmp_path / "d"]
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    assert glass_(*run, "--snapshot-on", "nonfinite") == 1
    text = capsys.readouterr().err
    assert "execution 0 of" in text and "not finite" in text and "in module 'model.layers.1" in text
    (path,) = (tmp_path / "d").iterdir()
    assert f"glass replay {path} --first-nonfinite" in text
    assert glass_("snapshot", "show", tmp_path / "d") == 0
    assert "model.layers.1" in capsys.readouterr().out


def test_words_of_snapshot_on_are_checked(
    engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("run", engine_directory, "--input-text", PROMPT)
    assert glass_(*run, "--snapshot-on", "nonfinite") == 2
    assert "--snapshot DIR" in capsys.readouterr().err
    assert glass_(*run, "--snapshot", tmp_path, "--snapshot-on", "nan") == 2
    assert "unknown occasion of a snapshot 'nan'" in capsys.readouterr().err
