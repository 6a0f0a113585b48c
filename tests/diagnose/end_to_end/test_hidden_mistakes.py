"""No mistake hides behind what a verdict leaves out, and no right port is called wrong for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glassengine.diagnose import check
from glassengine.results import Comparison
from tests.diagnose.end_to_end.hidden_mistakes import CORPUS, Entry, Written, inputs

_QUICK = 7  # of every so many entries one runs always


def _each(*, wrong: bool) -> list[Any]:
    found = []
    for number, entry in enumerate(CORPUS):
        for at, port in enumerate(entry.wrong if wrong else entry.right):
            marks = () if number % _QUICK == 0 and at == 0 else (pytest.mark.slow,)
            found.append(pytest.param(entry, port, id=f"{entry.name}-{port.__name__}", marks=marks))
    return found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    torch.save(inputs(), path)
    return str(path)


def _checked(entry: Entry, port: Any, given: str) -> Comparison:
    return check(Written(entry.baseline).eval(), candidate=Written(port).eval(), inputs=given)


@pytest.mark.parametrize(("entry", "port"), _each(wrong=True))
def test_f1_no_mistake_is_exempt(entry: Entry, port: Any, given: str) -> None:
    found = _checked(entry, port, given)
    assert not found.ok and not found.too_little, [(pair.site, pair.reason) for pair in found.pairs if pair.reason]
    assert found.first_divergence is not None


@pytest.mark.parametrize(("entry", "port"), _each(wrong=False))
def test_a_right_port_is_ok(entry: Entry, port: Any, given: str) -> None:
    found = _checked(entry, port, given)
    assert found.ok, found.not_ok_because


def test_there_are_enough() -> None:
    assert sum(len(entry.wrong) for entry in CORPUS) >= 60 and all(entry.right for entry in CORPUS)
