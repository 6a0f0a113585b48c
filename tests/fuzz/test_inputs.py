"""Changed files of every kind are read with a documented end: no bug, no hang, no memory without bound, no code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import campaign
import every

KEPT = sorted((Path(__file__).parent / "kept").glob("*.jsonl"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[campaign.Bench]:
    made = campaign.Bench(tmp_path_factory.mktemp("bench"), list(every.KINDS))
    assert not made.broken
    yield made
    made.close()


def test_what_was_found_is_not_found_again(tmp_path: Path) -> None:
    inputs = [campaign.Input(**json.loads(line)) for path in KEPT for line in path.read_text().splitlines()]
    assert len(inputs) > 100
    bench = campaign.Bench(tmp_path, list(dict.fromkeys(each.kind for each in inputs)), ready=False)
    answers = bench.tried(inputs)  # in one process, unless one of them ends it
    bench.close()
    problems = [(each, answer) for each, answer in zip(inputs, answers, strict=True) if answer["problem"]]
    assert not problems, "\n\n".join(f"{each.to_json()[:500]}\n{answer['problem']}" for each, answer in problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", every.KINDS)
def test_a_few_changes_by_chance_find_nothing(bench: campaign.Bench, name: str) -> None:
    tried = campaign.Campaign(bench, int.from_bytes(os.urandom(4)), None)
    tried.one_batch(name, 20)
    found = "\n".join(given.to_json()[:3000] for given, _ in tried.findings.values())
    assert not tried.findings, f"{list(tried.findings)}\n{found}"
