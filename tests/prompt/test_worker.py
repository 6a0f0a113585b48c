"""Sides in another interpreter, which has a stand-in for vLLM, and has this package from here."""

from __future__ import annotations

import json
import sysconfig
import venv
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import UsageError
from tests.prompt.planted import GENERATION, copied, wrong

TOKENIZERS = """
from transformers import AutoTokenizer

def get_tokenizer(path, trust_remote_code):
    found = AutoTokenizer.from_pretrained(path)
    found.pad_token = "<|im_end|>"
    return found
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, without this package, and with a package of the name vllm."""
    folder = tmp_path_factory.mktemp("vllm")
    venv.create(folder, symlinks=True)
    (folder / "packages" / "vllm").mkdir(parents=True)
    (folder / "packages" / "vllm" / "__init__.py").touch()
    (folder / "packages" / "vllm" / "tokenizers.py").write_text(TOKENIZERS)
    (place,) = folder.glob("lib/*/site-packages")
    (place / "packages.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{folder / 'packages'}\n")
    return folder / "bin" / "python"


def test_vllm_is_asked_in_its_interpreter(
    python: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**GENERATION, "no_repeat_ngram_size": 3}  # which vLLM does not know
    copied(trained, tmp_path / "other", "generation_config.json", lambda one: one.update(settings))
    result = glass.check_prompt(str(trained), f"vllm:{tmp_path / 'other'}", python=python)
    assert wrong(result) == ["special token pad"] and result.engines == ("transformers", "vLLM")
    assert result.compared["tokens"] > 400 and result.compared["template"] == 18
    assert [one.cause for one in result.findings if one.level == "note"] == ["top_k"]  # 50 of transformers, off in vLLM
    other = copied(
        trained, tmp_path / "penalty", "generation_config.json", lambda one: one.update(repetition_penalty=1.1)
    )
    assert main(["check-prompt", str(trained), f"vllm:{other}", "--python", str(python), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [one["cause"] for one in document["findings"]][:2] == ["special token pad", "repetition_penalty"]


def test_an_interpreter_without_vllm_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)the tokenizer cannot be opened.*No module named 'vllm'"):
        glass.check_prompt(str(trained), f"vllm:{trained}")
    with pytest.raises(UsageError, match="no such interpreter"):
        glass.check_prompt(str(trained), f"vllm:{trained}", python=tmp_path / "nowhere")
