"""What `exporting_once` takes for equal: a model or a program that a test plants a mistake in must get its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from glassengine.errors import CorruptError
from glassengine.program import generation
from glassengine.program import generation as export_two
from glassengine.program.export import export
from glassengine.program.representation import stored
from glassengine.program.representation.program import Program
from glassengine.testing import models

pytestmark = pytest.mark.usefixtures("nothing_kept")


@dataclass
class Exported:
    exported: Any
    metadata: dict[str, Any]


class Graph:
    """What of an exported program counts; `constants` is of the code."""

    def __init__(self, model: nn.Module) -> None:
        self._state_dict, self._constants = model.state_dict(), {"constant": torch.ones(2)}
        self.graph_module, self.graph_signature, self.range_constraints = nn.Module(), "() -> ()", {"s0": 2}

    state_dict = property(lambda self: self._state_dict)
    constants = property(lambda self: self._constants)


def exported_from(model: nn.Module) -> Exported:
    """Return what an export that takes no time makes of a model."""
    return Exported(Graph(model), {"layout": "plain"})


class Exports:
    """Exports models that are equal but for a change; no other test has models of this size.

    Attributes:
        made: The models that were really exported, first of all one without a change.
    """

    _sizes = itertools.count(3)
    model: Any

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._size = next(self._sizes)

    def really(self, model: nn.Module, *, on_stage: Callable[[str], None]) -> Exported:
        """Stand in for `export_causal_lm`."""
        on_stage(f"stage of {len(self.made)}")
        self.made.append(model)
        return exported_from(model)

    def again(self, change: Callable[[Any], object] = lambda _: None, **options: Any) -> Any:
        model = models.llama(vocab_size=self._size)
        change(model)
        self.model = model
        return generation.export_causal_lm(model, **options)


@pytest.fixture
def exports(
    exporting_once: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Exports]:
    found = Exports()
    monkeypatch.setattr(export, "export_causal_lm", found.really)
    with exporting_once():
        found.again()
        assert len(found.made) == 1
        yield found


def test_an_equal_model_is_not_exported_again(exports: Exports) -> None:
    first, second = exports.again(metadata={"model": "one"}), exports.again(metadata={"model": "two"})
    assert len(exports.made) == 1 and first.exported.graph_module is second.exported.graph_module
    assert (first.metadata, second.metadata) == (
        {"model": "one", "layout": "plain"},
        {"model": "two", "layout": "plain"},
    )
    seen: list[str] = []
    for _ in range(2):
        exports.again(on_stage=seen.append)
    assert len(exports.made) == 2 and seen == ["stage of 1"] * 2


def test_where_a_model_was_read_from_makes_no_difference(exports: Exports) -> None:
    exports.again(lambda model: setattr(model, "name_or_path", "elsewhere"))
    exports.again(lambda model: setattr(model.config, "_name_or_path", "elsewhere"))
    assert len(exports.made) == 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "one tensor in place of two": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "a gradient": lambda model: model.lm_head.weight.requires_grad_(not model.lm_head.weight.requires_grad),
    "a tensor that is no weight": lambda model: setattr(model.model.norm, "shift", torch.ones(2000)),
    "a setting": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.3),
    "a method of one module": lambda model: setattr(model.model.norm, "forward", torch.sin),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "a module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
    "the attention": lambda model: model.set_attn_implementation("eager"),
    "the dtype": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_that_differs_is(exports: Exports, what: str) -> None:
    exports.again(CHANGES[what])
    assert len(exports.made) == 2
    exports.again()
    assert len(exports.made) == 2


@pytest.mark.parametrize(("owner", "name"), [(modeling_llama, "rotate_half"), (modeling_llama.LlamaMLP, "forward")])
def test_code_that_a_test_replaced(exports: Exports, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_: None)
        exports.again()
    assert len(exports.made) == 2
    exports.again()
    assert len(exports.made) == 2


def test_one_with_other_weights_has_its_own(exports: Exports) -> None:
    def other(model: Any) -> None:
        model.lm_head.weight.data[0].mul_(1.001)
        model.model.rotary_emb.inv_freq.mul_(2)

    found, model = exports.again(other), exports.model
    assert len(exports.made) == 1
    assert found.exported.state_dict["lm_head.weight"] is model.lm_head.weight
    assert torch.equal(found.exported.constants["constant"], torch.ones(2))
    with torch.no_grad():
        exports.made[0].lm_head.weight.mul_(2)
    assert torch.equal(found.exported.state_dict["lm_head.weight"], model.lm_head.weight)
    # Whoever is shown the stages is shown those of this model.
    stages: list[str] = []
    exports.again(other, on_stage=stages.append)
    assert len(exports.made) == 2 and stages == ["stage of 1"]


def test_a_number_in_place_of_another(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "factor", 2.0, raising=False)
    exports.again()
    monkeypatch.setattr(modeling_llama.LlamaMLP, "factor", 3.0)
    exports.again()
    assert len(exports.made) == 3


def test_a_program_that_was_changed_since(exports: Exports) -> None:
    exports.again().exported.graph_module.graph = SimpleNamespace(nodes=[])
    exports.again()
    assert len(exports.made) == 2


# -- programs that are stored and read back ----------------------------------------------------------------------------


class Scaled(nn.Module):
    """One weight and one factor that is a literal of the graph."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor


@dataclass
class Disk:
    """Stores and reads programs; `saved` and `loaded` count what really was."""

    directory: Path
    saved: int = 0
    loaded: int = 0

    def save(self, program: Program, name: str) -> Path:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        stored.save_program(program, path)
        return path


@pytest.fixture
def disk(
    exporting_once: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Disk]:
    found = Disk(tmp_path)
    save, load = torch.export.save, torch.export.load

    def counted_save(*args: Any) -> None:
        found.saved += 1
        save(*args)

    def counted_load(*args: Any) -> Any:
        found.loaded += 1
        return load(*args)

    monkeypatch.setattr(torch.export, "save", counted_save)
    monkeypatch.setattr(torch.export, "load", counted_load)
    with exporting_once():
        yield found


def scaled(factor: float) -> Program:
    return export.export_module(Scaled(factor), {"x": torch.ones(3)})


def value(program: Program) -> float:
    return float(program.exported.module()(x=torch.ones(3))[0].detach())


def multiply_by(program: Program, factor: float) -> None:
    """Change the graph in place, as a test that plants a mistake may."""
    node = next(node for node in program.exported.graph.nodes if 2.5 in node.args)
    node.args = (node.args[0], factor)


def test_equal_programs_are_stored_and_read_once(disk: Disk) -> None:
    program = scaled(2.5)
    one, other = disk.save(program, "one"), disk.save(program, "other")
    assert disk.saved == 1 and (one / "program.pt2").read_bytes() == (other / "program.pt2").read_bytes()
    first = stored.load_program(one, {"weight": torch.ones(3)})
    second = stored.load_program(other, {"weight": torch.full((3,), 2.0)})
    # Each has the weights that it was given.
    assert disk.loaded == 1 and (value(first), value(second)) == (2.5, 5.0)


def test_a_program_that_was_changed_in_place_is_stored_anew(disk: Disk) -> None:
    program = scaled(2.5)
    disk.save(program, "before")
    multiply_by(program, 7.0)
    after = disk.save(program, "after")
    assert disk.saved == 2 and value(stored.load_program(after, {"weight": torch.ones(3)})) == 7.0


def test_a_program_that_was_changed_since_it_was_read_is_read_anew(disk: Disk) -> None:
    path = disk.save(scaled(2.5), "one")
    read = stored.load_program(path, {"weight": torch.ones(3)})
    multiply_by(read, 7.0)
    assert value(stored.load_program(path, {"weight": torch.ones(3)})) == 2.5 and disk.loaded == 2


def test_a_damaged_file_is_refused_however_often_its_like_was_read(disk: Disk) -> None:
    path = disk.save(scaled(2.5), "one")
    stored.load_program(path, {"weight": torch.ones(3)})
    whole = (path / "program.pt2").read_bytes()
    (path / "program.pt2").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError):
        stored.load_program(path, {"weight": torch.ones(3)})


def test_plain_modules(
    exporting_once: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    really = export.export_module

    def counted(*args: Any, **options: Any) -> Program:
        made.append(args)
        return really(*args, **options)

    monkeypatch.setattr(export, "export_module", counted)
    with exporting_once():
        first, other = Scaled(), Scaled()
        other.weight.data *= 3
        programs = [generation.export_module(module, {"x": torch.ones(3)}) for module in (first, other, first)]
        assert len(made) == 1 and [value(program) for program in programs] == [2.0, 6.0, 2.0]
        generation.export_module(first, {"x": torch.zeros(3)})
        generation.export_module(first, [{"x": torch.ones(3)}] * 2)
        assert len(made) == 3
        assert value(generation.export_module(Scaled(5.0), {"x": torch.ones(3)})) == 5.0


@pytest.mark.parametrize("name", ["export_encoder_decoder", "export_image_text"])
def test_both_programs_of_what_has_two(
    name: str, exporting_once: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def really(model: nn.Module, inputs: Any, *, on_stage: Any, on_encoder_stage: Any) -> tuple[Exported, Exported]:
        on_encoder_stage("first")
        on_stage("last")
        made.append(model)
        return exported_from(model), exported_from(model)

    monkeypatch.setattr(export_two, name, really)
    given = [{"input_ids": torch.ones(1, 4, dtype=torch.int64)}]
    with exporting_once():
        export_both = getattr(generation, name)
        encoder, decoder = export_both(Scaled(), given, metadata={"model": "one"})
        again = export_both(Scaled(), given)
        assert len(made) == 1
        pairs = zip(again, (encoder, decoder), strict=True)
        assert all(one.exported.graph_module is other.exported.graph_module for one, other in pairs)
        assert decoder.metadata == {"model": "one", "layout": "plain"} and again[1].metadata == {"layout": "plain"}
        export_both(Scaled(), [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}])
        export_both(Scaled(3.0), given)
        assert len(made) == 3, "other inputs, and another number"
        seen: list[str] = []
        export_both(Scaled(), given, on_encoder_stage=lambda stage: seen.append(f"encoder: {stage}"))
        export_both(Scaled(), given, on_stage=seen.append)
        assert seen == ["encoder: first", "last"]
