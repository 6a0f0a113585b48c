"""A tokenizer that a function returns: what it encodes is compared with the files of the baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.prompt.check import compare_sides
from glassengine.prompt.huggingface import Directory
from glassengine.prompt.port import TokenizerPort
from glassengine.prompt.side import PromptSide
from glassengine.results import PromptComparison

PORTS = """
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

FOLDER = Path({folder!r})


def of_tokenizers():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def of_transformers():
    return AutoTokenizer.from_pretrained(FOLDER)


def own():
    class Own:
        inner = of_tokenizers()

        def encode(self, text):
            return self.inner.encode(text).ids

    return Own()


def digits():
    found = of_tokenizers()
    found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), found.pre_tokenizer])
    return found


def bare():
    found = own()
    found.encode = lambda text: found.inner.encode(text, add_special_tokens=False).ids
    return found


def lower():
    found = own()
    found.encode = lambda text: found.inner.encode(text.lower()).ids
    return found


def nothing():
    return 3
"""


@pytest.fixture(scope="module")
def baseline(root: Path) -> PromptSide:
    return Directory(root / "examples" / "tiny-llama")


@pytest.fixture(scope="module")
def ports(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ports") / "ports.py"
    path.write_text(PORTS.format(folder=str(root / "examples" / "tiny-llama")), encoding="utf-8")
    return path


def compared(baseline: PromptSide, spec: str) -> PromptComparison:
    return compare_sides(
        baseline, TokenizerPort(spec, baseline.opened.vocabulary), ("baseline", spec), ("Given 12345 text",)
    )


@pytest.mark.parametrize("name", ["of_tokenizers", "of_transformers", "own"])
def test_a_right_port_is_ok(name: str, baseline: PromptSide, ports: Path) -> None:
    result = compared(baseline, f"{ports}:{name}")
    assert result.ok and not result.findings and result.compared["tokens"] > 400


@pytest.mark.parametrize(
    ("name", "cause"),
    [("digits", "pre-tokenizer (digits)"), ("bare", "no BOS"), ("lower", "normalization (lower case)")],
)
def test_a_mistake_of_a_port_is_named(name: str, cause: str, baseline: PromptSide, ports: Path) -> None:
    result = compared(baseline, f"{ports}:{name}")
    assert not result.ok and result.wrong[0].cause == cause, result.findings


def test_objects_that_are_no_tokenizer_are_refused(baseline: PromptSide, ports: Path) -> None:
    with pytest.raises(UsageError, match=r"did not return a tokenizer[^$]*int[^$]*encode\(text\)"):
        compared(baseline, f"{ports}:nothing")
