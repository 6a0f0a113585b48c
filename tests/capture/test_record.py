"""`glass.record`: what is written is what the model computed, whatever the model does and however it ends."""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from glassengine import taps
from glassengine.capture.record import record
from glassengine.errors import GlassError, UnknownNameError, UsageError
from glassengine.recording.reader import Recording
from glassengine.recording.ring import producer as block
from glassengine.recording.ring import producer as passage
from glassengine.testing.models import llama
from tests import children

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inter = self.fc(x)
        glass.tap("inter", inter)
        return inter.relu_()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        if fail:
            raise ValueError("planted")
        return {"logits": self.head(x)}


class Calls(nn.Module):
    """Calls `run` on itself; made of what a test needs."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def values(path: Path, step: int = 0) -> dict[str, torch.Tensor]:
    opened = Recording.open(path)
    return {entry.site: opened.tensor(entry) for entry in opened.entries if entry.step == step}


def is_clean(model: nn.Module) -> bool:
    return not taps._installed and not any(
        m._forward_hooks
        or m._forward_pre_hooks
        or {"forward", "_compiled_call_impl"} & vars(m).keys()
        or type(m._modules) is not dict
        for m in model.modules()
    )


def test_inputs_and_results_of_every_module(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        result = model(x=X)
    fc = [layer.fc for layer in model.layers]
    first = fc[0](X)
    second = fc[1](first.relu())
    found = values(tmp_path / "r")
    expected = {
        ".:in.x": X, "layers.0:in[0]": X, "layers.0.fc:in[0]": X, "layers.0.fc": first, "layers.0.inter": first,
        "layers.0": first.relu(), "layers.1:in[0]": first.relu(), "layers.1.fc:in[0]": first.relu(),
        "layers.1.fc": second, "layers.1.inter": second, "layers.1": second.relu(), "head:in[0]": second.relu(),
        "head": result["logits"], ".:out.logits": result["logits"],
    }  # fmt: skip
    assert list(found) == list(expected)
    assert all(torch.equal(found[site], tensor) for site, tensor in expected.items())
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.skipped == () and opened.metadata["not_called"] == []
    assert opened.metadata["modules"]["layers.0"] == "Block" and opened.metadata["environment"]["versions"]["torch"]
    assert is_clean(model)


def test_generation_is_one_step_per_forward(tmp_path: Path) -> None:
    model, ids = llama(), torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    with glass.record(model, tmp_path / "r"):
        made = model.generate(ids, **options)
    assert torch.equal(made, expected)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1, 2]
    assert opened.metadata["token_ids"] == [made[0, :-1].tolist(), made[1, 1:-1].tolist()]
    with torch.no_grad():
        whole = model(made[:1, :-1])
    for step in opened.steps:
        logits = opened.tensor(".:out.logits", step)[0, -1]
        torch.testing.assert_close(logits, whole.logits[0, 2 + step])
        for layer in range(2):
            for kind in ("key", "value"):
                entry = opened.entry(f"model.layers.{layer}.self_attn:kv.{kind}", step)
                assert entry.shape == (2, 2, 3 + step, 16) and entry.axes == {"batch": 0, "cache": 2}
                cached = getattr(whole.past_key_values.layers[layer], f"{kind}s")
                torch.testing.assert_close(opened.tensor(entry)[:1], cached[:, :, : 3 + step])


def test_caches_of_two_stacks_and_of_recurrent_layers(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(
        d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8, vocab_size=50, decoder_start_token_id=0
    )
    t5 = transformers.T5ForConditionalGeneration(config).eval()
    with record(t5, tmp_path / "t5", sites=["*:kv.*", "encoder", "encoder:out*"]):
        t5.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3)
    opened = Recording.open(tmp_path / "t5")
    # The encoder runs once, ahead of the first step.
    assert [opened.steps, "encoder:out.last_hidden_state" in opened.sites(0)] == [[0, 1, 2], True]
    assert not any(site.startswith("encoder") for site in opened.sites(1))
    assert opened.entry("decoder.block.1.layer.0.SelfAttention:kv.key", 2).shape == (1, 2, 3, 8)
    assert opened.entry("decoder.block.1.layer.1.EncDecAttention:kv.cross_value", 2).shape == (1, 2, 3, 8)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4)
    ).eval()
    with record(mamba, tmp_path / "mamba"), torch.no_grad():
        states = mamba(torch.tensor([[5, 6, 7]]), use_cache=True).cache_params.layers[1].conv_states
    found = values(tmp_path / "mamba")
    assert torch.equal(found["backbone.layers.1.mixer:kv.conv_states.0"], states[0])


def test_what_has_no_values_or_no_hooks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with _quietly():
        scripted = torch.jit.script(model[1])
        with pytest.raises(UsageError, match="a scripted module runs no hooks"):
            record(scripted, tmp_path / "r")
        with record(model, tmp_path / "r"):
            torch.testing.assert_close(torch.vmap(model)(X), model(X))
            torch.jit.trace(model, (X,), check_trace=False)
        model[1] = scripted
        with record(model, tmp_path / "mixed"):
            model(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and not opened.left_out and torch.equal(opened.tensor(".:in[0]", 0), X)
    mixed = Recording.open(tmp_path / "mixed")
    assert mixed.sites() == [".:in[0]", "0:in[0]", "0", "."] and mixed.metadata["not_called"] == ["1"]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_eager_and_engine_recordings_have_the_same_names(tmp_path: Path) -> None:
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    engine = glass.build(model, tmp_path / "engine", backend="eager", add_output=["*"], max_seq_len=16)
    engine.generate(input_ids=ids, max_new_tokens=2, record=tmp_path / "candidate")
    recorded = Recording.open(tmp_path / "candidate")
    with glass.record(model, tmp_path / "baseline"), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(torch.tensor([recorded.metadata["token_ids"][0][-1:]]), past_key_values=cache)
    compared = glass.compare(tmp_path / "baseline", tmp_path / "candidate")
    paired = {pair.site for pair in compared.pairs}
    assert {"model.layers.1.mlp", "model.layers.0.self_attn:out[0]", "lm_head", "model.layers.1:in[0]"} <= paired
    # The engine's cache is as long as it can get; which part of it is in use is for the comparison to know.
    assert {pair.verdict for pair in compared.pairs if ":kv" not in pair.site} <= {"identical", "rounding"}
    opened = Recording.open(tmp_path / "baseline")
    assert opened.metadata["token_ids"] == recorded.metadata["token_ids"]


@dataclass
class Result:
    hidden: torch.Tensor
    pair: tuple[torch.Tensor, list[torch.Tensor]]
    name: str = "x"


def test_nested_containers_and_dataclasses(tmp_path: Path) -> None:
    def run(self: Any, batch: dict[str, Any], *, flag: bool, more: Any) -> Result:
        return Result(batch["a/b"] + 1, (more[1][0], [batch["a/b"]]))

    model = Calls(run)
    with record(model, tmp_path / "r"):
        model({"a/b": X, "n": 3}, flag=True, more=(None, [X * 2, "text"]))
    found = values(tmp_path / "r")
    assert list(found) == [".:in[0].a/b", ".:in.more[1][0]", ".:out.hidden", ".:out.pair[0]", ".:out.pair[1][0]"]
    assert torch.equal(found[".:out.hidden"], X + 1)


class Padded:
    """As in many detectors: a tensor with what belongs to it."""

    def __init__(self, tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.sizes = [(1, 2)]


def test_tensors_in_objects_of_classes_of_their_own(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor) -> dict[str, Any]:
        return {"padded": self.inner(Padded(x))}

    model = Calls(run, inner=Calls(lambda self, padded: Padded(padded.tensors + 1)))
    with record(model, tmp_path / "r"):
        model(X)
    found = values(tmp_path / "r")
    assert list(found) == [".:in[0]", "inner:in[0].tensors", "inner:out.tensors", ".:out.padded.tensors"]
    assert torch.equal(found["inner:out.tensors"], X + 1)


def test_shared_modules_have_the_name_that_was_called(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.seq(self.b(self.a(x))))

    model = Calls(run, a=shared, b=shared, seq=nn.Sequential(shared, nn.ReLU(), shared))
    for path in ("r", "again"):
        with record(model, tmp_path / path):
            model(X)
    found = values(tmp_path / "again")
    outputs = [site for site in found if ":" not in site]
    assert outputs == ["a", "b", "seq.0", "seq.1", "seq.2", "seq", "b@1", "."]
    assert torch.equal(found["b"], shared(shared(X)))
    assert is_clean(model) and list(model._modules) == ["a", "b", "seq"]


def test_repeated_calls_are_numbered_in_each_step(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.fc(self.fc(self.fc(x))), fc=nn.Linear(4, 4))
    with record(model, tmp_path / "r"):
        model(X)
        model(X + 1)
    for step, x in enumerate((X, X + 1)):
        found = values(tmp_path / "r", step)
        assert [site for site in found if ":" not in site] == ["fc", "fc@1", "fc@2", "."]
        assert torch.equal(found["fc@1"], model.fc(model.fc(x)))


def test_an_exception_passes_and_what_was_computed_stays(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        model(X)
        with pytest.raises(ValueError, match=r"^planted$"):
            model(X, fail=True)
        model(X * 2)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and opened.stopped == {1: "ValueError: planted"}
    assert not opened.complete and opened.incomplete_because == "step 1 was stopped by ValueError: planted"
    assert "layers.1" in opened.sites(1) and "head" not in opened.sites(1)
    assert torch.equal(opened.tensor(".:in[0]", 2), X * 2)


def test_an_exception_that_leaves_the_block(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(ValueError, match="planted") as caught, record(model, tmp_path / "r"):
        model(X)
        model(X, fail=True)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1] and opened.incomplete_because == "stopped by ValueError: planted"
    assert is_clean(model)


class Canceled(BaseException):
    """As asyncio and some frameworks raise it: not an Exception."""


@pytest.mark.parametrize("error", [ValueError, Canceled])
def test_an_exception_that_the_model_catches(tmp_path: Path, error: type[BaseException]) -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            self.outer(x)
        except error:
            x = self.fallback(x)
        return self.last(x)

    model = Calls(run, outer=nn.Sequential(Raising()), fallback=nn.Linear(4, 4), last=nn.ReLU())
    with record(model, tmp_path / "r"):
        model(X)
        model(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1]
    assert opened.sites(1) == [
        ".:in[0]", "outer:in[0]", "outer.0:in[0]", "fallback:in[0]", "fallback", "last:in[0]", "last", ".",
    ]  # fmt: skip


def test_containers_that_cannot_be_looked_into(tmp_path: Path) -> None:
    class Shy(dict[str, torch.Tensor]):
        def items(self) -> Any:
            raise RuntimeError("planted")

    model = Calls(lambda self, batch: Shy(y=batch["x"] + 1))
    with record(model, tmp_path / "r"):
        assert torch.equal(model(Shy(x=X))["y"], X + 1)
    opened = Recording.open(tmp_path / "r")
    assert [(item.site, item.reason) for item in opened.left_out] == [
        (".:in", "RuntimeError: planted"), (".:out", "RuntimeError: planted"),
    ]  # fmt: skip


def test_a_forward_inside_of_an_exception_handler(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        try:
            raise KeyError
        except KeyError:
            model(X)
    assert Recording.open(tmp_path / "r").complete


def test_interruption(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor, *, stop: bool) -> torch.Tensor:
        x = self.fc(x)
        if stop:
            raise KeyboardInterrupt
        return x

    model = Calls(run, fc=nn.Linear(4, 4))
    with record(model, tmp_path / "r"):
        with pytest.raises(KeyboardInterrupt):
            model(X, stop=True)
        model(X, stop=False)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1] and opened.stopped == {0: "KeyboardInterrupt"}
    assert opened.sites(1) == [".:in[0]", "fc:in[0]", "fc", "."]
    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "left"):
        model(X, stop=True)
    opened = Recording.open(tmp_path / "left")
    assert opened.stopped == {0: "KeyboardInterrupt"} and "fc" in opened.sites(0)
    assert is_clean(model)


@pytest.mark.parametrize("last", [".", "fc", ".:in[0]"])
def test_an_interruption_within_a_hook(tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from glassengine.capture.intake import Intake

    take, planted = Intake.take, [True]

    def interrupted(self: Any, site: str, *args: Any, **kwargs: Any) -> None:
        if site == last and planted and planted.pop():
            raise KeyboardInterrupt
        take(self, site, *args, **kwargs)

    monkeypatch.setattr(Intake, "take", interrupted)
    model = Calls(lambda self, x: self.fc(x), fc=nn.Linear(4, 4))
    with record(model, tmp_path / "r"):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model(X)
    opened = Recording.open(tmp_path / "r")
    # The call of the model hears of it only where it happens within.
    assert opened.stopped == {0: "KeyboardInterrupt" if last == "fc" else "an interruption"} and opened.steps == [0, 1]
    assert opened.sites(1) == [".:in[0]", "fc:in[0]", "fc", "."]
    planted.append(True)
    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "left"):
        model(X)
    assert Recording.open(tmp_path / "left").stopped == {0: "KeyboardInterrupt"}
    assert is_clean(model)


class Late(Exception):
    pass


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("place", ["put", "take", "container"])
def test_a_signal_handler_that_raises_within_a_hook(
    tmp_path: Path, place: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise Late("too long")

    armed = False

    class SlowBlock(block.OpenBlock):
        def put(self, *given: Any) -> None:
            super().put(*given)
            if armed and place == "put":
                signal.raise_signal(signal.SIGUSR1)

    class SlowProducer(passage.Producer):
        def take_repeat(self, *given: Any) -> bool:
            done = super().take_repeat(*given)
            if armed and place == "take" and done:
                signal.raise_signal(signal.SIGUSR1)
            return done

    class Items(dict[str, Any]):
        def items(self) -> Any:
            if armed and place == "container":
                signal.raise_signal(signal.SIGUSR1)
            return super().items()

    monkeypatch.setattr("glassengine.recording.ring.producer.OpenBlock", SlowBlock)
    monkeypatch.setattr("glassengine.recording.background.Producer", SlowProducer)
    model = Calls(lambda self, x: Items(y=self.fc(x)), fc=nn.Linear(4, 4))
    before = signal.signal(signal.SIGUSR1, late)
    try:
        with record(model, tmp_path / "r", values=keep):
            model(X)
            model(X)
            armed = True
            with pytest.raises(Late):
                model(torch.ones(3, 4) if place == "put" else X)
            armed = False
            out = model(X)
    finally:
        signal.signal(signal.SIGUSR1, before)
    opened = Recording.open(tmp_path / "r")
    assert not opened.complete and opened.steps == [0, 1, 2, 3] and list(opened.stopped) == [2]
    if keep:
        assert torch.equal(opened.tensor(".:out.y", 3), out["y"])
    else:
        assert {item.site for item in opened.left_out if item.step == 3} == {".:in[0]", "fc:in[0]", "fc", ".:out.y"}


@pytest.mark.parametrize("place", ["glassengine.recording.background.Ring.warm", "threading.Thread.start"])
def test_an_interruption_before_it_begins(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model = Model()
    with monkeypatch.context() as patch:
        patch.setattr(place, interrupted)
        with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "r"):
            pass
    assert is_clean(model)
    with record(model, tmp_path / "r", overwrite=True):
        model(X)
    assert Recording.open(tmp_path / "r").complete


def test_a_model_that_calls_itself(tmp_path: Path) -> None:
    model = Calls(lambda self, x, n: self(self.fc(x), n - 1) if n else x, fc=nn.Linear(4, 4))
    with record(model, tmp_path / "r"):
        model(X, 2)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0] and [s for s in opened.sites() if ":" not in s] == ["fc", "fc@1", ".@2", ".@1", "."]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models_run_as_they_would(tmp_path: Path, fullgraph: bool) -> None:
    torch._dynamo.reset()
    plain = Model()
    expected = plain(X)["logits"]
    compiled = torch.compile(copy.deepcopy(plain), backend="eager", fullgraph=fullgraph)
    if not fullgraph:
        compiled(X)  # compiled before it is recorded, and while it is
    torch._dynamo.utils.counters.clear()
    with record(compiled, tmp_path / "r"):
        assert torch.equal(compiled(X)["logits"], expected)
        assert torch.equal(compiled(X + 1)["logits"], plain(X + 1)["logits"])
    assert not torch._dynamo.utils.counters["graph_break"]
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1]
    assert torch.equal(opened.tensor(".:out.logits", 0), expected)
    assert opened.sites(0) == [".:in[0]", ".:out.logits"]
    assert "layers.0.fc" in opened.metadata["not_called"]
    torch._dynamo.reset()


def test_hooks_within_compiled_code_that_breaks(tmp_path: Path) -> None:
    torch._dynamo.reset()
    fc = nn.Linear(4, 4)
    fc.register_forward_pre_hook(torch._dynamo.disable(lambda module, args: (args[0] * 2,)))
    model = Calls(lambda self, x: self.fc(x).relu(), fc=fc)
    compiled = torch.compile(model, backend="eager")
    expected = model(X)
    with record(compiled, tmp_path / "r"), torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(X), expected)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1, 2]
    assert all(opened.sites(step) == [".:in[0]", "."] for step in opened.steps)
    torch._dynamo.reset()


def test_a_compiled_layer_within_a_model(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Model()
    expected = model(X)["logits"]
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.head.compile(backend="eager")
    with record(model, tmp_path / "r"), torch.no_grad():
        assert torch.equal(model(X)["logits"], expected)
    sites = Recording.open(tmp_path / "r").sites()
    assert "layers.0" in sites and "layers.0@1" not in sites and not any("_orig_mod" in site for site in sites)
    assert torch.equal(values(tmp_path / "r")[".:out.logits"], expected)
    torch._dynamo.reset()


def test_hooks_that_are_there_already(tmp_path: Path) -> None:
    model = Model()
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.head.register_forward_hook(lambda module, args, result: result + 1)
    with record(model, tmp_path / "r"):
        result = model(X)
    found = values(tmp_path / "r")
    assert torch.equal(found["head:in[0]"], found["layers.1"] * 2)
    assert torch.equal(found["head"], result["logits"])
    assert len(model.head._forward_hooks) == 1


def test_hooks_that_come_and_go_while_it_is_recorded(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        handle = model.head.register_forward_hook(lambda module, args, result: result + 1)
        model(X)
        handle.remove()
        model(X)
    first, second = values(tmp_path / "r"), values(tmp_path / "r", 1)
    assert torch.equal(first["head"], first[".:out.logits"]) and torch.equal(second["head"], second[".:out.logits"])
    assert torch.allclose(first["head"], second["head"] + 1)


def test_a_model_is_traced_and_compiled_while_it_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = model(X)
    with record(model, tmp_path / "r"), torch.no_grad():
        traced = [
            torch.jit.trace(model, X),
            torch.fx.symbolic_trace(model),
            torch.export.export(model, (X,)).module(),
            torch.compile(model, backend="eager", fullgraph=True),
        ]
        model[0].compile(backend="eager")
        assert torch.equal(model(X), expected)
        for other in traced:
            assert torch.equal(other(X), expected)
    assert model[0]._compiled_call_impl is not None and "_compiled_call_impl" not in vars(model)
    opened = Recording.open(tmp_path / "r")
    results = [opened.tensor(entry) for entry in opened.entries if entry.site == "."]
    assert results and all(torch.equal(result, expected) for result in results)
    torch._dynamo.reset()


def test_modules_of_which_copies_run_are_left_alone(tmp_path: Path) -> None:
    parallel = nn.DataParallel(nn.Sequential(nn.Linear(4, 4)))
    parallel.device_ids = [0, 1]  # as on a machine that has them
    parallel.forward = lambda x: copy.copy(parallel.module)(x)
    with record(parallel, tmp_path / "r"):
        assert not any("_compiled_call_impl" in vars(module) for module in parallel.module.modules())
        result = parallel(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.sites() == [".:in[0]", "."] and torch.equal(values(tmp_path / "r")["."], result)
    assert "copies on several devices" in str(opened.metadata)


def test_a_model_is_saved_and_copied_while_it_is_recorded(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with record(model, tmp_path / "r", gradients=True):
        expected = model(X)
        torch.save(model, tmp_path / "model.pt")
        copied = copy.deepcopy(model)
        assert torch.equal(copied(X), expected)
    with record(model, tmp_path / "other"):
        graph = copy.deepcopy(torch.fx.symbolic_trace(model))
        assert torch.equal(copy.copy(model)(X), expected) and torch.equal(graph(X), expected)
    assert Recording.open(tmp_path / "r").steps == [0]
    loading = "import sys, torch; torch.load(sys.argv[1], weights_only=False); assert 'glassengine' not in sys.modules"
    children.run([sys.executable, "-c", loading, tmp_path / "model.pt"], check=True)
    for other in (copied, torch.load(tmp_path / "model.pt", weights_only=False)):
        assert other[0] is other[2] and type(other._modules) is dict
        compiled = torch.compile(other, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), expected)


def test_values_are_those_of_the_moment(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.add_(1)
        z = self.b(y)
        y.data.mul_(3)  # behind the version counter's back
        self.a(y)
        return z.zero_()

    model = Calls(run, a=nn.Identity(), b=nn.Linear(4, 4))
    x = X.clone()
    with record(model, tmp_path / "r"), torch.no_grad():
        model(x)
    found = values(tmp_path / "r")
    assert torch.equal(found["a"], X) and torch.equal(found["b:in[0]"], X + 1)
    assert torch.equal(found["a@1:in[0]"], (X + 1) * 3) and found["b"].abs().sum() > 0


def test_recording_leaves_gradients_alone(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        model(X)["logits"].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(":grad" in site for site in Recording.open(tmp_path / "r").sites())


def test_gradients_of_activations_and_parameters(tmp_path: Path) -> None:
    model, x = Model(), X.clone().requires_grad_()
    with record(model, tmp_path / "r", gradients=True):
        for _ in range(2):
            model.zero_grad()
            out = model(x)["logits"]
            out.square().sum().backward()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1]
    for step in (0, 1):
        found = values(tmp_path / "r", step)
        torch.testing.assert_close(found[".:grad_out.logits"], 2 * out.detach())
        torch.testing.assert_close(found["head:grad_out"], 2 * out.detach())
        torch.testing.assert_close(found["head:grad_in[0]"], 2 * out.detach() @ model.head.weight)
        for name, parameter in model.named_parameters():
            assert torch.equal(found[f"{name}:grad"], parameter.grad), name
    assert torch.equal(values(tmp_path / "r", 0)["layers.0:grad_in[0]"], values(tmp_path / "r", 0)[".:grad_in[0]"])


def test_gradients_leave_nothing_behind(tmp_path: Path) -> None:
    model, leaf = Model(), X.clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with record(model, tmp_path / "r", gradients=True, optimizer=optimizer) as recorder:
        for _ in range(5):
            model(leaf)["logits"].sum().backward()
            optimizer.step()
            assert len(leaf._backward_hooks or ()) == 3  # it is the input of the model, its first layer, and that one's
        assert len(recorder._parameters._num_seen) == 1
    assert not leaf._backward_hooks
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and "num_late" not in opened.metadata
    assert ".:grad_in[0]" in opened.sites(4) and "head.weight:state.momentum_buffer" in opened.sites(4)


def test_gradients_that_come_too_late_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with record(model, tmp_path / "r", gradients=True):
        first = model(X)["logits"].sum()
        model(X)
        first.backward()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.metadata["num_late"] == 11
    assert "11 tensors came too late, after the step they belong to" in caplog.text
    # What is accumulated into parameters belongs to the step that is open.
    assert not any(":grad" in site for site in opened.sites(0)) and "head.weight:grad" in opened.sites(1)


def test_wrappers_are_no_part_of_a_name(tmp_path: Path) -> None:
    model = Model()
    wrapped = nn.DataParallel(model)  # without a GPU it passes its call on
    with record(wrapped, tmp_path / "r", gradients=True):
        wrapped(X)["logits"].sum().backward()
    with record(model, tmp_path / "plain", gradients=True):
        model(X)["logits"].sum().backward()
    found, plain = Recording.open(tmp_path / "r"), Recording.open(tmp_path / "plain")
    assert found.sites() == plain.sites() and found.metadata["modules"] == plain.metadata["modules"]
    assert found.metadata["modules"]["layers.0.fc"] == "Linear" and found.metadata["class"].endswith("DataParallel")


def test_parameters_and_state_after_a_step_of_the_optimizer(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    after = []
    with record(model, tmp_path / "r", optimizer=optimizer, sites=["re:head.*:(param|state|grad)"]):
        for _ in range(3):
            model(X)["logits"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after.append(model.head.weight.detach().clone())
    for step, weight in enumerate(after):
        found = values(tmp_path / "r", step)
        assert torch.equal(found["head.weight:param"], weight)
        assert found["head.weight:state.exp_avg"].shape == weight.shape and found["head.bias:state.step"] == step + 1


class Inherits(torch.optim.Optimizer):
    """As accelerate does it: an optimizer that never became one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class Shares(torch.optim.Optimizer):
    """As ZeRO does it: another one has the state, of some parameters; what it made is exchanged afterwards."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].zero_()


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("kind", [Inherits, Shares])
def test_optimizers_that_call_others(kind: Any, is_told: bool, tmp_path: Path) -> None:
    model = Model()
    optimizer = kind(torch.optim.AdamW(model.parameters(), lr=0.1))
    with record(model, tmp_path / "r", optimizer=optimizer if is_told else True):
        for _ in range(2):
            model(X)["logits"].sum().backward()
            optimizer.step()
    for step, found in enumerate((values(tmp_path / "r", 0), values(tmp_path / "r", 1))):
        first = next(name for name, _ in model.named_parameters())
        assert bool(found[f"{first}:param"].any()) is (kind is Inherits)
        assert found["head.bias:state.step"] == step + 1 and not any("@" in site for site in found)
    if is_told:
        with record(Model(), tmp_path / "o", optimizer=optimizer) as recorder:
            torch.optim.SGD(model.parameters()).step()
            assert not recorder._parameters._num_seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_recorded_once(tmp_path: Path, reentrant: bool) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=reentrant))

    model = Calls(run, a=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), b=nn.Linear(4, 4))
    with record(model, tmp_path / "r", gradients=True):
        for _ in range(2):
            model(X.clone().requires_grad_()).sum().backward()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1]
    assert not any("@" in site for site in opened.sites())
    assert {"a.0", "a.1", "b", "a.0.weight:grad", "b:grad_in[0]"} <= set(opened.sites(1))


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
          torch.bool, torch.uint8, torch.int64]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, keep: bool) -> None:
    x = (torch.arange(6.0).reshape(2, 3) % 4).to(dtype)
    tensors = [x, x.t(), x[:0], x[0, 1], x[:1].expand(5, 3), x[:, ::2]]
    if dtype.is_complex:
        tensors += [x.conj(), x[:1, :1].conj().imag]
    model = Calls(lambda self, *xs: xs)
    with record(model, tmp_path / "r", values=keep), torch.inference_mode():
        model(*tensors)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete
    for i, tensor in enumerate(tensors):
        if keep:
            got = opened.tensor(f".:out[{i}]")
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.to(torch.complex128), tensor.to(torch.complex128))
        else:
            left = next(item for item in opened.left_out if item.site == f".:out[{i}]")
            assert left.shape == tuple(tensor.shape) and left.statistics is not None
            wide = tensor.to(torch.complex128).abs() if dtype.is_complex else tensor.to(torch.float64)
            assert left.statistics.max == (wide.max() if wide.numel() else None)
            assert left.statistics.norm == pytest.approx(float(wide.square().sum().sqrt()), rel=1e-6)


def test_statistics_of_what_is_not_finite(tmp_path: Path) -> None:
    x = torch.tensor([1.0, float("nan"), -3.0, float("inf")])
    model = Calls(lambda self, *xs: None)
    with record(model, tmp_path / "r", values=False):
        model(x, x[1:2], x[:1] * 1e38)
    found = {item.site: item.statistics for item in Recording.open(tmp_path / "r").left_out}
    first, second, third = (found[f".:in[{index}]"] for index in range(3))
    assert first and (first.min, first.max, first.num_nonfinite) == (-3.0, 1.0, 2)
    assert second and (second.min, second.max, second.norm, second.num_nonfinite) == (None, None, 0.0, 1)
    assert third and third.num_nonfinite == 0 and third.norm == pytest.approx(1e38)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_of_other_kinds(tmp_path: Path) -> None:
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    csr = torch.eye(3).to_sparse_csr()
    model = Calls(lambda self, *xs: None)
    with record(model, tmp_path / "r"):
        model(sparse, csr, torch.ones(2, device="meta"), nn.Parameter(X))
    opened = Recording.open(tmp_path / "r")
    found = values(tmp_path / "r")
    assert torch.equal(found[".:in[0].values"], torch.tensor([2.0, 3.0]))
    assert torch.equal(found[".:in[0].indices"], sparse.coalesce().indices())
    assert torch.equal(found[".:in[1].col_indices"], torch.arange(3))
    assert torch.equal(found[".:in[3]"], X)
    (left,) = opened.left_out
    assert (left.site, left.reason) == (".:in[2]", "a meta tensor, which has no values")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("count", [1, 3, 40_000])
def test_tensors_without_memory_are_left_out(tmp_path: Path, count: int, keep: bool) -> None:
    """Reading one ends the process; sharded training frees the storage of tensors that are still referred to."""
    freed = torch.ones(count)
    model = Calls(lambda self, *xs: None)
    with record(model, tmp_path / "r", values=keep):
        model(freed, X)  # what is known of the first step takes a shorter way in the second
        freed.untyped_storage().resize_(0)
        model(freed, torch._efficientzerotensor(count))
    found = {item.site: item.reason for item in Recording.open(tmp_path / "r").left_out if item.step == 1}
    assert found.keys() == {".:in[0]", ".:in[1]"}
    assert all(reason.startswith("a tensor without memory") for reason in found.values())


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_of_torch_func_are_recorded(tmp_path: Path, keep: bool) -> None:
    def run(self: Any, x: torch.Tensor, mapped: bool) -> Any:
        y = self.a(x)
        return torch.vmap(self.b, 1, 1)(y.unsqueeze(1).expand(2, 3, 4)) if mapped else self.b(y)

    model = Calls(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with record(model, tmp_path / "r", values=keep):
        for mapped in (False, False, True, True):
            out = model(X, mapped)
        weights = dict(model.named_parameters())
        loss = torch.func.grad(lambda w, x: torch.func.functional_call(model, w, (x, False)).sum())
        torch.vmap(loss, (None, 0))(weights, X.unsqueeze(1))
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and len(opened.steps) == 5
    if keep:
        assert not opened.left_out
        for step in (2, 3):
            torch.testing.assert_close(opened.tensor("b", step), out.movedim(1, 0))
        torch.testing.assert_close(opened.tensor("b", 4), model.b(model.a(X.unsqueeze(1))))
    else:
        assert all(item.statistics is not None for item in opened.left_out) and len(opened.left_out) == 5 * 6
        norm = next(item.statistics.norm for item in opened.left_out if (item.site, item.step) == ("b", 3))
        assert norm == pytest.approx(float(out.detach().norm()), rel=1e-5)


def test_sequences_of_different_lengths(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with record(model, tmp_path / "r"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        for _ in range(2):
            out = model(x, src_key_padding_mask=padding)
    opened = Recording.open(tmp_path / "r")
    assert opened.tensor("layers.1:out.sizes", 1).tolist() == [[5, 8], [3, 8]]
    assert torch.equal(opened.tensor("layers.1:out.values", 1), torch.cat([out[0], out[1, :3]]).flatten())


def test_lazy_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with record(model, tmp_path / "r"):
        first, second = model(X), model(2 * X)
    opened = Recording.open(tmp_path / "r")
    assert torch.equal(opened.tensor(".", 0), first) and torch.equal(opened.tensor("0:in[0]", 1), 2 * X)
    assert torch.equal(opened.tensor(".", 1), second)


def test_modules_that_come_while_it_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        model(X)
        model.head = nn.Linear(4, 2)
        model(X)
    assert Recording.open(tmp_path / "r").metadata["not_seen"] == {"head": "came into the model while it was recorded"}
    assert "not seen: head came into" in caplog.text and "compiled" not in caplog.text


def test_sparse_gradients(tmp_path: Path) -> None:
    model = Calls(lambda self, ids: self.table(ids), table=nn.Embedding(9, 2, sparse=True))
    with record(model, tmp_path / "r", gradients=True):
        model(torch.tensor([3, 5])).sum().backward()
    found = values(tmp_path / "r")
    assert found["table.weight:grad.indices"].tolist() == [[3, 5]]
    assert torch.equal(found["table.weight:grad.values"], torch.ones(2, 2))


def test_two_models_and_two_recordings_of_one(tmp_path: Path) -> None:
    one, two = Model(), Model()
    with record(one, tmp_path / "one"), record(two, tmp_path / "two"), record(one, tmp_path / "again"):
        one(X)
        two(X * 2)
        one(X * 3)
    first, again = (Recording.open(tmp_path / name) for name in ("one", "again"))
    assert first.complete and again.complete and first.steps == again.steps == [0, 1]
    assert [e.site for e in first.entries] == [e.site for e in again.entries]
    assert "layers.0.inter" in first.sites() and "layers.0.inter" in again.sites()
    assert all(torch.equal(first.tensor(e), again.tensor(f)) for e, f in zip(first.entries, again.entries, strict=True))
    assert torch.equal(values(tmp_path / "two")[".:in[0]"], X * 2)
    with pytest.raises(UsageError, match="--overwrite"), record(two, tmp_path / "two"):
        pass
    assert is_clean(two)


def test_a_recording_in_progress_is_not_replaced(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r"):
        model(X)
        with (
            pytest.raises(UsageError, match="a recording that is being written is not replaced"),
            record(model, tmp_path / "r", overwrite=True),
        ):
            pass
        model(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == [0, 1]
    with record(model, tmp_path / "r", overwrite=True):
        model(X)
    assert Recording.open(tmp_path / "r").steps == [0]


def test_a_model_within_a_model(tmp_path: Path) -> None:
    inner = Model()
    outer = Calls(lambda self, x: self.inner(x)["logits"], inner=inner)
    with record(outer, tmp_path / "outer"), record(inner, tmp_path / "inner"):
        outer(X)
    assert "inner.layers.0.inter" in Recording.open(tmp_path / "outer").sites()
    assert "layers.0.inter" in Recording.open(tmp_path / "inner").sites()


def test_threads_do_not_mix_their_steps(tmp_path: Path) -> None:
    model = Model()

    def work(value: float) -> None:
        for _ in range(10):
            model(torch.full((2, 4), value))

    with record(model, tmp_path / "r"):
        threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.steps == list(range(40))
    seen = []
    for step in opened.steps:
        found = values(tmp_path / "r", step)
        assert len(found) == 14
        expected = model.layers[0].fc(found[".:in[0]"])
        assert torch.equal(found["layers.0.fc"], expected) and torch.equal(found["layers.0.inter"], expected)
        seen.append(float(found[".:in[0]"][0, 0]))
    assert sorted(seen) == sorted([0.0, 1.0, 2.0, 3.0] * 10)


def test_parts_that_are_called_alone_belong_to_the_next_step(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.decoder(x), encoder=nn.Linear(4, 4), decoder=nn.Linear(4, 4))
    with record(model, tmp_path / "r"):
        model(model.encoder(X))
        model(X)
        model.encoder(X)
        model.encoder(X + 1)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2, 3]
    assert opened.sites(0) == ["encoder:in[0]", "encoder", ".:in[0]", "decoder:in[0]", "decoder", "."]
    assert opened.sites(1) == [".:in[0]", "decoder:in[0]", "decoder", "."]
    assert torch.equal(opened.tensor("encoder:in[0]", 3), X + 1)


def test_forward_called_directly_is_said_to_pass_by(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with record(model, tmp_path / "r", steps=iter([0, 1])):
        model.forward(X)
        model.forward(X)
    assert "instead of model.forward(...)" in caplog.text
    assert Recording.open(tmp_path / "r").steps == [0, 1] and "head" in Recording.open(tmp_path / "r").sites(1)
    caplog.clear()
    with record(model, tmp_path / "called"):
        model(X)
    assert not caplog.text


def test_selection(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r", sites=["layers.*.fc", "head*"], values=["head"], steps=range(1, 3)):
        for _ in range(4):
            model(X)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [1, 2] and opened.sites() == ["head"]
    assert [item.site for item in opened.left_out if item.step == 1] == ["layers.0.fc", "layers.1.fc", "head:in[0]"]
    assert {item.reason for item in opened.left_out} == {"values were not asked for"}
    assert [item.site for item in opened.skipped] == [item.site for item in opened.left_out]


def test_nothing_inside_is_observed_in_steps_that_are_left_out(tmp_path: Path) -> None:
    model, hooked = Model(), []

    def is_hooked() -> bool:
        return "_compiled_call_impl" in vars(model.layers[1].fc)

    model.head.register_forward_hook(lambda *_: hooked.append(is_hooked()))
    with record(model, tmp_path / "r", steps=[0, 1, 4]):
        for number in range(6):
            model(X + number)
        assert not is_hooked()
    # In the first step the recording learns what the model calls.
    assert hooked == [True, True, False, False, True, False] and not is_hooked()
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 4] and opened.metadata["not_called"] == [] and "not_seen" not in opened.metadata
    assert opened.sites(4) == opened.sites(0) and torch.equal(opened.tensor("layers.0:in[0]", 4), X + 4)


def test_only_modules_that_patterns_may_name_are_observed_once_all_were_seen(tmp_path: Path) -> None:
    def hooked(model: nn.Module) -> list[str]:
        return [path for path, module in model.named_modules() if path and "_compiled_call_impl" in vars(module)]

    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    for sites, kept in (
        (["1.0"], ["1.0"]),
        (["1.0:in[0]", "2"], ["1.0", "2"]),
        (["1.*"], ["1.0", "1.1"]),
        (["1*"], ["1", "1.0", "1.1"]),
        (["re:1"], ["0", "1", "1.0", "1.1", "2"]),
        (["*:kv.key", "2"], ["0", "1", "1.0", "1.1", "2"]),
    ):
        with contextlib.suppress(UnknownNameError), record(plain, tmp_path / "r", sites=sites, overwrite=True):
            plain(X)
            assert len(hooked(plain)) == 5
            plain(X)
            assert hooked(plain) == kept
            plain(X)
        assert hooked(plain) == []
        opened = Recording.open(tmp_path / "r")
        assert opened.sites(2) == opened.sites(0) and opened.metadata["not_called"] == []
    # A tap is named by the innermost module that is observed.
    tapped = Model()
    with record(tapped, tmp_path / "taps", sites=["layers.1.inter", "head"]):
        for _ in range(3):
            tapped(X)
        assert "layers.0" in hooked(tapped)
    assert Recording.open(tmp_path / "taps").sites(2) == ["layers.1.inter", "head"]


def test_a_left_out_step_of_one_thread_hides_nothing_of_another_one(tmp_path: Path) -> None:
    model, inside, may_go_on = Model(), threading.Event(), threading.Event()

    def pause(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is other:
            inside.set()
            may_go_on.wait(60)

    model.layers[0].register_forward_pre_hook(pause)
    other = threading.Thread(target=lambda: model(X + 1))
    with record(model, tmp_path / "r", steps=[0, 1]):
        model(X)
        other.start()
        inside.wait(60)
        model(X + 2)
        may_go_on.set()
        other.join()
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1] and opened.sites(1) == opened.sites(0)


def test_parts_that_are_called_by_themselves_are_seen_between_steps_that_are_left_out(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r", steps=[0, 3]):
        for number in range(4):
            model.layers[0](X + number)
            model(X + number)
    opened = Recording.open(tmp_path / "r")
    assert torch.equal(opened.tensor("layers.0:in[0]", 3), X + 3)
    assert opened.sites(3)[0] == opened.sites(0)[0] == "layers.0:in[0]"


def test_byte_budget(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path / "r", byte_budget=100):
        model(X)
    opened = Recording.open(tmp_path / "r")
    assert sum(entry.nbytes for entry in opened.entries) <= 100 and len(opened.entries) == 3
    assert len(opened.left_out) == 11 and {item.reason for item in opened.left_out} == {"the byte budget was used up"}


def test_patterns_that_match_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with pytest.raises(UnknownNameError, match=r"unknown site 'layer\.0\.fc'(.|\n)*layers\.0\.fc"):  # noqa: SIM117
        with record(model, tmp_path / "r", sites=["layer.0.fc"]):
            model(X)
    with record(model, tmp_path / "one", sites=["layer.0.fc", "head"]):
        model(X)
    assert Recording.open(tmp_path / "one").metadata["unmatched_patterns"] == ["layer.0.fc"]
    assert "no site matches layer.0.fc" in caplog.text


def test_a_model_that_was_not_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with record(Model(), tmp_path / "r"):
        pass
    assert Recording.open(tmp_path / "r").incomplete_because == "the model was not called"
    assert "the model was not called" in caplog.text


def test_what_holds_one_module(tmp_path: Path) -> None:
    model = Model()

    class Pipeline:
        def __init__(self) -> None:
            self.model = model

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)["logits"]

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)["logits"]

    pipeline = Pipeline()
    targets = (pipeline, function, model.forward, pipeline.__call__, lambda x: pipeline(x))
    for number, target in enumerate(targets):
        with record(target, tmp_path / str(number)) as recorder:
            recorder.model(X)
        assert recorder.model is model and "head" in Recording.open(tmp_path / str(number)).sites()


def test_misuse(tmp_path: Path) -> None:
    one, two = Model(), Model()
    for target in (lambda x: x, lambda x: one(two(x)), torch.ones(1).add):
        with pytest.raises(UsageError, match="only one module can be recorded"):
            record(target, tmp_path / "r")
    with pytest.raises(UsageError, match="not a list of patterns"):
        record(Model(), tmp_path / "r", sites=[3])  # type: ignore[list-item]
    for budget in (-1, "5G", float("nan")):
        with pytest.raises(UsageError, match="invalid byte budget"):
            record(Model(), tmp_path / "r", byte_budget=budget)
    for steps in (5, "0-3", [0.5], ["1"]):
        with pytest.raises(UsageError, match=r"(?s)steps is not a collection.*range\(5\)"):
            record(Model(), tmp_path / "r", steps=steps)
    assert not (tmp_path / "r").exists()
    with record(Model(), tmp_path / "once") as recorder, pytest.raises(UsageError, match="entered twice"):
        recorder.__enter__()
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "mine.txt").write_text("x")
    model = Model()
    with pytest.raises(UsageError, match="holds other files"), record(model, tmp_path / "locked"):
        pass
    assert is_clean(model)


def test_a_disk_that_fails_stops_the_recording_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from glassengine.recording.write import shard

    write_all = shard.write_all
    num_calls = 0

    def full(file: Any, buffers: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 3:
            raise OSError(28, "No space left on device")
        write_all(file, buffers)

    monkeypatch.setattr(shard, "write_all", full)
    model, results = Model(), []
    with pytest.raises(GlassError, match="No space left"), record(model, tmp_path / "r") as recorder:
        for _ in range(50):
            results.append(model(X)["logits"])
            recorder.wait()
    assert len(results) == 50 and "the model goes on" in caplog.text
    monkeypatch.undo()
    opened = Recording.open(tmp_path / "r")
    assert not opened.complete and 0 < len(opened.steps) < 50
    for entry in opened.entries:
        opened.tensor(entry)
