"""Of mistakes in ports written by hand, how many hints are useful, and how many mislead: a table, and a few of it."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from glassengine.diagnose import check
from glassengine.results import Hint
from tests.corpus.kinds import OF_PORTS

sys.path.insert(0, str(Path(__file__).parent))

from hand_written import PORTS

_TOLD = 0.6
"""From this score on a hint is printed as what it is, not as what it may be."""


@dataclass(frozen=True)
class Found:
    is_found: bool
    hints: tuple[Hint, ...]
    is_useful: bool

    @property
    def misleads(self) -> bool:
        return not self.is_useful and any(hint.score >= _TOLD for hint in self.hints)


def judged(name: str, mistake: str, tmp_path: Path) -> Found:
    torch.set_num_threads(1)
    written = PORTS[name]
    torch.save(written.inputs, tmp_path / "inputs.pt")
    baseline = written.baseline()
    port = written.port(copy.deepcopy(baseline), mistake).eval()
    result = check(baseline, candidate=port, inputs=str(tmp_path / "inputs.pt"))
    first = result.first_divergence
    if first is None:
        return Found(not result.ok, (), False)
    others = [origin for origin in result.origins if origin.level == first.level and origin.site != first.site]
    # What the screen shows: two hints of the first divergence, one of two others.
    hints = [*first.hints[:2], *(hint for origin in others[:2] for hint in origin.hints[:1])]
    says = written.mistakes.get(mistake, ())
    return Found(not result.ok, tuple(hints), any(text in hint.text for hint in hints for text in says))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param("llama", "keys in turn", marks=pytest.mark.slow),
        ("gpt2", "softmax over queries"),
        pytest.param("bert", "mask inverted", marks=pytest.mark.slow),
    ],
)
def test_f33_a_hint_of_a_port_by_hand(name: str, mistake: str, tmp_path: Path) -> None:
    found = judged(name, mistake, tmp_path)
    assert found.is_useful
    assert found.hints[0].proven and found.hints[0].kind in OF_PORTS[name, mistake]


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_a_right_port_by_hand_is_ok(name: str, tmp_path: Path) -> None:
    found = judged(name, "", tmp_path)
    assert not found.is_found and not found.hints


@pytest.mark.slow
def test_f33_most_hints_are_useful_and_none_misleads(tmp_path: Path) -> None:
    table = {}
    for name, written in PORTS.items():
        for mistake in written.mistakes:
            folder = tmp_path / name / mistake.replace(" ", "-")
            folder.mkdir(parents=True)
            table[name, mistake] = judged(name, mistake, folder)
    useful = sum(found.is_useful for found in table.values())
    misleading = sum(found.misleads for found in table.values())
    lines = [
        f"{name:10} {mistake:28} {'useful' if found.is_useful else 'MISLEADS' if found.misleads else 'none'}"
        f" {found.hints[0].text if found.hints else ''}"
        for (name, mistake), found in table.items()
    ]
    lines.append(f"{len(table)} mistakes, useful {useful}, misleading {misleading}")
    sys.stdout.write("\n".join(lines) + "\n")
    assert all(found.is_found for found in table.values())
    assert useful >= 0.8 * len(table)
    assert misleading <= 1
