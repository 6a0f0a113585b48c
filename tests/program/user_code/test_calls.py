"""Code of the user that raises: the line, the module of the model, and what is ours is not blamed on it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401  # its logger has a handler from then on
from torch import nn

from glassengine.capture.observers import observing
from glassengine.errors import UsageError
from glassengine.program.export.export import export_module
from glassengine.program.user_code.calls import (
    call_factory,
    described,
    forward_errors,
    load_function,
    raised_in,
    source_of,
    without_bars,
)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(3, 3)  # the line at fault


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner()])
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def error_of(model: nn.Module) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 2))
    return caught.value


def test_the_innermost_line_of_the_user_and_its_module() -> None:
    model = Outer()
    error = error_of(model)
    assert raised_in(error, model) == "blocks.1"
    assert str(source_of(error)).startswith(f"{__file__}:") and str(source_of(error)).endswith("# the line at fault")
    assert described(error).startswith("RuntimeError: ") and __file__ in described(error)


def test_a_layer_of_torch_is_named_by_its_path_and_the_line_that_calls_it() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(5, 5))
    assert raised_in(error_of(model), model) == "1"


def test_what_is_raised_outside_of_the_forward_is_nobodys() -> None:
    model = Outer()
    assert raised_in(error_of(Inner()), model) is None
    with pytest.raises(RuntimeError, match="cannot be multiplied"), forward_errors(model, "raised in"):
        Inner()(torch.zeros(2, 2))


def test_an_observer_of_ours_is_not_the_model() -> None:
    def observe(site: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("ours")

    model = nn.Sequential(nn.Identity())
    with pytest.raises(RuntimeError, match="ours") as caught, observing(model, observe):
        model(torch.zeros(2))
    assert raised_in(caught.value, model) is None


def test_a_forward_that_raises_is_an_error_of_the_user() -> None:
    model = Outer()
    with pytest.raises(UsageError) as caught, forward_errors(model, "raised in"):
        model(torch.zeros(2, 2))
    assert caught.value.what == "raised in blocks.1"


@pytest.mark.parametrize(
    ("text", "line"),
    [("import nothing_like_it\n", ":1: import nothing_like_it"), ("x = 1\ndef broken(:\n", ":2: def broken(:")],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "port.py"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_function(f"{file}:model")
    assert str(caught.value.got).endswith(f"raised at {file}{line}")


def test_a_factory_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text("def model():\n    return {}['weights']\n")
    with pytest.raises(UsageError) as caught:
        call_factory(f"{file}:model")
    assert caught.value.got == f"KeyError: 'weights', raised at {file}:2: return {{}}['weights']"


class LooksAtValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x


def test_the_exporter_prints_no_graph_of_what_it_raises(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"if not torch\.isfinite\(x\)\.all\(\)"):
        export_module(LooksAtValues(), {"x": torch.ones(2)})
    said = capfd.readouterr()
    assert not said.out and "# File:" not in said.err and "Traceback" not in said.err, said


def test_s14_what_transformers_logs_of_a_file_is_escaped() -> None:
    handler = logging.getLogger("transformers").handlers[0]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, without_bars():
        patch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
        logging.getLogger("transformers.x").warning("%s is not used\n\x1b[1mtitle\x1b[0m", "a\x1b[2J\u202eb")
    assert said == ["a\\x1b[2J\\u202eb is not used\ntitle"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
        logging.getLogger("transformers.x").warning("as it is: \x1b[1m")
    assert said[1] == "as it is: \x1b[1m"
