"""Engines that do not generate, from a directory of transformers to the tensors of a text or an image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import UnknownNameError, UsageError
from glassengine.testing.architectures import save_family


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("bert", tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture(scope="module")
def encoder(bert: Path) -> glass.Engine:
    return glass.build(bert, bert.with_name("engine"), backend="eager", add_output=["layer.0.*/gelu.0=act"])


@pytest.fixture(scope="module")
def expected(bert: Path) -> dict[str, torch.Tensor]:
    """Return what transformers makes of two texts of different lengths, each alone."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    with torch.no_grad():
        return {text: model(**tokenizer(text, return_tensors="pt"))[0][0] for text in ("a text", "another text")}


def test_texts_give_what_transformers_gives(encoder: glass.Engine, expected: dict[str, torch.Tensor]) -> None:
    together = encoder.forward(list(expected))
    assert together.outputs.keys() == {"last_hidden_state", "pooler_output", "act"}
    for row, (text, states) in enumerate(expected.items()):
        alone = encoder.forward(text)
        assert alone.outputs["last_hidden_state"].shape[0] == 1
        torch.testing.assert_close(alone.outputs["last_hidden_state"][0], states)
        # The shorter one is padded beside the longer one, which must change nothing.
        torch.testing.assert_close(together.outputs["last_hidden_state"][row, : len(states)], states)


def test_a_text_of_one_token_runs(encoder: glass.Engine) -> None:
    assert encoder.forward(input_ids=[[7]]).outputs["act"].shape == (1, 1, 128)


def test_results_are_recorded_by_site(encoder: glass.Engine, tmp_path: Path) -> None:
    result = encoder.forward(["ab", "abcd"], record=tmp_path / "recording")
    recording = glass.Recording.open(tmp_path / "recording")
    assert recording.metadata["token_ids"] == [list(row) for row in result.prompt_token_ids]
    site = encoder.manifest.added_outputs[0].site
    assert torch.equal(recording.tensor(site, 0), result.outputs["act"])
    assert torch.equal(recording.tensor("pooler.activation", 0), result.outputs["pooler_output"])


def test_debug_selects_inputs_and_outputs(encoder: glass.Engine) -> None:
    assert encoder.forward("ab", debug=["act", "input_ids"]).outputs.keys() == {"input_ids", "act"}
    with pytest.raises(UnknownNameError, match="pooler_output"):
        encoder.forward("ab", debug=["poler_output"])


def test_inputs_that_do_not_fit_are_named(encoder: glass.Engine, bert: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to run on[\s\S]*--input-text"):
        encoder.forward()
    with pytest.raises(UsageError, match="both given"):
        encoder.forward("a", inputs={"input_ids": torch.ones((1, 3), dtype=torch.int64)})
    with pytest.raises(UsageError, match=r"dimension 1 must be 1 to 64"):
        encoder.forward("a" * 65)
    with pytest.raises(UsageError, match=r"no prefill and decode[\s\S]*engine.forward"):
        encoder.generate("a")


def test_the_command_prints_records_and_writes_json(
    encoder: glass.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["run", str(encoder.directory), "--input-text", "ab"]
    assert main([*text, "--record", str(tmp_path / "r"), "--debug", "pooler_output"]) == 0
    captured = capsys.readouterr()
    assert "pooler_output float32[1, 64]\ntensor([[" in captured.out and "last_hidden" not in captured.out
    assert f"glass show {tmp_path / 'r'}" in captured.err
    assert main([*text, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = torch.tensor(document["outputs"]["last_hidden_state"]["values"])
    assert torch.equal(found, encoder.forward("ab").outputs["last_hidden_state"])
    assert main([*text, "--max-new-tokens", "4", "--seed", "1"]) == 2
    assert "--seed, --max-new-tokens" in capsys.readouterr().err


def test_an_image_comes_as_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_family("vit", tmp_path / "vit")
    engine = glass.build(directory, tmp_path / "engine", backend="eager")
    image = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    from transformers import AutoModelForImageClassification

    with torch.no_grad():
        expected = AutoModelForImageClassification.from_pretrained(directory).eval()(image).logits
    torch.testing.assert_close(engine.forward(inputs={"pixel_values": image}).outputs["logits"], expected)
    torch.save({"pixel_values": image}, tmp_path / "image.pt")
    assert main(["run", str(engine.directory), "--inputs", str(tmp_path / "image.pt"), "-q"]) == 0
    assert "logits float32[1, 10]" in capsys.readouterr().out
    assert main(["run", str(engine.directory), "--input-text", "a"]) == 2


class ReadsANumber(torch.nn.Module):
    """Its graph has a number that it reads from a tensor, of which no bounds are known."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + shift.sum().item()


def test_numbers_that_a_graph_reads_from_tensors_are_no_sizes(tmp_path: Path) -> None:
    inputs = [{"x": torch.ones(size, 3), "shift": torch.tensor([size, 1])} for size in (2, 4)]
    engine = glass.build(ReadsANumber(), tmp_path / "engine", inputs=inputs, backend="eager")
    assert [low for low, _ in engine.manifest.ranges.values()] == [2]
    assert torch.equal(engine(**inputs[1])["output"], torch.full((4, 3), 6.0))


class NamedAsOps(torch.nn.Module):
    """Its results are called as ops that make other tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.fc(x)
        deviation = y.std(-1, keepdim=True)
        return {"std": 2 * deviation, "linear": y + 1, "add": y / deviation}


def test_results_that_are_called_as_ops(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x, model = torch.randn(4, 8), NamedAsOps().eval()
    save_file({"x": x}, tmp_path / "x.safetensors")
    engine = glass.build(
        model, tmp_path / "e", backend="eager", inputs=str(tmp_path / "x.safetensors"), add_output=["std"]
    )
    outputs = engine.forward(inputs={"x": x}).outputs
    assert torch.equal(outputs["std"], model(x)["std"]) and torch.equal(2 * outputs["./std.0"], outputs["std"])
    found = glass.check(model, backend="eager", inputs={"x": x})
    assert found.ok and found.counts["identical"] == found.counts["compared"] > 6
