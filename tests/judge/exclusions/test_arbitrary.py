"""Memory that nothing has written and random draws: what depends on them is no mistake, and hides none."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from glassengine.diagnose import check


class Drops(nn.Module):
    """A logarithm of 0 that is cast, and random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        bucket = torch.where(x < 0.5, 7, (x.log() * 3).to(torch.int64))
        return bucket + 0 * torch.rand(4)


def test_a_check_counts_what_it_left_out(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([0.0, 1.0, 2.0, 5.0])}, tmp_path / "x.pt")
    found = check(Drops().eval(), candidate=Drops().eval(), inputs=str(tmp_path / "x.pt"))
    assert found.ok
    counted = {one.reason: one for one in found.exemptions}
    assert counted["undefined casts"].num_elements == 3, "the logarithm, its product and the number it is cast to"
    assert counted["random"].num_elements == 4 and counted["random"].largest_site == "./rand.0"
    assert all(0 < one.share < 1 for one in found.exemptions) and found.num_elements
    assert json.loads(json.dumps(found.to_dict()))["exemptions"][0]["num_elements"] > 0


class Buffer(nn.Module):
    """Doubles a buffer of which it has written the first half, and returns powers of that half, or one element more."""

    def __init__(self, *, factor: float = 2.0, ends: int = 2) -> None:
        super().__init__()
        self.factor, self.ends = factor, ends

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(4)
        memory[:2] = x
        return (memory * self.factor).exp()[: self.ends]


def test_arithmetic_on_unwritten_memory_is_no_mistake_and_hides_none(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([1.0, 2.0])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Buffer().eval(), candidate=Buffer().eval(), inputs=inputs)
    assert right.ok and {one.reason for one in right.exemptions} == {"unwritten memory"}
    assert not check(Buffer().eval(), candidate=Buffer(factor=2.1).eval(), inputs=inputs).ok
    whole = check(Buffer(ends=3).eval(), candidate=Buffer(ends=3).eval(), inputs=inputs)
    assert not any(pair.verdict == "wrong" for pair in whole.pairs)
    assert not check(Buffer(ends=3).eval(), candidate=Buffer(factor=2.1, ends=3).eval(), inputs=inputs).ok


class Filled(nn.Module):
    """Fills a buffer in two halves, and goes on with it."""

    def __init__(self, *, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(3, 4)
        memory[:, :2] = x.sin()
        memory[:, 2:] = x.cos()
        return self.last(memory.exp() * self.factor)


def test_a_buffer_that_is_written_counts_in_full(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([[0.1, 0.2], [0.3, 0.7], [1.1, 2.3]])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Filled().eval(), candidate=Filled().eval(), inputs=inputs)
    assert right.ok
    memory, part = 3 * 4, 3 * 2
    assert [one.num_elements for one in right.exemptions] == [memory + 3 * part], "allocated, and written in part"
    wrong = check(Filled().eval(), candidate=Filled(factor=2.1).eval(), inputs=inputs)
    assert not wrong.ok and {found.site for found in wrong.origins} == {"./mul.0"}


class Noisy(nn.Module):
    """Scales random numbers, which every run draws anew."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.rand(4)) * self.factor


def test_below_a_draw_a_replay_judges_and_nothing_else(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([3.0, 1.0, 2.0, 5.0])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Noisy().eval(), candidate=Noisy().eval(), inputs=inputs)
    assert not any(pair.verdict in ("suspicious", "wrong") for pair in right.pairs)
    assert not right.results, "no result is compared with what another run drew"
    wrong = check(Noisy().eval(), candidate=Noisy(2.1).eval(), inputs=inputs)
    assert not wrong.ok and [found.site for found in wrong.origins] == ["./mul.0"]
