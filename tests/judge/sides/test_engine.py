"""Engines of one process or of ranks: right ones are right, and a planted mistake is named with op and rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.diagnose.ladder import levels
from glassengine.diagnose.ladder.judging import judge
from glassengine.errors import IncomparableError
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.engine import RanksSide
from glassengine.judge.sides.protocol import Place
from glassengine.judge.verdict.score import Score
from glassengine.program import Program, export_program, load_model
from glassengine.program.parallel.placements import Mesh, ShardPlacement, shard_of
from glassengine.program.parallel.plan import plan_ranks
from glassengine.program.parallel.rewrite import program_of
from glassengine.program.parallel.stages import cut_stages
from glassengine.program.representation.program import copied_graph, rebuilt
from glassengine.progress import silent
from glassengine.results import Comparison, Divergence
from glassengine.testing import models


class Block(nn.Module):
    """A norm and an activation, each in the ops that torch has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def normed(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)

    def act(self, h: Tensor) -> Tensor:
        return torch.nn.functional.gelu(h * 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.normed(self.up(x))))


class OtherNorm(Block):
    """The norm in other ops, which have no counterparts one by one."""

    terms = 64

    def normed(self, h: Tensor) -> Tensor:
        return h / torch.sqrt(h.pow(2).sum(-1, keepdim=True) / self.terms + 1e-5)


class WrongNorm(OtherNorm):
    terms = 63


class ByHand(Block):
    """The activation written out: rounded after each op, it cancels where it is small."""

    root = 0.5**0.5

    def act(self, h: Tensor) -> Tensor:
        h = h * 4
        return 0.5 * h * (1 + torch.erf(h * self.root))


class WronglyByHand(ByHand):
    root = 0.72


def checked(tmp_path: Path, port: type[Block], dtype: str) -> Comparison:
    floating: torch.dtype = getattr(torch, dtype)
    baseline, candidate = models.drawn(Block).to(floating), models.drawn(Block).to(floating)
    candidate.load_state_dict(baseline.state_dict())
    candidate.__class__ = port
    inputs = {"x": torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(floating)}
    torch.save(inputs, tmp_path / "x.pt")
    glass.build(candidate, tmp_path / "engine", backend="eager", inputs=inputs, dtype=dtype)
    return glass.check(baseline, candidate=tmp_path / "engine", inputs=str(tmp_path / "x.pt"), dtype=dtype)


def test_regions_of_an_engine_are_credited(tmp_path: Path) -> None:
    found = checked(tmp_path, OtherNorm, "float32")
    assert found.ok and found.verdict == "rounding" and found.coverage == 1.0
    assert {pair.site for pair in found.pairs if pair.method == "region" and pair.level == "engine"} == {"./rsqrt.0"}
    engine = next(one for one in found.granularity if one.level == "engine")
    assert engine.in_regions > 0 and engine.results_only == 0


def test_extra_tensors_of_an_engine_are_listed(tmp_path: Path) -> None:
    found = checked(tmp_path, OtherNorm, "float32")
    alone = {item.site for item in found.skipped if item.side == "candidate"}
    assert {"./sqrt.0", "./sum.0"} <= alone and found.counts["unmatched_candidate"] == len(alone)


def test_a_mistake_in_a_region_of_an_engine_is_found(tmp_path: Path) -> None:
    found = checked(tmp_path, WrongNorm, "float32")
    first = found.first_divergence
    assert not found.ok and first is not None and first.site in ("./mean.0", "./mul.0")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_engine_that_writes_an_activation_out_is_right(tmp_path: Path, dtype: str) -> None:
    found = checked(tmp_path, ByHand, dtype)
    assert found.ok and found.verdict == "rounding", found.not_ok_because


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_writes_it_out_wrongly_is_not(tmp_path: Path, dtype: str) -> None:
    found = checked(tmp_path, WronglyByHand, dtype)
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "./gelu.0"


Parts = list[list[Program]]
_exported: dict[Any, Any] = {}


@dataclass
class Shared:
    """A model, its program, and the means to judge ranks of it."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in _exported:
            loaded = load_model(models.CAUSAL_LMS[self.name]())
            _exported[self.name] = loaded, export_program(loaded)
        self.loaded, self.program = _exported[self.name]

    def _made(self, mesh: Mesh) -> Any:
        if (self.name, mesh) not in _exported:
            layout, rows = None, [self.program]
            if mesh.tensor > 1:
                layout = plan_ranks(self.program, getattr(self.loaded.module, "tp_plan", None), mesh.tensor).layout
                rows = [program_of(self.program, layout, place) for place in range(mesh.tensor)]
            stages = [cut_stages(row, mesh.pipeline) for row in rows]
            _exported[self.name, mesh] = layout, [[row[stage] for row in stages] for stage in range(mesh.pipeline)]
        return _exported[self.name, mesh]

    def judged(self, mesh: Mesh, plant: Callable[[Parts], None] = lambda parts: None) -> tuple[list[Divergence], Score]:
        """Return what is wrong in the parts after `plant` has changed them, first things first."""
        layout, made = self._made(mesh)
        parts = [[_copy(program) for program in row] for row in made]
        plant(parts)
        with ExitStack() as stack:
            climb = levels.start(self.loaded, None, 0, stack, silent, exported=self.program)
            del climb.cases[1:]
            pairs = pair_programs(self.program, self.program, climb.cases)
            side = RanksSide(
                self.program, pairs, place=Place.RANKS, replay=Replay(self.program), parts=parts, layout=layout
            )
            score = Score(side, self.program)
            judge(climb, [*climb.scores, score])
        return [found for found in score.divergences.values() if found.verdict == "wrong"], score


def _copy(program: Program) -> Program:
    exported = program.exported
    made = rebuilt(exported, copied_graph(exported.graph), exported.graph_signature.output_specs)
    made._state_dict = dict(exported.state_dict)
    return program.replace(made)


def weight(parts: Parts, rank: int, end: str, value: torch.Tensor) -> None:
    """Give one rank of the first stage another weight."""
    state = parts[0][rank].exported.state_dict
    name = next(name for name in state if name.endswith(end))
    assert state[name].shape == value.shape
    state[name] = torch.nn.Parameter(value.detach().clone(), requires_grad=False)


def held(parts: Parts, rank: int, end: str) -> torch.Tensor:
    state = parts[0][rank].exported.state_dict
    found: torch.Tensor = next(value for name, value in state.items() if name.endswith(end))
    return found


def edited(program: Program, change: Callable[[torch.fx.Graph, dict[str, torch.fx.Node]], None]) -> None:
    graph = program.exported.graph
    change(graph, {node.name: node for node in graph.nodes})
    program.exported.graph_module.recompile()


def reduced(program: Program, number: int = 0) -> str:
    """Return the name of what is added up by the `number`-th all-reduce of a layer."""
    names = [n.name for n in program.graph.nodes if n.name.endswith("_all_reduce") and "embedding" not in n.name]
    return names[number].removesuffix("_all_reduce")


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [Mesh(2), pytest.param(Mesh(2, 2), marks=pytest.mark.slow)], ids=str)
def test_right_ranks_are_right(name: str, mesh: Mesh) -> None:
    wrong, score = Shared(name).judged(mesh)
    assert wrong == []
    assert not [pair for pair in score.pairs if pair.verdict in ("suspicious", "wrong")]
    assert len(score.judged_nodes) > 100
    sums = [pair for pair in score.pairs if pair.judged_by == "bound of a sum"]
    assert len({pair.site for pair in sums}) >= 4 and max(pair.bound_ratio or 0.0 for pair in sums) <= 1
    assert "embed_tokens" in sums[0].site or name == "gpt2"


@pytest.mark.slow
def test_ranks_that_take_the_mean_of_their_terms() -> None:
    def plant(parts: Parts) -> None:
        for program in parts[0]:
            name = reduced(program)

            def change(graph: Any, nodes: dict[str, Any], name: str = name) -> None:
                call = nodes[f"{name}_all_reduce"]
                call.args = (call.args[0], "avg", *call.args[2:])

            edited(program, change)

    (first, *_), score = Shared("llama").judged(Mesh(2), plant)
    assert first.site == "model.layers.0.self_attn.o_proj/linear.0"
    wrong = [pair.site for pair in score.pairs if pair.judged_by == "bound of a sum" and pair.verdict == "wrong"]
    assert set(wrong) == {f"{first.site}:all_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gemma3", "phi3"])
@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4), Mesh(1, 2), Mesh(2, 2)], ids=str)
def test_right_ranks_of_other_families_are_right(name: str, mesh: Mesh) -> None:
    wrong, score = Shared(name).judged(mesh)
    assert wrong == []
    assert len(score.judged_nodes) > 100


def test_a_shard_of_another_rank() -> None:
    def plant(parts: Parts) -> None:
        weight(parts, 1, "layers.0.mlp.down_proj.weight", held(parts, 0, "layers.0.mlp.down_proj.weight"))

    first = Shared("llama").judged(Mesh(2), plant)[0][0]
    assert (first.site, first.rank) == ("model.layers.0.mlp.down_proj/linear.0", 1)


@pytest.mark.slow
def test_a_missing_all_reduce() -> None:
    def plant(parts: Parts) -> None:
        for program in parts[0]:
            name = reduced(program)

            def change(graph: Any, nodes: dict[str, Any], name: str = name) -> None:
                call = nodes[f"{name}_all_reduce"]
                call.target, call.args = torch.ops.aten.clone.default, call.args[:1]

            edited(program, change)

    first = Shared("llama").judged(Mesh(2), plant)[0][0]
    assert first.site == "model.layers.0.self_attn.o_proj/linear.0"
    assert first.hints[0].evidence == "all-reduce missing"


@pytest.mark.slow
def test_a_doubled_all_reduce() -> None:
    def plant(parts: Parts) -> None:
        for program in parts[0]:
            name = reduced(program, 1)

            def change(graph: Any, nodes: dict[str, Any], name: str = name) -> None:
                call, waited = nodes[f"{name}_all_reduce"], nodes[name]
                with graph.inserting_before(waited):
                    again = graph.call_function(call.target, (call, *call.args[1:]))
                waited.args = (again,)

            edited(program, change)

    first = Shared("llama").judged(Mesh(2), plant)[0][0]
    assert first.site == "model.layers.0.mlp.down_proj/linear.0"
    assert first.hints[0].evidence == "all-reduce doubled"


@pytest.mark.slow
def test_one_rank_without_the_collective_of_others() -> None:
    def plant(parts: Parts) -> None:
        def change(graph: Any, nodes: dict[str, Any]) -> None:
            call = nodes[f"{reduced(parts[0][1])}_all_reduce"]
            call.target, call.args = torch.ops.aten.clone.default, call.args[:1]

        edited(parts[0][1], change)

    # The next collective has the shape of the one that is missing, so the sums are those of different ops.
    try:
        wrong = Shared("llama").judged(Mesh(2), plant)[0]
    except IncomparableError as error:
        assert "rank" in str(error.got)
    else:
        assert wrong[0].site == "model.layers.0.self_attn.o_proj/linear.0"


@pytest.mark.slow
def test_a_bias_that_each_rank_adds() -> None:
    def plant(parts: Parts) -> None:
        for program in parts[0]:
            name = reduced(program)

            def change(graph: Any, nodes: dict[str, Any], name: str = name) -> None:
                call, last = nodes[f"{name}_all_reduce"], nodes[name]
                with graph.inserting_before(call):
                    early = graph.call_function(torch.ops.aten.add.Tensor, (call.args[0], last.args[1]))
                call.args = (early, *call.args[1:])
                last.args = (last.args[0], 0.0)

            edited(program, change)

    first = Shared("gpt2").judged(Mesh(2), plant)[0][0]
    assert first.site == "transformer.h.0.attn.c_proj/addmm.0"
    assert "bias repeated" in {hint.evidence for hint in first.hints}


@pytest.mark.slow
def test_key_heads_of_the_other_rank() -> None:
    def plant(parts: Parts) -> None:
        end = "layers.1.self_attn.k_proj.weight"
        one, other = held(parts, 0, end).clone(), held(parts, 1, end).clone()
        weight(parts, 0, end, other)
        weight(parts, 1, end, one)

    first = Shared("llama").judged(Mesh(2), plant)[0][0]
    assert first.site == "model.layers.1.self_attn.k_proj/linear.0"
    assert "ranks have parts of each other" in {hint.text for hint in first.hints}


def test_a_wrong_offset_into_the_vocabulary() -> None:
    def plant(parts: Parts) -> None:
        def change(graph: Any, nodes: dict[str, Any]) -> None:
            node = nodes["embedding_sub"]
            node.args = (node.args[0], node.args[1] - 1)

        edited(parts[0][1], change)

    first = Shared("llama").judged(Mesh(2), plant)[0][0]
    assert (first.site, first.rank) == ("model.embed_tokens/embedding.0", 1)


@pytest.mark.slow
def test_halves_of_a_gate_cut_as_if_they_were_one() -> None:
    shared = Shared("mixtral")

    def plant(parts: Parts) -> None:
        end = "layers.0.mlp.experts.gate_up_proj"
        whole = next(v for k, v in shared.program.exported.state_dict.items() if k.endswith(end))
        for rank in range(2):
            weight(parts, rank, end, shard_of(whole.detach(), ShardPlacement(1, (int(whole.shape[1]),)), 2, rank))

    first = shared.judged(Mesh(2), plant)[0][0]
    assert first.site.startswith("model.layers.0.mlp.experts/")


@pytest.mark.slow
def test_stages_in_another_order() -> None:
    with pytest.raises(IncomparableError, match="rank 0 holds the part of another stage"):
        Shared("llama").judged(Mesh(1, 2), lambda parts: parts.reverse())


@pytest.mark.slow
def test_a_layer_of_another_stage() -> None:
    shared = Shared("llama")

    def plant(parts: Parts) -> None:
        values: Sequence[tuple[str, torch.Tensor]] = list(parts[1][0].exported.state_dict.items())
        for name, value in values:
            if "layers.1.mlp" in name:
                weight(parts, 0, name.partition("layers.1")[2].replace(".mlp", "0.mlp"), value)

    first = shared.judged(Mesh(1, 2), plant)[0][0]
    assert (first.site, first.rank) == ("model.layers.0.mlp.gate_proj/linear.0", 0)
