"""Changed files of every kind are read with a documented end: no bug, no hang, no memory without bound, no code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children

sys.path.insert(0, str(Path(__file__).parent))

import campaign
import direct_kinds
import kinds

KEPT = sorted((Path(__file__).parent / "kept").glob("*.jsonl"))
# What they read takes an engine, a model with a tokenizer, an exported program, or a runtime of somebody else.
SLOW = (
    "engine", "artifacts", "snapshot", "profile", "cache", "prompts_c_json", "prompts_c_jsonl", "prompts_p_json",
    "prompts_p_jsonl", "prompts_p_txt", "read_profile", "recording", "tokenizer", "prompt_files", "engine_onnxruntime",
    "exported", "onnx", "command_lines", "server", "adapter",
)  # fmt: skip


def inputs() -> list[campaign.Input]:
    return [campaign.Input(**json.loads(line)) for path in KEPT for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[campaign.Bench]:
    made = campaign.Bench(tmp_path_factory.mktemp("bench"), list(direct_kinds.ALL))
    assert not made.broken
    yield made
    made.close()


def again(folder: Path, kept: list[campaign.Input]) -> None:
    bench = campaign.Bench(folder, list(dict.fromkeys(each.kind for each in kept)), ready=False, start=children.Popen)
    answers = bench.tried(kept)  # in one process, unless one of them ends it
    bench.close()
    problems = [(each, answer) for each, answer in zip(kept, answers, strict=True) if answer["problem"]]
    assert not problems, "\n\n".join(f"{each.to_json()[:500]}\n{answer['problem']}" for each, answer in problems)


def test_what_was_found_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "make_shared", kinds.make_checkpoint)
    kept = [each for each in inputs() if each.kind not in SLOW]
    assert len(kept) > 35
    again(tmp_path, kept)


@pytest.mark.slow
def test_what_was_found_by_slow_readers_is_not_found_again(tmp_path: Path) -> None:
    again(tmp_path, [each for each in inputs() if each.kind in SLOW])


@pytest.mark.slow
@pytest.mark.parametrize("name", direct_kinds.ALL)
def test_a_few_changes_by_chance_find_nothing(bench: campaign.Bench, name: str) -> None:
    tried = campaign.Campaign(bench, int.from_bytes(os.urandom(4)), None)
    tried.one_batch(name, 20)
    found = "\n".join(given.to_json()[:3000] for given, _ in tried.findings.values())
    assert not tried.findings, f"{list(tried.findings)}\n{found}"
