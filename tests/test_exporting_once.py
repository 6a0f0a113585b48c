"""What `exporting_once` takes for an equal model: one that a test plants a mistake in must get a program of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from glassengine import program
from glassengine.program import export
from glassengine.testing import models


@dataclass
class Exported:
    exported: Any
    metadata: dict[str, Any]


class Exports:
    """Exports models that are equal but for a change; no other test has models of this size.

    Attributes:
        made: The models that were really exported, first of all one without a change.
    """

    _sizes = itertools.count(3)

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._size = next(self._sizes)

    def really(self, model: nn.Module, **_: Any) -> Exported:
        """Stand in for `export_causal_lm`."""
        self.made.append(model)
        return Exported(SimpleNamespace(state_dict=model.state_dict()), {"layout": "plain"})

    def again(self, change: Callable[[Any], object] = lambda _: None, **options: Any) -> Any:
        model = models.llama(vocab_size=self._size)
        change(model)
        return program.export_causal_lm(model, **options)


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
    assert len(exports.made) == 1 and first.exported is second.exported
    assert (first.metadata, second.metadata) == (
        {"model": "one", "layout": "plain"},
        {"model": "two", "layout": "plain"},
    )
    exports.again(on_stage=print)
    assert len(exports.made) == 2, "an observer sees nothing of what was exported before"


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight": lambda model: model.lm_head.weight.data[0].mul_(1.001),
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


def test_a_program_whose_weights_were_changed_since(exports: Exports) -> None:
    with torch.no_grad():
        exports.made[0].lm_head.weight.mul_(2)
    exports.again()
    assert len(exports.made) == 2
