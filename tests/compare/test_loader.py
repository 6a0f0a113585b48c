"""Tensors that a rule names are put together, and in which layout."""

from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.compare.loader import assembled
from glassengine.compare.matching.layouts import apply, parse_operation
from glassengine.compare.matching.maps import parse_map, steps_of
from glassengine.errors import UsageError
from glassengine.recording.write.writer import RecordingWriter


def no_lookup(name: str) -> torch.Tensor:
    raise AssertionError(name)


def rule(**more: object) -> object:
    return parse_map({"rules": [{"baseline": "layers.*.a", "candidate": "b.*", **more}]}, "map").rules[0]


def test_rotary_pairs_and_halves() -> None:
    x = torch.arange(12.0).view(1, 12)
    told = {"op": "unpair", "width": 6, "rotated": 4}
    halves = apply([parse_operation(told, "")], x, lookup=no_lookup)
    assert halves.tolist() == [[0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]]
    assert torch.equal(apply([parse_operation({**told, "op": "pair"}, "")], halves, lookup=no_lookup), x)
    with pytest.raises(UsageError, match="no heads of 5"):
        apply([parse_operation({"op": "unpair", "width": 5}, "")], x, lookup=no_lookup)
    assert apply([parse_operation({"op": "add", "value": -1}, "")], x, lookup=no_lookup)[0, 0] == -1


def test_steps_of_the_candidate() -> None:
    assert list(steps_of(rule(), 2)) == [2]
    assert list(steps_of(rule(step_offset=1), 2)) == [3]
    assert list(steps_of(rule(accumulate=0), 2)) == [0, 1, 2]


def test_parts_are_added_or_put_together() -> None:
    parts = [(torch.ones(2, 2), no_lookup), (torch.full((2, 2), 2.0), no_lookup)]
    pair = {"candidate": ["b.*", "c.*"]}
    assert assembled(rule(**pair, sum=True), parts).tolist() == [[3.0, 3.0]] * 2
    assert assembled(rule(**pair, concat_dim=1), parts).shape == (2, 4)
    assert assembled(rule(accumulate=0), parts).shape == (4, 2)
    with pytest.raises(UsageError, match="cannot be added"):
        assembled(rule(**pair, sum=True), [(torch.ones(2), no_lookup), (torch.ones(3), no_lookup)])
    with pytest.raises(UsageError, match="cannot be concatenated"):
        assembled(rule(accumulate=0), [(torch.ones(2, 2), no_lookup), (torch.ones(2, 3), no_lookup)])


@pytest.mark.parametrize("more", [{"sum": 1}, {"layer_offset": "1"}, {"optional": "yes"}, {"step_offset": True}])
def test_invalid_keys_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="is not"):
        rule(**more)


def record(path: Path, tensors: dict[str, list[torch.Tensor]]) -> Path:
    with RecordingWriter(path, metadata={"kind": "model"}) as writer:
        for step in range(2):
            for site, values in tensors.items():
                if step < len(values):
                    writer.write(site, step, values[step])
            writer.commit(step)
    return path


def test_a_residual_pair_is_the_sum_and_layers_are_shifted(tmp_path: Path) -> None:
    x = [torch.randn(4), torch.randn(4)]
    ours = record(tmp_path / "a", {"layers.0.out": x})
    halves = [0.5 * t for t in x]
    theirs = record(tmp_path / "b", {"layers.1.in.x": halves, "layers.1.in.r": halves})
    rules = [
        {"baseline": "layers.*.out", "candidate": ["layers.*.in.x", "layers.{1}.in.r"], "sum": True, "layer_offset": 1},
        {"baseline": "nothing", "candidate": "nowhere", "optional": True},
    ]
    found = glass.compare(ours, theirs, map={"rules": rules})
    assert found.ok and {(p.step, p.site, p.verdict) for p in found.pairs} == {
        (step, "layers.0.out", "identical") for step in range(2)
    }
    # Planted: a residual that was not added.
    wrong = glass.compare(
        ours, theirs, map={"rules": [{"baseline": "layers.*.out", "candidate": "layers.*.in.x", "layer_offset": 1}]}
    )
    assert not wrong.ok
