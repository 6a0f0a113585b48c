"""What a piece should give: rounding is allowed, a mistake is not, and no run sees what another one has written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.judge.graphs.cut import NodeRecorder, Piece, piece_of
from glassengine.judge.replay.expected import expected_of, judged


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
