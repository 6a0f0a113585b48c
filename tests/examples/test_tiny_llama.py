"""The bundled model is what its README says: the digest and the bounds are read from there."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

MAX_DIRECTORY_BYTES = 5_000_000
LOSS = "held-out loss, nats per token"
HELD_OUT_MARGIN = "median top-1 margin, held-out positions, nats"
GREEDY_MARGIN = "median top-1 margin, greedy tokens, nats"
DIGEST = "SHA-256 of `model.safetensors`"


@pytest.fixture(scope="module")
def directory(root: Path) -> Path:
    return root / "examples" / "tiny-llama"


@pytest.fixture(scope="module")
def readme(directory: Path) -> dict[str, tuple[str, str]]:
    """Return figure -> (measured, required), the table of the README."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (directory / "README.md").read_text("utf-8"), re.MULTILINE)
    return {name: (measured, required) for name, measured, required in rows}


@pytest.fixture(scope="module")
def script(directory: Path) -> Iterator[ModuleType]:
    """Import train.py; dataclasses look their module up in sys.modules."""
    spec = importlib.util.spec_from_file_location("tiny_llama_train", directory / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def held_out_figures(script: ModuleType, model: Any, tokenizer: Any) -> tuple[float, float]:
    """Return loss and median margin over the held-out text."""
    figures: tuple[float, float] = script.held_out_figures(model, tokenizer, script.load_held_out())
    return figures


def bound(readme: dict[str, tuple[str, str]], figure: str, word: str) -> float:
    direction, value = readme[figure][1].split()
    assert direction == word
    return float(value)


def test_weights_are_pinned(directory: Path, readme: dict[str, tuple[str, str]]) -> None:
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert readme[DIGEST][0] == f"`{digest}`"


def test_directory_is_small(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MAX_DIRECTORY_BYTES


def test_architecture(model: Any) -> None:
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 1 < config.num_key_value_heads < config.num_attention_heads
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in model.parameters())


def test_tokens_of_model_and_tokenizer_agree(model: Any, tokenizer: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        expected = getattr(tokenizer, name)
        assert expected is not None
        assert getattr(model.config, name) == getattr(model.generation_config, name) == expected


@pytest.mark.parametrize("text", ["", " a  b\n\n\tc ", "naïve 漢字 🧪 \x00\x7f", "def f(x):\n    return x ** 2\n"])
def test_tokenizer_round_trips(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_tokenizer_round_trips_held_out_text(script: ModuleType, tokenizer: Any) -> None:
    for section in script.load_held_out():
        ids = tokenizer(section, verbose=False).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == section


def test_tokenizer_pads_on_the_left(tokenizer: Any) -> None:
    batch = tokenizer(["If", "If the expression is"], padding=True, return_tensors="pt")
    assert batch.attention_mask[0].tolist() == sorted(batch.attention_mask[0].tolist())
    assert batch.input_ids[0, 0] == tokenizer.pad_token_id
    assert batch.attention_mask[1].all()


def test_held_out_loss(held_out_figures: tuple[float, float], readme: dict[str, tuple[str, str]]) -> None:
    loss, _ = held_out_figures
    assert loss < bound(readme, LOSS, "below")
    assert loss == pytest.approx(float(readme[LOSS][0]), abs=1e-3)


def test_held_out_margin(held_out_figures: tuple[float, float], readme: dict[str, tuple[str, str]]) -> None:
    _, margin = held_out_figures
    assert margin > bound(readme, HELD_OUT_MARGIN, "above") >= 0.5
    assert margin == pytest.approx(float(readme[HELD_OUT_MARGIN][0]), abs=5e-3)


def test_greedy_margin(script: ModuleType, model: Any, tokenizer: Any, readme: dict[str, tuple[str, str]]) -> None:
    sample = script.generate_greedily(model, tokenizer)
    assert sample.median_margin > bound(readme, GREEDY_MARGIN, "above") >= 0.5
    # Loose, because one token that falls otherwise on another CPU changes all that follow.
    assert sample.median_margin == pytest.approx(float(readme[GREEDY_MARGIN][0]), abs=0.1)
    assert all(text.startswith(prompt) for text, prompt in zip(sample.texts, script.PROMPTS, strict=True))


def test_sample_in_readme_is_what_the_model_says(
    script: ModuleType, model: Any, tokenizer: Any, directory: Path
) -> None:
    texts = [" ".join(text.split()) for text in script.generate_greedily(model, tokenizer).texts]
    readme = (directory / "README.md").read_text("utf-8")
    quotes = re.findall(r"(?:^> .*\n)+", readme, re.MULTILINE)
    assert quotes
    for quote in quotes:
        said = " ".join(quote.replace("> ", "").replace("**", "").split())
        assert any(text.startswith(said) for text in texts), said


def test_an_untrained_model_misses_the_bounds(
    script: ModuleType, tokenizer: Any, readme: dict[str, tuple[str, str]]
) -> None:
    """The bounds tell a trained model from the same architecture with random weights."""
    torch.manual_seed(0)
    untrained = script.build_model().eval()
    loss, margin = script.held_out_figures(untrained, tokenizer, script.load_held_out())
    assert loss > bound(readme, LOSS, "below")
    assert margin < bound(readme, HELD_OUT_MARGIN, "above")


def test_margin_is_the_difference_of_log_probabilities(script: ModuleType) -> None:
    probabilities = torch.tensor([[0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    expected = torch.tensor([0.5 / 0.3, 1.0], dtype=torch.float64).log()
    torch.testing.assert_close(script.top1_margin(probabilities.log() + 7), expected)


def test_held_out_text_belongs_to_the_held_out_split(script: ModuleType) -> None:
    for section in script.load_held_out():
        training, held_out = script.split_corpus({"topic": section})
        assert (len(training), len(held_out)) == (0, 1), section.split("\n", 1)[0]


def test_split_is_by_heading_and_drops_repetitions(script: ModuleType) -> None:
    def section(heading: str, *paragraphs: str) -> str:
        return "\n\n".join([f"{heading}\n{'*' * len(heading)}", *paragraphs])

    topics = {f"t{i}": section(f"Heading {i}", f"Text {i}.", "Said everywhere.") for i in range(60)}
    training, held_out = script.split_corpus(topics)
    assert training and held_out and len(training) + len(held_out) == 60
    assert sum("Said everywhere." in text for text in [*training, *held_out]) == 1
    edited = {name: text.replace("Text", "Other text") for name, text in topics.items()}
    again = script.split_corpus(edited)[1]
    assert [text.split("\n", 1)[0] for text in again] == [text.split("\n", 1)[0] for text in held_out]


def test_wrapped_prose_is_joined_and_code_is_not(script: ModuleType) -> None:
    wrapped = "a" * 66 + " bcd\nefghij and more"
    assert script.unwrap(wrapped) == wrapped.replace("\n", " ")
    for untouched in ("x = 1\ny = 2", "stmt ::= " + "a " * 35 + '\n| "b"'):
        assert script.unwrap(untouched) == untouched


def test_other_topics_are_said_aloud_before_training(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The note comes, and the files go to the directory of the script, here an empty one."""
    topics = {f"t{i}": f"Heading {i}\n*****\n\n" + f"word{i} " * 600 for i in range(24)}
    monkeypatch.setattr(script, "topics", topics)
    monkeypatch.setattr(script, "DIRECTORY", tmp_path)
    monkeypatch.setattr(script, "NUM_STEPS", 1)
    monkeypatch.setattr(script, "BATCH_SIZE", 1)
    monkeypatch.setattr(script, "VOCAB_SIZE", 300)
    try:
        script.train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "note: this Python ships other topics" in capsys.readouterr().out
    written = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "held_out.txt"} <= written
    assert script.load_held_out(tmp_path) == script.split_corpus(topics)[1]


def test_verify_prints_the_figures(
    script: ModuleType,
    readme: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--verify"])
    try:
        script.main()
    finally:
        torch.use_deterministic_algorithms(False)
    printed = capsys.readouterr().out
    assert readme[DIGEST][0].strip("`") in printed
    for line in ("held-out loss", "held-out median margin", "greedy median margin"):
        assert re.search(rf"^{line} +\d\.\d+ nats", printed, re.MULTILINE)
