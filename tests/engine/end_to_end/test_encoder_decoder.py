"""Engines of encoder-decoders: two programs, the tokens of transformers, an encoder that runs once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.engine.manifest import FILE
from glassengine.errors import CorruptError, UsageError
from glassengine.testing.architectures import save_family

PROMPT = [[17, 80, 41, 99, 250, 7, 33], [60, 61, 62, 200, 30, 9, 120]]
FEATURES = torch.randn((2, 16, 60), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_family(family, tmp_path_factory.mktemp(family) / family)
        return made[family]

    return make


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Callable[[str], glass.Engine]:
    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            where = checkpoint(family).with_name("engine")
            output, artifacts = "decoder.*.1*/linear.0", where.with_name("artifacts")
            made[family] = glass.build(
                checkpoint(family), where, backend="eager", add_output=[output], artifacts=artifacts
            )
        return made[family]

    return make


@pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Path], engine: Callable[[str], glass.Engine], family: str
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint(family)).eval()
    rows = [PROMPT[0], PROMPT[1][3:]]
    expected = [model.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False)[0, 1:].tolist() for row in rows]
    found = engine(family).generate(input_ids=rows, max_new_tokens=6)
    assert [list(row) for row in found.token_ids] == expected
    assert [list(row) for row in found.prompt_token_ids] == rows


@pytest.mark.slow
def test_whisper_decodes_features(checkpoint: Callable[[str], Path], engine: Callable[[str], glass.Engine]) -> None:
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(checkpoint("whisper")).eval()
    tokens = torch.tensor([[1, 9], [1, 9]])
    with torch.no_grad():
        for _ in range(5):
            logits = model(input_features=FEATURES, decoder_input_ids=tokens).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    given = {"input_features": FEATURES, "decoder_input_ids": tokens[:, :2]}
    found = engine("whisper").generate(inputs=given, max_new_tokens=5)
    assert [list(row) for row in found.token_ids] == tokens[:, 2:].tolist()


def test_the_encoder_runs_once_and_its_results_are_inputs_of_every_step(
    engine: Callable[[str], glass.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    t5 = engine("t5")
    runs: list[int] = []
    assert t5.encoder is not None
    run = t5.encoder.executable.run
    monkeypatch.setattr(t5.encoder.executable, "run", lambda inputs: runs.append(1) or run(inputs))
    history: list[dict[str, torch.Tensor]] = []
    t5.generate(input_ids=PROMPT, max_new_tokens=3, debug=True, on_step=lambda s: history.append(s.debug_buffers))
    assert len(runs) == 1 and len(history) == 3
    assert history[0]["cross_key_0"].shape == (2, 4, 7, 16)
    assert all(torch.equal(step["cross_value_1"], history[0]["cross_value_1"]) for step in history)
    assert history[2]["encoder_attention_mask"].tolist() == [[1] * 7] * 2


def test_each_program_has_its_own_weights(engine: Callable[[str], glass.Engine]) -> None:
    from safetensors import safe_open

    def names(directory: Path) -> set[str]:
        with safe_open(directory / "weights.safetensors", framework="pt") as file:
            return set(file.keys())

    t5 = engine("t5")
    decoder, encoder = names(t5.directory), names(t5.directory / "encoder")
    assert not any(name.startswith("user.encoder.block") for name in decoder)
    # The encoder's program ends with the projections of the cross-attentions.
    assert all("EncDecAttention" in name for name in encoder if name.startswith("user.decoder"))
    assert any(name.startswith("user.encoder.block") for name in encoder)


def test_text_is_generated_and_recorded(
    engine: Callable[[str], glass.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(engine("t5").directory)
    text = ["run", directory, "--input-text", "ab", "--input-text", "abc", "--max-new-tokens", "3"]
    assert main([*text, "--record", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.count("Output: ") == 2
    recording = glass.Recording.open(tmp_path / "r")
    assert recording.steps == [0, 1, 2]
    assert recording.tensor("decoder.block.1.layer.1.EncDecAttention.q/linear.0", 1).shape == (2, 1, 64)


@pytest.mark.slow
def test_features_come_from_a_file(
    engine: Callable[[str], glass.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"input_features": FEATURES[:1]}, tmp_path / "sound.pt")
    whisper = ["run", str(engine("whisper").directory), "--max-new-tokens", "2"]
    assert main([*whisper, "--inputs", str(tmp_path / "sound.pt")]) == 0
    assert main([*whisper, "--input-text", "a"]) == 2
    assert "does not run from text alone" in capsys.readouterr().err


def test_missing_inputs_are_named(engine: Callable[[str], glass.Engine]) -> None:
    with pytest.raises(UsageError, match=r"cross_key_0[\s\S]*missing[\s\S]*engine.encode"):
        engine("t5").session(2, 8)
    with pytest.raises(UsageError, match=r"nothing to generate from"):
        engine("t5").generate()
    with pytest.raises(UsageError, match=r"outside the model's vocabulary"):
        engine("t5").generate(input_ids=[[5, 4000]])


@pytest.mark.slow
def test_features_have_one_sequence_each(engine: Callable[[str], glass.Engine]) -> None:
    with pytest.raises(UsageError, match=r"num_return_sequences=2"):
        engine("whisper").generate(
            inputs={"input_features": FEATURES}, num_return_sequences=2, do_sample=True, max_new_tokens=2
        )


@pytest.mark.slow
def test_sites_of_both_programs_are_listed(checkpoint: Callable[[str], Path]) -> None:
    names = [site.name for site in glass.sites(checkpoint("t5"))]
    assert "encoder.block.0.layer.0.SelfAttention.q/linear.0" in names
    assert "decoder.block.0.layer.0.SelfAttention.q/linear.0" in names
    assert "encoder.final_layer_norm" in names


def test_an_engine_whose_encoder_is_damaged_says_so(engine: Callable[[str], glass.Engine], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(engine("t5").directory, tmp_path / "copy"))
    (copy / "encoder" / FILE).unlink()
    with pytest.raises(CorruptError, match="is not an engine"):
        glass.load(copy).generate(input_ids=PROMPT)
    (copy / "encoder" / "program.pt2").unlink()
    with pytest.raises(CorruptError, match=r"encoder/program.pt2: it is missing"):
        glass.load(copy)


def test_both_programs_leave_artifacts(engine: Callable[[str], glass.Engine]) -> None:
    where = engine("t5").directory.with_name("artifacts")
    found = {}
    for part in (where, where / "encoder"):
        manifest = json.loads((part / "manifest.json").read_text())
        assert manifest["complete"]
        assert [stage["name"] for stage in manifest["stages"]] == ["exported", "functional", "outputs"]
        assert (part / "index.html").is_file() and (part / "eager_network_def.py").is_file()
        found[part.name] = (part / "graph.txt").read_text()
    assert "encoder.block.1" in found["encoder"] and "encoder.block.1" not in found["artifacts"]
