"""The level op-by-op: what the back-end makes of single ops, and what that says about a wrong engine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import glassengine as glass
from glassengine.backends import registry
from glassengine.backends.eager import EagerBackend
from glassengine.cli.main import main
from glassengine.diagnose.ladder.levels import add_op_by_op, start
from glassengine.judge.site_pairs import pair_sites
from glassengine.program import load_inputs, load_model
from glassengine.program.representation.kept_logits import KEPT
from glassengine.progress import silent
from glassengine.results import Comparison
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class PlantedBackend(EagerBackend):
    """Changes what an engine returns."""

    name = "planted"

    def changed(self, inputs: Any, outputs: Any) -> Any:
        raise NotImplementedError

    def load(self, directory: Path, weights: Any) -> Any:
        run = super().load(directory, weights)
        return lambda inputs: self.changed(inputs, run(inputs))


class LastAloneWrong(PlantedBackend):
    """Planted: the logits of a prompt's last token are wrong where no others are made."""

    def changed(self, inputs: Any, outputs: Any) -> Any:
        is_alone = len(inputs[KEPT]) < inputs["input_ids"].shape[1]
        return {n: v + 0.1 * v.roll(1, -1) if n == "logits" and is_alone else v for n, v in outputs.items()}


def test_logits_are_judged_as_a_generation_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LastAloneWrong)
    result = glass.check(models.llama(), backend="planted")
    found = result.first_divergence
    assert found is not None and (found.level, found.step) == ("release", 0)
    assert found.site.startswith("lm_head")


def use(monkeypatch: pytest.MonkeyPatch, backend: type[PlantedBackend]) -> None:
    find = registry.find_backend
    monkeypatch.setattr(registry, "find_backend", lambda name: backend() if name == "planted" else find(name))
    monkeypatch.setattr("glassengine.engine.run.engine.find_backend", registry.find_backend)


class FusedWrong(PlantedBackend):
    """Planted: the engine's silu is wrong; every op alone is right."""

    def changed(self, inputs: Any, outputs: Any) -> Any:
        return {name: value + 0.01 if name == "dbg.silu" else value for name, value in outputs.items()}


class KernelWrong(FusedWrong):
    """Planted: silu is wrong alone as well."""

    def compile_graph(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        run = super().compile_graph(graph, example_inputs)
        if not any("silu" in str(node.target) for node in graph.graph.nodes):
            return run

        def planted(arguments: Any) -> Any:
            return [value + 0.01 for value in run(arguments)]

        planted._boxed_call = True  # type: ignore[attr-defined]
        return planted


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    torch.save({"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    return str(tmp_path / "x.pt")


def check(monkeypatch: pytest.MonkeyPatch, backend: type[PlantedBackend], inputs: str, **options: Any) -> Comparison:
    use(monkeypatch, backend)
    return glass.check(models.drawn(Net), backend="planted", inputs=inputs, **options)


def test_a_mistake_of_fusion_is_right_when_the_op_is_compiled_alone(
    monkeypatch: pytest.MonkeyPatch, inputs: str
) -> None:
    result = check(monkeypatch, FusedWrong, inputs)
    found = result.first_divergence
    assert found is not None and (found.level, found.site) == ("engine", "./silu.0")
    assert "silu compiled alone is right: it takes its neighbors to go wrong" in [hint.text for hint in found.hints]
    levels = {level.name: level for level in result.levels}
    assert list(levels) == ["program", "op-by-op", "engine", "release"]
    assert levels["op-by-op"].guarantee == "judged near the error"
    # What feeds the op and what it feeds: not the residual addition.
    assert {pair.site for pair in result.pairs if pair.level == "op-by-op"} == {
        "up/linear.0",
        "./silu.0",
        "down/linear.0",
    }


def test_a_wrong_kernel_is_wrong_alone_as_well(monkeypatch: pytest.MonkeyPatch, inputs: str) -> None:
    result = check(monkeypatch, KernelWrong, inputs)
    found = result.first_divergence
    assert found is not None and (found.level, found.site) == ("op-by-op", "./silu.0")
    engine = next(d for d in result.origins if d.level == "engine")
    assert "silu compiled alone is wrong as well" in [hint.text for hint in engine.hints]


def test_all_levels_judges_every_op_compiled_alone(
    tmp_path: Path, inputs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom glassengine.testing import models\n\n"
        "def net():\n    return models.drawn(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))\n\n"
        "def x():\n    import torch\n    return {'input': torch.ones(3, 8)}\n"
    )
    arguments = ["check", f"{tmp_path}/net.py:net", "--inputs", f"{tmp_path}/net.py:x", "--backend", "eager"]
    assert main([*arguments, "--all-levels"]) == 0
    assert "\nop-by-op " in capsys.readouterr().out
    assert main(arguments) == 0
    assert "op-by-op" not in capsys.readouterr().out


@pytest.mark.slow
def test_every_op_is_compiled_alone_as_torch_counts_it(inputs: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    before = glass.metrics.current().counters.get("UncachedCompile", 0) + glass.metrics.current().counters.get(
        "CachedCompile", 0
    )
    climb = start(load_model(models.drawn(Net)), load_inputs(inputs), 0, ExitStack(), silent)
    climb.pairs = {pair.baseline.node: pair for pair in pair_sites(climb.program, climb.program)[0]}
    add_op_by_op(climb, "inductor", silent)
    side = climb.scores[-1].side
    side.begin(None)  # type: ignore[arg-type]
    side.step(load_inputs(inputs)[0])
    after = glass.metrics.current().counters.get("UncachedCompile", 0) + glass.metrics.current().counters.get(
        "CachedCompile", 0
    )
    # Two linears of different shapes, silu, add.
    assert after - before == 4
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"] == 4
