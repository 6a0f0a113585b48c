"""`model_addition_debugger_context`: every row of what the original gets wrong is right here, on the same call."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.model_debugging_utils import model_addition_debugger_context as original

import glassengine as glass
from glassengine.errors import IncomparableError, UsageError
from glassengine.recording.source import TensorSource, open_source
from glassengine.testing.models import gemma3, gpt2, llama
from tests.capture.test_record import Calls

IDS = torch.tensor([[5, 6, 7]])
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def debug(model: nn.Module, path: Path, *args: Any, use_repr: bool = False, **kwargs: Any) -> TensorSource:
    with glass.compat.model_addition_debugger_context(model, path, do_prune_layers=False, use_repr=use_repr):
        model(*args, **kwargs)
    return open_source(path)


def tensors(source: TensorSource, step: int = 0) -> dict[str, torch.Tensor]:
    return {entry.site: source.tensor(entry) for entry in source.entries if entry.step == step}


def tree(path: Path, name: str = "Calls_debug_tree_FULL_TENSORS.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / name).read_text())
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what the original and ours write of one forward, as text and as files."""
    folder = tmp_path_factory.mktemp("both")
    for context, side in ((original, "original"), (glass.compat.model_addition_debugger_context, "ours")):
        for use_repr in (True, False):
            model, path = llama(), str(folder / f"{side}-{use_repr}")
            with context(model, debug_path=path, do_prune_layers=False, use_repr=use_repr):
                model.forward(input_ids=IDS)
    torch.set_printoptions(profile="default")
    return folder


def test_the_signature_is_the_documented_one() -> None:
    ours = inspect.signature(glass.compat.model_addition_debugger_context).parameters
    theirs = inspect.signature(original).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("use_repr", [True, False])
def test_everything_the_original_writes_is_written(both: Path, use_repr: bool) -> None:
    theirs, ours = both / f"original-{use_repr}", both / f"ours-{use_repr}"
    assert {path.name for path in theirs.iterdir()} <= {path.name for path in ours.iterdir()}
    for name in ("FULL_TENSORS", "SUMMARY"):
        file = f"LlamaForCausalLM_debug_tree_{name}.json"
        missing: list[str] = []
        contained(json.loads((theirs / file).read_text()), json.loads((ours / file).read_text()), "", missing)
        assert missing == []


def contained(theirs: Any, ours: Any, where: str, missing: list[str]) -> None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in theirs.items():
            contained(value, ours.get(key), f"{where}.{key}", missing)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            contained(a, b, f"{where}.{index}", missing)
    elif theirs != ours:
        missing.append(f"{where}: {theirs!r} is {ours!r}"[:200])


@pytest.mark.parametrize("family", [gpt2, gemma3])
@pytest.mark.parametrize("use_repr", [True, False])
def test_the_originals_traces_compare_with_ours(family: Any, use_repr: bool, tmp_path: Path) -> None:
    model = family()
    with original(model, str(tmp_path / "original"), do_prune_layers=False, use_repr=use_repr):
        model.forward(IDS)
    torch.set_printoptions(profile="default")
    debug(model, tmp_path / "ours", IDS)
    found = glass.compare(tmp_path / "original", tmp_path / "ours")
    assert found.ok and found.counts["unmatched_baseline"] == 0 and found.counts["compared"] > 50
    assert use_repr or found.verdict == "identical"


def test_a_call_and_its_forward_are_the_same(both: Path, tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x), a=nn.Linear(4, 3))
    with glass.compat.model_addition_debugger_context(model, tmp_path, use_repr=False) as same:
        assert same is model
        model.forward(X)
        model(X)
        with pytest.raises(RuntimeError):
            model(X[:, 1:])
        model.forward(x=X)
    source = open_source(tmp_path)
    assert [list(tensors(source, step)) for step in (0, 1, 3)] == [
        [".:in[0]", "a:in[0]", "a", "."],
        [".:in[0]", "a:in[0]", "a", "."],
        [".:in.x", "a:in[0]", "a", "."],
    ]
    assert "forward" not in vars(model)


def test_values_of_a_summary_are_not_there(both: Path) -> None:
    text = (both / "ours-True" / "LlamaForCausalLM_debug_tree_SUMMARY.json").read_text()
    assert '"value": [' not in text and '"mean"' in text


def test_results_of_containers_are_kept(both: Path) -> None:
    with torch.no_grad():
        logits = llama()(IDS).logits
    found = tensors(open_source(both / "ours-False"))
    assert torch.equal(found[".:out.logits"], logits) and "model.layers.0" in found and "model.layers.1.mlp" in found


def test_every_step_of_generate_and_its_caches_are_kept(tmp_path: Path) -> None:
    model = llama()
    with glass.compat.model_addition_debugger_context(model, tmp_path, use_repr=False):
        made = model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
    source = open_source(tmp_path)
    assert sorted({entry.step for entry in source.entries}) == [0, 1, 2]
    assert [tensors(source, step)[".:in.input_ids"].tolist() for step in (1, 2)] == [
        [[t]] for t in made[0, 3:5].tolist()
    ]
    for step in range(3):
        key = tensors(source, step)["model.layers.1.self_attn:kv.key"]
        assert key.shape[2] == 3 + step
    with torch.no_grad():
        whole = model(made[:, :-1], use_cache=True)
    torch.testing.assert_close(key, whole.past_key_values.layers[1].keys)


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    note: str = "hello"


def test_plain_dataclasses(tmp_path: Path) -> None:
    model = Calls(lambda self, x: Result(self.a(x)), a=nn.Linear(4, 3))
    assert tensors(debug(model, tmp_path, X))[".:out.y"].shape == (2, 3)
    assert tree(tmp_path)["outputs"]["note"] == "'hello'"


def test_a_shared_module_has_both_names_and_no_call_overwrites_another(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = Calls(lambda self, x: self.b(self.a(self.a(x))), a=shared, b=shared)
    found = tensors(debug(model, tmp_path, X))
    first = shared(X)
    second = shared(first)
    assert torch.equal(found["a"], first) and torch.equal(found["a@1"], second)
    assert torch.equal(found["b"], shared(second))
    # Three results, three inputs; input and result of the model.
    assert len(list(tmp_path.glob("*.safetensors"))) == 8


def test_an_exception_loses_nothing(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = self.a(x)
        if fail:
            raise ValueError("planted")
        return self.b(y)

    model = Calls(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with (
        pytest.raises(ValueError, match="planted"),
        glass.compat.model_addition_debugger_context(model, tmp_path / "x"),
    ):
        model(X, fail=True)
    found = tensors(open_source(tmp_path / "x"))
    assert set(found) == {".:in[0]", "a:in[0]", "a"}
    torch.testing.assert_close(found["a"], model.a(X).detach(), rtol=1e-4, atol=0)
    # One that is caught inside the block leaves nothing behind either.
    with glass.compat.model_addition_debugger_context(model, tmp_path / "y"):
        with pytest.raises(ValueError, match="planted"):
            model(X, fail=True)
        model(X)
    source = open_source(tmp_path / "y")
    assert list(tensors(source, 1)) == [".:in[0]", "a:in[0]", "a", "b:in[0]", "b", "."]
    assert [
        child["module_path"] for child in tree(tmp_path / "y", "Calls_debug_tree_step1_SUMMARY.json")["children"]
    ] == [
        "Calls.a",
        "Calls.b",
    ]


def test_keys_that_are_no_file_names(tmp_path: Path) -> None:
    names = ["a/b", "../../up", "nul\0", "\u202egpj.exe", "x" * 4096, "con:", "a b", "a_b", ""]
    model = Calls(lambda self, **kwargs: self.a(kwargs["a/b"]), a=nn.Linear(4, 3))
    source = debug(model, tmp_path / "in", **{name: X + index for index, name in enumerate(names)})
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]
    found = tensors(source)
    for index, name in enumerate(names):
        assert torch.equal(found[f".:in.{name}"], X + index), name


def test_empty_tensors(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x[:0]), a=nn.Linear(4, 3))
    for use_repr in (True, False):
        found = tensors(debug(model, tmp_path / str(use_repr), X, use_repr=use_repr))
        assert found["a"].shape == (0, 3)


def test_a_compiled_model(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x).relu(), a=nn.Linear(4, 3))
    compiled: Any = torch.compile(model, backend="eager")
    found = tensors(debug(compiled, tmp_path, X))
    assert torch.equal(found["."], model(X)) and torch.equal(found[".:in[0]"], X)


@pytest.mark.parametrize(
    "tensor",
    [
        X.double(), X.to(torch.complex64), X.to(torch.complex128), X.to(torch.float8_e4m3fn), X.bfloat16(), X > 0,
        torch.arange(8), torch.arange(8, dtype=torch.uint8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_repr", [True, False])
def test_every_dtype_has_statistics(tensor: torch.Tensor, use_repr: bool, tmp_path: Path) -> None:
    source = debug(Calls(lambda self, x: x), tmp_path, tensor, use_repr=use_repr)
    described = tree(tmp_path)["outputs"]
    assert described["dtype"] == repr(tensor.dtype)
    exact = (tensor.abs() if tensor.is_complex() else tensor).double()
    if tensor.dtype is torch.bfloat16:  # as the original has it
        with torch._tensor_str.printoptions(sci_mode=True):
            assert (described["mean"], described["max"]) == (repr(tensor.mean()), repr(tensor.max()))
    else:
        assert described["mean"] == f"tensor({float(exact.mean()):.4e})"
        assert described["max"] == f"tensor({float(exact.max()):.4e})"
    rtol = 1e-4 if use_repr and tensor.dtype.itemsize > 2 else 0
    torch.testing.assert_close(tensors(source)["."], tensor, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [1, 7, 3000])
@pytest.mark.filterwarnings("ignore:std\\(\\):UserWarning")
def test_f38_statistics_are_those_of_the_original(tmp_path: Path, dtype: torch.dtype, numel: int) -> None:
    x = (torch.arange(numel) / 3000 - 0.3).to(dtype)
    for context, name in ((original, "theirs"), (glass.compat.model_addition_debugger_context, "ours")):
        model = Calls(lambda self, x: self.a(x), a=nn.ReLU())
        with context(model, str(tmp_path / name), do_prune_layers=False):
            model.forward(x)
    torch.set_printoptions(profile="default")
    found = [tree(tmp_path / name)["children"][0]["outputs"] for name in ("theirs", "ours")]
    assert {key: found[0][key] for key in ("mean", "std", "min", "max")}.items() <= found[1].items()


def shape_of(node: dict[str, Any]) -> list[Any]:
    return [node["module_path"], [shape_of(child) for child in node.get("children", [])]]


def test_f38_calls_are_inside_of_the_call_that_called_them(tmp_path: Path) -> None:
    text = Calls(lambda self, x: self.norm(self.layer(x)), embed=nn.Linear(4, 4), layer=nn.ReLU(), norm=nn.Tanh())

    def forward(self: Any, x: torch.Tensor) -> Any:
        # As LLaVA does it: the embeddings belong to the language model and are called by the model around it.
        embedded = self.text.embed(x)
        self.gate()
        return self.head(self.text(embedded + self.tower(x)))

    nothing = Calls(lambda self: None)
    trees = []
    for context, name in ((original, "theirs"), (glass.compat.model_addition_debugger_context, "ours")):
        model = Calls(forward, text=text, tower=nn.Linear(4, 4), head=nn.Linear(4, 2), gate=nothing)
        with context(model, str(tmp_path / name), do_prune_layers=False):
            model.forward(X)
        trees.append(tree(tmp_path / name))
    torch.set_printoptions(profile="default")
    assert shape_of(trees[0]) == shape_of(trees[1])
    assert [child["module_path"] for child in trees[1]["children"]] == [
        "Calls.text.embed",
        "Calls.gate",
        "Calls.tower",
        "Calls.text",
        "Calls.head",
    ]
    assert glass.compare(tmp_path / "theirs", tmp_path / "ours").ok


@pytest.mark.parametrize("family", [gpt2, gemma3])
def test_f38_trees_of_models_are_those_of_the_original(family: Any, tmp_path: Path) -> None:
    model = family()
    for context, name in ((original, "theirs"), (glass.compat.model_addition_debugger_context, "ours")):
        with context(model, str(tmp_path / name), do_prune_layers=False):
            model.forward(IDS)
    torch.set_printoptions(profile="default")
    file = f"{type(model).__name__}_debug_tree_SUMMARY.json"
    theirs, ours = (json.loads((tmp_path / name / file).read_text()) for name in ("theirs", "ours"))
    assert shape_of(theirs) == shape_of(ours)


def test_nan_is_counted_and_placed(tmp_path: Path) -> None:
    x = X.clone()
    x[1, 2], x[1, 3] = float("nan"), float("inf")
    debug(Calls(lambda self, x: x), tmp_path, x)
    described = tree(tmp_path)["outputs"]
    assert (described["num_nan"], described["num_inf"], described["first_nonfinite"]) == (1, 1, [1, 2])
    assert described["max"] == f"tensor({float(X[1, 1]):.4e})"


def test_one_element_of_a_large_tensor_makes_the_text_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    y = x.clone()
    y[30, 30] += 1.0
    for name, value in (("x", x), ("again", x), ("y", y)):
        debug(Calls(lambda self, x: x), tmp_path / name, value, use_repr=True)
    described = {name: tree(tmp_path / name)["outputs"] for name in ("x", "again", "y")}
    assert described["x"]["value"] == described["y"]["value"]
    assert described["x"] == described["again"] and described["x"]["crc32"] != described["y"]["crc32"]


def test_hooks_that_replace_a_result_are_seen_and_later_changes_in_place_are_not(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x).add_(100), a=nn.Linear(4, 3))
    plain = model.a(X).detach()
    model.a.register_forward_hook(lambda module, args, result: result + 1)
    found = tensors(debug(model, tmp_path, X))
    assert torch.equal(found["a"], plain + 1) and torch.equal(found["."], plain + 1 + 100)


def test_no_gradients_here_and_gradients_on_request_there(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x), a=nn.Linear(4, 3))
    with glass.compat.model_addition_debugger_context(model, tmp_path / "d"):
        assert not model(X).requires_grad
    assert torch.is_grad_enabled()
    with glass.record(model, tmp_path / "r", gradients=True):
        model(X).sum().backward()
    assert "a.weight:grad" in glass.Recording.open(tmp_path / "r").sites()


def test_a_second_model_of_the_class_overwrites_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (Calls(lambda self, x: self.a(x), a=nn.Linear(4, 3)) for _ in range(2))
    with torch.no_grad():
        second.a.bias += 1
    debug(first, tmp_path, X)
    with caplog.at_level(logging.WARNING):
        found = tensors(debug(second, tmp_path, X))
    assert "earlier-000" in caplog.text
    assert torch.equal(found["a"], second.a(X)) and torch.equal(
        tensors(open_source(tmp_path / "earlier-000"))["a"], first.a(X)
    )


def test_nothing_of_the_context_stays_on_the_model(tmp_path: Path) -> None:
    model = Calls(lambda self, x: self.a(x), a=nn.Linear(4, 3))
    before = {module: set(vars(module)) for module in model.modules()}
    debug(model, tmp_path, X)
    assert {module: set(vars(module)) for module in model.modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not [path for path in tmp_path.iterdir() if "recording" in path.name or path.name.startswith(".")]


def test_compare_names_the_wrong_layer_of_two_traces(tmp_path: Path) -> None:
    good = Calls(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    debug(good, tmp_path / "good", X)
    with torch.no_grad():
        good.b.weight[1, 2] += 0.01
    debug(good, tmp_path / "bad", X)
    assert glass.compare(tmp_path / "good", tmp_path / "good").ok
    result = glass.compare(tmp_path / "good", tmp_path / "bad")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == "b"


def test_pruning_saves_files_and_keeps_first_and_last(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=4)
    sizes = {}
    for prune in (True, False):
        with glass.compat.model_addition_debugger_context(
            model, tmp_path / str(prune), do_prune_layers=prune, use_repr=False
        ):
            model(IDS)
        sites = tensors(open_source(tmp_path / str(prune)))
        assert {site.split(".")[2].partition(":")[0] for site in sites if site.startswith("model.layers.")} == (
            {"0", "3"} if prune else {"0", "1", "2", "3"}
        )
        sizes[prune] = len(list((tmp_path / str(prune)).glob("*.safetensors")))
    assert sizes[True] < 0.7 * sizes[False]


def test_what_cannot_be_called_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only a module"), glass.compat.model_addition_debugger_context(len):  # type: ignore[arg-type]
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match="cannot write"),
        glass.compat.model_addition_debugger_context(nn.Linear(1, 1), tmp_path / "file"),
    ):
        pass


def test_a_model_that_is_not_called_leaves_nothing(tmp_path: Path) -> None:
    with glass.compat.model_addition_debugger_context(nn.Linear(1, 1), tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def summary(path: Path, wrong: bool = False, rounded: bool = False, width: int = 4, **options: Any) -> Path:
    torch.manual_seed(0)
    model = Calls(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, width), b=nn.Linear(width, 4))
    with torch.no_grad():
        if wrong:
            model.b.weight *= 1.05  # type: ignore[operator]
        if rounded:
            model.a.weight *= 1 + 1e-7  # type: ignore[operator]
    debug(model, path, X, use_repr=True, **options)
    (path / "Calls_debug_tree_FULL_TENSORS.json").unlink()
    return path / "Calls_debug_tree_SUMMARY.json"


def test_f38_two_summaries_alone_are_compared(tmp_path: Path) -> None:
    one = summary(tmp_path / "one")
    same = glass.compare(one, summary(tmp_path / "same", rounded=True))
    assert same.ok and same.coverage == 1 and "only printed mean" in str(same.calibration)
    found = glass.compare(one, summary(tmp_path / "wrong", wrong=True))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "b"
    assert {pair.site: pair.verdict for pair in found.pairs}["b:in[0]"] == "identical"
    # Of another shape, whatever the statistics are; a directory is the same as its file.
    other = glass.compare(tmp_path / "one", summary(tmp_path / "other", width=6).parent)
    assert not other.ok and {pair.site for pair in other.pairs if pair.verdict == "wrong"} >= {"a:shape"}


def test_f38_a_summary_and_values_are_not_compared(tmp_path: Path) -> None:
    one = summary(tmp_path / "one")
    debug(Calls(lambda self, x: x), tmp_path / "values", X)
    with pytest.raises(IncomparableError, match="one side has statistics alone"):
        glass.compare(one, tmp_path / "values")


def test_f38_summaries_of_the_original_are_compared_with_ours(both: Path, tmp_path: Path) -> None:
    copies = []
    for name in ("original-True", "ours-True"):
        (tmp_path / name).mkdir()
        copies.append(tmp_path / name / "LlamaForCausalLM_debug_tree_SUMMARY.json")
        copies[-1].write_bytes((both / name / copies[-1].name).read_bytes())
    found = glass.compare(*copies)
    assert found.ok and found.verdict == "identical" and found.counts["compared"] > 50
