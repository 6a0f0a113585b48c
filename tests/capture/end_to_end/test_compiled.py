"""What can be seen of compiled modules is recorded, and what cannot is listed with the reason."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.record import record
from glassengine.recording.reader import Recording

X = torch.linspace(-1, 1, 8).view(2, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        y: torch.Tensor = self.b(self.a(x).relu())
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def _in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def _forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="eager")
    return module


def _returned(module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module, backend="eager")
    return compiled  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [_in_place, _forward, _returned])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_model_that_is_compiled(make: Any, is_warm: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Model()
    expected = plain(X)
    model = make(plain)
    if is_warm:
        model(X)
    with record(model, tmp_path / "r"), caplog.at_level(logging.WARNING):
        assert torch.equal(model(X), expected)
        model(X + 1)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1] and opened.sites(1) == [".:in[0]", "."]
    assert torch.equal(opened.tensor(".", 0), expected) and torch.equal(opened.tensor(".:in[0]", 1), X + 1)
    inside = ["first", "first.a", "first.b", "second", "second.a", "second.b"]
    assert opened.metadata["not_called"] == inside
    assert opened.metadata["not_seen"] == dict.fromkeys(inside, "runs inside of compiled code: that of .")
    assert len(caplog.records) == 1 and "not seen: 6 modules" in caplog.text


@pytest.mark.parametrize("make", [_in_place, _forward, _returned])
def test_a_layer_that_is_compiled(make: Any, tmp_path: Path) -> None:
    model = Model()
    expected = model.first(X)
    model.first = make(model.first)
    with record(model, tmp_path / "r"):
        model(X)
    opened = Recording.open(tmp_path / "r")
    assert [site for site in opened.sites() if site.startswith("first")] == ["first:in[0]", "first"]
    assert "second.a" in opened.sites() and torch.equal(opened.tensor("first"), expected)
    assert set(opened.metadata["not_seen"]) == {"first.a", "first.b"} == set(opened.metadata["not_called"])


def test_an_error_in_compiled_code_stops_the_step_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = _in_place(Model())
    before = model.__dict__["_compiled_call_impl"]
    with record(model, tmp_path / "r"), torch.no_grad():
        model(X)
        with pytest.raises(ValueError, match="three"):
            model(torch.zeros(3, 4))
        model(X)
    assert model.__dict__["_compiled_call_impl"] is before
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and opened.stopped == {1: "ValueError: three"} and "." in opened.sites(2)


def test_a_model_that_is_compiled_again_meanwhile_keeps_its_new_call(tmp_path: Path) -> None:
    model = _in_place(Model())
    with record(model, tmp_path / "r"):
        model(X)
        model.compile(backend="eager")
        again = model.__dict__["_compiled_call_impl"]
    assert model.__dict__["_compiled_call_impl"] is again
    not_seen = Recording.open(tmp_path / "r").metadata["not_seen"]
    assert not_seen["."] == "was compiled while it was recorded, and not seen from then on"


def test_two_recordings_that_end_in_any_order(tmp_path: Path) -> None:
    model = _in_place(Model())
    before = model.__dict__["_compiled_call_impl"]
    first, second = record(model, tmp_path / "first"), record(model, tmp_path / "second")
    with contextlib.ExitStack() as ending_last:
        with contextlib.ExitStack() as ending_first, torch.no_grad():
            ending_first.enter_context(first)
            ending_last.enter_context(second)
            model(X)
        model(X)
    assert model.__dict__["_compiled_call_impl"] is before
    assert Recording.open(tmp_path / "first").steps == [0] and Recording.open(tmp_path / "second").steps == [0, 1]


def test_scripted_parts_are_listed(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(4, 2))
    with record(model, tmp_path / "r"):
        model(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.metadata["not_seen"] == dict.fromkeys(["0", "0.0", "0.1"], "runs inside of scripted code: that of 0")


def test_a_model_that_only_compiled_code_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    compiled = torch.compile(lambda x: model(x), backend="eager")
    with record(model, tmp_path / "r"), caplog.at_level(logging.WARNING):
        compiled(X)
    assert "or only by compiled code" in caplog.text
    assert Recording.open(tmp_path / "r").incomplete_because == "the model was not called"
