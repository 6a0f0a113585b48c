"""What a piece should give, of one op or several: rounding is allowed, and a mistake is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import glassengine as glass
from glassengine.judge.cases import Case
from glassengine.judge.pieces import NodeRecorder, Piece, piece_of
from glassengine.judge.replay import reference, replay
from glassengine.judge.replay.expected import SegmentReplay, expected_of, judged
from glassengine.judge.sides.module import ModuleSide
from glassengine.program.export.export import export_module
from glassengine.results import Comparison
from glassengine.testing import models


def piece_of_all(function: Callable[[Tensor], object], x: Tensor) -> Piece:
    graph = make_fx(function)(x.clone())
    recorder = NodeRecorder(graph)
    recorder.run(x.clone())
    piece = piece_of([node for node in graph.graph.nodes if node.op == "call_function"], recorder.values)
    assert piece is not None
    return piece


def test_rounding_is_no_failure_of_a_piece_and_a_mistake_is() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    piece = piece_of_all(lambda x: (x * 1.1).sin() + x.relu() * 0.3, x)
    expected, (result,) = expected_of(piece), piece.run()
    assert [found.verdict for found in judged(expected, [result])] == ["identical"]
    assert [found.verdict for found in judged(expected, [result * (1 + 2.0**-23)])] == ["rounding"]
    assert [found.verdict for found in judged(expected, [result * 1.001])] == ["wrong"]
    broken = result.clone()
    broken[0, 0] = torch.nan
    assert [found.verdict for found in judged(expected, [broken])] == ["wrong"]


def test_a_mistake_is_one_where_a_piece_counts_in_what_it_is_given() -> None:
    def counts(calls: Tensor) -> tuple[Tensor, Tensor]:
        return (calls * 0.1).sin() + calls.add_(1), calls.mul_(3).cos()

    for dtype in (torch.float32, torch.float64):
        piece = piece_of_all(counts, torch.linspace(-2, 2, 24, dtype=dtype).reshape(3, 8))
        expected, results = expected_of(piece), piece.run()
        assert {found.verdict for found in judged(expected, results)} == {"identical"}
        for index in range(len(results)):
            wrong = [result + 0.5 * (at == index) for at, result in enumerate(results)]
            assert judged(expected, wrong)[index].verdict == "wrong"


class Chain(nn.Module):
    """Eight blocks in a row, so that noise builds up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "inputs.pt"
    torch.save({"x": torch.randn(4, 32, generator=torch.Generator().manual_seed(3))}, path)
    return str(path)


def untouched(candidate: nn.Module, inputs: str) -> tuple[Comparison, list[str]]:
    """Return the comparison, and what the untouched level says the origins are."""
    result = glass.check(models.drawn(Chain), candidate=candidate, inputs=inputs)
    return result, [found.site for found in result.origins if found.level == "candidate, untouched"]


def test_every_segment_is_judged_by_its_own_inputs(inputs: str) -> None:
    candidate = models.drawn(Chain)
    candidate.blocks[1][0].weight.data[3] *= 2  # type: ignore[index, union-attr, operator]
    candidate.blocks[6][2].eps = 0.03  # type: ignore[index]
    result, origins = untouched(candidate, inputs)
    assert origins == ["blocks.1.0/linear.0", "blocks.6.2"]
    pairs = [pair for pair in result.pairs if pair.level == "candidate, untouched"]
    assert {pair.judged_by for pair in pairs} == {"segment"}
    # What lies between the two and behind them is clean: it was computed as it should be, from wrong inputs.
    assert sum(pair.verdict == "wrong" and not pair.inherited for pair in pairs) == 2


def test_a_side_that_rounds_otherwise_is_clean(inputs: str) -> None:
    class Halves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., :16] @ self.weight[:, :16].T + x[..., 16:] @ self.weight[:, 16:].T + self.bias

    candidate = models.drawn(Chain)
    for block in candidate.blocks:  # type: ignore[union-attr]
        block[0].__class__ = Halves  # type: ignore[index]
    result, origins = untouched(candidate, inputs)
    assert origins == []
    assert any(pair.verdict == "rounding" and pair.judged_by == "segment" for pair in result.pairs)


def test_the_screen_says_which_guarantee_holds(inputs: str) -> None:
    result, _ = untouched(models.drawn(Chain), inputs)
    assert {level.name: level.guarantee for level in result.levels} == {
        "program": "judged by segments",
        "candidate": "judged op by op",
        "candidate, untouched": "judged by segments",
    }


class Remembers(nn.Module):
    """Two steps: the second one reads what the first one left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()).relu())


def _walked(observed: dict[str, torch.Tensor], cut: replay.Cut = replay.Cut.SEGMENT) -> dict[str, str | None]:
    """Return the verdict of each layer of `Remembers` on `observed`; None where the segment is not judged."""
    model = models.drawn(Remembers)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    program = export_module(model, {"x": x})
    nodes = {node.name: node for node in program.graph.nodes}
    layers = {site.name: nodes[site.node] for site in program.sites if site.kind == "module" and site.name != "."}
    side = replay.Replay(program, cut=cut)
    side.begin_step({"x": x}, {layers[name].name: value for name, value in observed.items()})
    found = {}
    for name in ("first", "second", "third"):
        judged = side.judge(layers[name], observed[name], None) if name in observed else None
        found[name] = None if judged is None else judged.judgement.verdict
    return found


def test_f42_no_segment_stands_on_a_tensor_that_has_another_shape() -> None:
    model = models.drawn(Remembers)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    first = model.first(x) * 1.5  # type: ignore[operator]
    second = model.second(first.relu())  # type: ignore[operator]
    third = model.third(second.relu())  # type: ignore[operator]
    assert _walked({"first": first, "second": second, "third": third}) == {
        "first": "wrong",
        "second": "identical",
        "third": "identical",
    }
    # What the second layer was given is not known: it is not to blame for what the first one did.
    assert _walked({"first": first.flatten(), "second": second, "third": third}) == {
        "first": None,
        "second": None,
        "third": "identical",
    }


def test_a_product_that_is_judged_alone_is_not_computed_for_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.drawn(Remembers)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    first = model.first(x) * 1.5  # type: ignore[operator]
    second = model.second(first.relu())  # type: ignore[operator]
    third = model.third(second.relu()) * 1.5  # type: ignore[operator]
    computed: list[str] = []
    evaluate = reference.ReferenceRun._evaluate

    def counted(self: reference.ReferenceRun, node: Node, *args: Any) -> Any:
        computed.append(str(node.target))
        return evaluate(self, node, *args)

    monkeypatch.setattr(reference.ReferenceRun, "_evaluate", counted)
    found = _walked({"first": first, "second": second, "third": third}, replay.Cut.REGION)
    assert found == {"first": "wrong", "second": "identical", "third": "wrong"}
    # The first one's input is known. The others end regions: what the ReLU makes was not observed.
    assert sum("linear" in one for one in computed) == 2 and sum("relu" in one for one in computed) == 2
    # Of another shape, it is what nothing is known of.
    found = _walked({"first": first.flatten(), "second": second, "third": third}, replay.Cut.REGION)
    assert found == {"first": None, "second": None, "third": "wrong"}


def test_f42_what_is_left_of_a_step_stands_on_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side forgets the tensors of a step when the next one runs; what nobody asked for is run only then."""
    model = models.drawn(Remembers)
    program = export_module(model, {"x": torch.zeros(4, 8)})
    asked: list[torch.Tensor | None] = []

    class Remembered(SegmentReplay):
        def _finish(self) -> None:
            if self._walk is not None:
                asked.append(self._observed(node))
            super()._finish()

    monkeypatch.setattr(replay, "SegmentReplay", Remembered)
    node = next(site.node for site in program.sites if site.name == "second")
    side = ModuleSide(model, program, replay=replay.Replay(program, cut=replay.Cut.SEGMENT))
    side.begin(Case("inputs", 2))
    for value in (1.0, 2.0):
        side.step({"x": torch.full((4, 8), value)})
    with torch.no_grad():
        earlier = model.second(model.first(torch.full((4, 8), 1.0)).relu())  # type: ignore[operator]
    assert len(asked) == 1 and asked[0] is not None and torch.equal(asked[0], earlier)
