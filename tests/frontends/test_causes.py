"""Why did it compile? Scripted causes, each told with the right reason and the right difference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import glassengine as glass
from glassengine.backends.eager import EagerBackend
from glassengine.frontends.causes import read_guard
from glassengine.results.backends import Compilation
from tests.frontends.test_torch_compile import fresh as fresh

GAIN = 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.drop = torch.nn.Dropout(0.5)
        self.flag = True
        self.mode = "plain"

    def forward(self, x: torch.Tensor, times: int = 2, extra: Any = None, parts: Any = ()) -> torch.Tensor:
        x = self.linear(x) * times
        if self.flag:
            x = x + 1
        if self.mode == "plain":
            x = x * 5
        if extra is not None:
            x = x - extra
        for part in parts:
            x = x + part
        return self.drop(x) * GAIN


X = torch.ones(4, 3)


def compiled(*calls: Callable[[Any], Any]) -> list[Compilation]:
    """Make each call with one compiled model, and return what was compiled for forward and inference graphs."""
    before = len(glass.metrics.compilations())
    model = torch.compile(Model(), backend="glass", options={"backend": "eager"})
    for call in calls:
        call(model)
    return [noted for noted in glass.metrics.compilations()[before:] if noted.kind != "backward"]


def without_grad(model: Any) -> None:
    with torch.no_grad():
        model(X)


def with_autocast(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(X)


def changed(name: str, value: Any) -> Callable[[Any], None]:
    def call(model: Any) -> None:
        module, _, attribute = f"_orig_mod.{name}".rpartition(".")
        target = model.get_submodule(module.partition(".")[0])
        for part in module.split(".")[1:]:
            target = getattr(target, part)
        setattr(target, attribute, value)
        model(X)

    return call


def plain(model: Any) -> None:
    model(X)


@dataclass(frozen=True)
class Case:
    """What is called first and then, and what must be said: kind and text of the cause, and a change."""

    then: Callable[[Any], Any]
    kind: str
    text: str
    change: str
    first: Callable[[Any], Any] = plain


CASES = {
    "batch": Case(
        lambda model: model(torch.ones(5, 3)),
        "size",
        "the size of x in dimension 0 was 4 and is 5",
        "shape of x: (4, 3) -> (s",
    ),
    "batch of one": Case(
        lambda model: model(torch.ones(1, 3)),
        "size",
        "the size of x in dimension 0 was 4 and is 1",
        "shape of x: (4, 3) -> (1, 3)",
    ),
    "rank": Case(
        lambda model: model(torch.ones(2, 4, 3)),
        "rank",
        "the number of dimensions of x was 2 and is 3",
        "shape of x: (4, 3) -> (s",
    ),
    "dtype": Case(
        lambda model: model.double()(X.double()),
        "dtype",
        "the dtype of x was float32 and is float64",
        "dtype of x: float32 -> float64",
    ),
    "stride": Case(
        lambda model: model(torch.ones(3, 4).t()),
        "stride",
        "the stride of x in dimension 0 was 3 and is 1",
        "stride of x: (3, 1) -> (1, ",
    ),
    "requires_grad": Case(
        lambda model: model(X.clone().requires_grad_()),
        "requires_grad",
        "requires_grad of x was False and is True",
        "requires_grad of x: False -> True",
    ),
    "frozen weight": Case(
        lambda model: (model.linear.weight.requires_grad_(False), model(X)),
        "requires_grad",
        "requires_grad of linear.weight was True and is False",
        "requires_grad of linear.weight: True -> False",
    ),
    "constant": Case(
        lambda model: model(X, 7),
        "argument",
        "times is no longer 2",
        "input times is new: int ",
    ),
    "flag": Case(changed("flag", False), "attribute", "flag was True and is False", "is gone: aten.add.Tensor(#2, 1)"),
    "text": Case(changed("mode", "other"), "attribute", "mode is no longer 'plain'", "is gone: aten.mul.Tensor(#3, 5)"),
    "evaluation": Case(
        lambda model: (model.eval(), model(X)),
        "training",
        "drop.training was True and is False",
        "aten.native_dropout.default(#4, 0.5, True) -> aten.clone.default(#4)",
    ),
    "grad mode": Case(without_grad, "grad mode", "grad mode changed", "forward graph -> inference graph"),
    "autocast": Case(
        with_autocast, "autocast", "autocast(cpu)_enabled changed", "is new: aten._to_copy.default(<linear"
    ),
    "optional tensor": Case(
        lambda model: model(X, extra=X), "argument", "extra is no longer None", "is new: aten.sub.Tensor(#4, <x>)"
    ),
    "length": Case(
        lambda model: model(X, parts=[X, X]),
        "length",
        "the length of parts is no longer 1",
        "is new: aten.add.Tensor(#5, <x>)",
        first=lambda model: model(X, parts=[X]),
    ),
    "aliasing": Case(
        lambda model: model(X, parts=[X.clone()]),
        "aliasing",
        "this no longer holds: x is parts[0]",
        "input parts[0] is new: float32[4, 3]",
        first=lambda model: model(X, parts=[X]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_and_difference(name: str) -> None:
    case = CASES[name]
    first, second = compiled(case.first, case.then)
    assert (first.cause.kind, first.cause.text) == ("first call", "it is called for the first time")
    assert (second.cause.kind, second.cause.text) == (case.kind, case.text)
    assert second.nearest == first.name
    assert any(case.change in str(change) for change in second.changes), list(map(str, second.changes))
    assert f"because {case.text}; unlike {first.name}: " in str(second)


def test_a_global_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: Any) -> None:
        monkeypatch.setitem(Model.forward.__globals__, "GAIN", 4)
        model(X)

    _, second = compiled(plain, other)
    assert (second.cause.kind, second.cause.text) == ("global", "GAIN is no longer 3")
    (change,) = second.changes
    assert (change.what, change.before, change.after) == (
        "constant",
        "aten.mul.Tensor(#6, 3)",
        "aten.mul.Tensor(#6, 4)",
    )
    assert "return self.drop(x) * GAIN" in change.where


def test_the_same_graph_for_another_reason() -> None:
    def other(model: Any) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            model(X)
        finally:
            torch.set_default_dtype(torch.float32)

    first, second = compiled(plain, other)
    assert (second.cause.kind, second.changes) == ("default dtype", ())
    assert second.graph_hash == first.graph_hash
    assert f"same graph as {first.name}" in str(second)


def test_nothing_is_compiled_twice_for_one_cause() -> None:
    assert len(compiled(plain, plain, plain)) == 1


def test_a_backward_graph_names_its_forward_graph() -> None:
    before = len(glass.metrics.compilations())
    torch.compile(Model(), backend="glass", options={"backend": "eager"})(X).sum().backward()
    forward, backward = glass.metrics.compilations()[before:]
    assert (backward.cause.kind, backward.cause.text) == ("backward", f"it is the backward graph of {forward.name}")


def test_frames_are_the_users() -> None:
    (first,) = compiled(plain)
    assert first.frames[0].startswith(f"{__file__}:") and first.frames[0].endswith(" in plain: model(X)")
    assert not any("/torch/" in frame or "glassengine/executable" in frame for frame in first.frames)


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print("between")  # noqa: T201
    return x * 2


def test_graph_breaks_are_counted_with_reasons_and_named_as_causes() -> None:
    glass.metrics.reset()
    before = len(glass.metrics.compilations())
    torch.compile(broken, backend="glass", options={"backend": "eager"})(X)
    first, rest = glass.metrics.compilations()[before:]
    line = broken.__code__.co_firstlineno + 2
    assert rest.cause.kind == "graph break"
    assert rest.cause.text.startswith(f"broken goes on after a graph break at {__file__}:{line}: ")
    assert (first.name.partition("/")[0], rest.name.partition("/")[0]) == ("broken", f"broken:{line}")
    counters = glass.metrics.current().counters
    assert counters["GraphBreak"] == 1
    (reason,) = [name for name in counters if name.startswith("GraphBreak::")]
    assert reason.removeprefix("GraphBreak::") in rest.cause.text


def branching(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def test_branches_on_values_and_code_that_is_given_up_are_counted() -> None:
    glass.metrics.reset()
    torch.compile(branching, backend="glass", options={"backend": "eager"})(X)
    assert glass.metrics.current().counters["GraphBreak::Data-dependent branching"] == 1
    model = torch.compile(Model(), backend="glass", options={"backend": "eager"}, dynamic=False)
    for size in range(2, 4 + torch._dynamo.config.recompile_limit):
        model(torch.ones(size, 3))
    assert glass.metrics.current().counters["GraphBreak::Dynamo recompile limit exceeded"] == 1


def test_metrics_of_compilations() -> None:
    glass.metrics.reset()
    before = len(glass.metrics.compilations())
    compiled(plain, lambda model: model(X.clone()), lambda model: model(X, 7))
    noted = glass.metrics.compilations()[before:]
    report = glass.metrics.current()
    assert report.counters["UncachedCompile"] == report.metric("CompileTime").total_samples == len(noted)
    assert [value for _, value in report.metric("TensorsGraphSize").samples] == [one.num_ops for one in noted]
    assert report.counters["CachedCompile"] == 1


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "0/1: 2 <= x.size()[0]  # return F.linear(x)  # f.py:3 in f",
            "size",
            "this no longer holds: 2 <= x.size()[0]",
        ),
        ("0/0: ___check_type_id(k, 94213), type=<class 'int'>  # x * k", "type", "the type of k is no longer int"),
        ("0/0: ___check_obj_id(s._modules['act'], 7)", "object", "s.act is another object now"),
        (
            "0/0: tensor 'x' device index mismatch. expected 0, actual 1",
            "device",
            "the device of x was 0 and is 1",
        ),
        ("0/0: len(ls._modules) != 2", "length", "the length of ls._modules is no longer 2"),
        ("0/0: not ___dict_contains('b', d)", "argument", "d has 'b' now"),
        ("0/0: ___dict_contains('b', d)", "argument", "d has no 'b' any more"),
        ('0/0: Duplicate tensors found: ["x", "y"]', "aliasing", "two arguments are now the same tensor"),
        (
            "0/0: expected type of 'm' to be a tensor type, 'Tensor' but found <class 'NoneType'>",
            "type",
            "the type of m is now NoneType",
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), "
            "actual DispatchKeySet(CPU, Conjugate, AutogradCPU)",
            "global state",
            "the way that torch handles x changed: Conjugate",
        ),
        ("0/0: something torch has never said", "guard", "this no longer holds: something torch has never said"),
        ("nor this", "guard", "this no longer holds: nor this"),
    ],
)
def test_guards_are_read(text: str, kind: str, said: str) -> None:
    number, cause = read_guard(text)
    assert number == (text[:3] if text[:1] == "0" else "")
    assert (cause.kind, cause.text) == (kind, said)


def chosen(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["b"] * 2 if "b" in tensors else tensors["a"] * 3


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * y


def called(function: Callable[..., Any], *calls: tuple[Any, ...]) -> Compilation:
    """Make each call of a function, and return its last compilation."""
    compiled_function = torch.compile(function, backend="glass", options={"backend": "eager"})
    for arguments in calls:
        compiled_function(*arguments)
    return glass.metrics.compilations()[-1]


def test_causes_as_torch_words_them_now() -> None:
    same = X.clone()
    for function, calls, kind, said in (
        (plus_one, [(X,), (X.to("meta"),)], "device", "the device of x was cpu and is meta"),
        (chosen, [({"a": X},), ({"a": X, "b": X},)], "argument", "tensors has 'b' now"),
        (added, [(X.clone(), X), (same, same)], "aliasing", "two arguments are now the same tensor"),
    ):
        cause = called(function, *calls).cause
        assert (cause.kind, cause.text) == (kind, said)
    with torch.no_grad():
        called(plus_one, (X,))
    with torch.inference_mode():
        cause = called(plus_one, (X,)).cause
    assert (cause.kind, cause.text) == ("grad mode", "inference mode of x changed")


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_a_compilation_that_was_cut_short_is_no_earlier_one(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(EagerBackend, "compile_graph", fail)
        with pytest.raises((KeyboardInterrupt, BackendCompilerFailed)):
            called(plus_one, (X,))
    noted = called(plus_one, (X,))
    assert noted.cause.kind == "first call"


def test_lines_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "glassengine.compilations"):
        (first,) = compiled(plain)
    assert [record.getMessage() for record in caplog.records if record.name == "glassengine.compilations"] == [
        str(first)
    ]
