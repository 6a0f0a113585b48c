"""Where the weights are outside: steps of one token by themselves, products of few rows; the values of the program."""

from __future__ import annotations

import dataclasses
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from glassengine.backends.inductor import backend as inductor
from glassengine.backends.inductor.backend import InductorBackend
from glassengine.backends.inductor.rewrites import (
    of_one_token,
    one_token_shapes,
    product_by_rows,
    with_products_by_rows,
)
from glassengine.backends.protocol.backend import BATCH_INVARIANT
from glassengine.backends.protocol.io import read_io
from glassengine.program.export.export import export_causal_lm, export_module
from glassengine.program.representation.kept_logits import with_kept_logits
from glassengine.program.representation.program import Program

BACKEND = InductorBackend()
LENGTH = 9


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    # A row of 5120 elements is added up in parts; the others are not. With and without a bias.
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=5120,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_bias=True,
    )
    return export_causal_lm(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def built(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one-row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
        BACKEND.build(program, directory)
    return directory


def step(program: Program, batch: int, new: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(batch * 10 + new)
    sizes = {"batch": batch, "sequence": new, "cache": LENGTH}
    inputs = {}
    for port in program.inputs:
        shape = [size if isinstance(size, int) else sizes[size] for size in port.shape]
        inputs[port.name] = torch.randn(shape) if port.dtype == "float32" else torch.ones(shape, dtype=torch.int64)
    inputs["input_ids"] = torch.randint(0, 50, (batch, new))
    inputs["cache_position"] = 4 + torch.arange(new)
    inputs["position_ids"] = inputs["cache_position"].expand(batch, new)
    inputs["attention_mask"] = (torch.arange(LENGTH) < 4 + new).long().expand(batch, LENGTH)
    return inputs


def copies(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def expected(program: Program, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    caches = {name: tensor for name, tensor in inputs.items() if name in program.caches}
    module = program.exported.module(check_guards=False)
    with torch.no_grad():
        args, kwargs = torch.utils._pytree.tree_unflatten(list(inputs.values()), program.exported.call_spec.in_spec)
        result = module(*args, **kwargs)
    return torch.utils._pytree.tree_leaves(result)[0], caches


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the packages that were run."""
    names: list[str] = []
    load: Callable[..., Any] = torch._inductor.aoti_load_package

    class Spied:
        def __init__(self, path: str, **options: Any) -> None:
            package = load(path, **options)
            self.get_constant_fqns, self.load_constants = package.get_constant_fqns, package.load_constants
            self.loader = self
            self.run = lambda given: (names.append(Path(path).name), package.loader.run(given))[1]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", Spied)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "new", "package"), [(1, 1, "one_token.pt2"), (2, 1, "model.pt2"), (1, 3, "model.pt2")]
)
def test_values_are_those_of_the_program(
    program: Program, built: Path, ran: list[str], batch: int, new: int, package: str
) -> None:
    run = BACKEND.load(built, dict(program.exported.state_dict) | program.exported.constants)
    inputs = step(program, batch, new)
    mine, theirs = copies(inputs), copies(inputs)
    found = run(mine)
    logits, caches = expected(program, theirs)
    assert ran == [package]
    torch.testing.assert_close(found["logits"], logits, rtol=1e-5, atol=1e-5)
    for name, cache in caches.items():
        torch.testing.assert_close(mine[name], cache, rtol=1e-5, atol=1e-5)
        assert not torch.equal(mine[name], inputs[name]), "the step was written into the caches"


@pytest.mark.slow
def test_both_packages_share_the_weights_outside(program: Program, built: Path) -> None:
    (weight,) = (w for name, w in program.exported.state_dict.items() if name.endswith("up_proj.weight"))
    values = weight.detach().numpy().tobytes()
    for name, ops in (("model.pt2", {b"product_by_rows"}), ("one_token.pt2", set())):
        with zipfile.ZipFile(built / name) as archive:
            contents = [archive.read(member) for member in archive.namelist()]
        assert not any(values in content for content in contents)
        assert {op for content in contents for op in re.findall(rb"glass::(\w+)", content)} == ops


@pytest.mark.slow
def test_the_listing_says_so(program: Program, built: Path) -> None:
    network = BACKEND.network(program, built)
    assert "one_token.pt2" in network.note
    linear = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert {node.name for node in linear} <= {name for layer in network.layers for name in layer.nodes}


@pytest.mark.parametrize("is_kept", [False, True])
def test_every_linear_layer_of_a_step_is_a_product_of_one_row(program: Program, is_kept: bool) -> None:
    program = with_kept_logits(program) if is_kept else program
    count = len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))
    before = [node.name for node in program.graph.nodes]
    graph = of_one_token(program).graph
    assert count == 8 and not graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.glass.row_product.default)) == count
    assert [node.name for node in program.graph.nodes] == before


@pytest.mark.parametrize("rows", [(1,), (2, 1), (3,), (2, 8), (255,), (256,), (2, 300), (0,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_has_the_values_of_a_linear_layer_for_every_number_of_rows(
    rows: tuple[int, ...], has_bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*rows, 40), torch.randn(24, 40), torch.randn(24) if has_bias else None
    found = product_by_rows()(x, weight, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_products_by_rows_keep_the_names_and_the_program(program: Program) -> None:
    linear, product = torch.ops.aten.linear.default, product_by_rows()
    before = [(node.name, node.target) for node in program.graph.nodes]
    graph = with_products_by_rows(program.exported).graph
    assert [(node.name, linear if node.target is product else node.target) for node in graph.nodes] == before
    assert [(node.name, node.target) for node in program.graph.nodes] == before
    assert not graph.find_nodes(op="call_function", target=linear)


def test_an_engine_that_is_batch_invariant_has_no_products_by_rows(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda exported, **options: given.append(exported))
    for is_invariant in (False, True):
        BACKEND.build(dataclasses.replace(program, metadata={BATCH_INVARIANT: is_invariant}), tmp_path)
        targets = {node.target for node in given[-2].graph.nodes}
        assert (product_by_rows() in targets) is not is_invariant


def compiled(program: Program, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda exported, package_path, **options: names.append(Path(package_path).name),
    )
    BACKEND.build(program, directory)
    assert bool(read_io(directory).one_token) == ("one_token.pt2" in names)
    return names


def test_small_models_are_packed_and_need_none(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled(program, tmp_path, monkeypatch) == ["model.pt2"]
    monkeypatch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
    assert compiled(program, tmp_path, monkeypatch) == ["model.pt2", "one_token.pt2"]
    # A profile names kernels in the order of one package. (pytest's setattr would not put torch's settings back.)
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True):
        assert compiled(program, tmp_path, monkeypatch) == ["model.pt2"]


def test_a_build_goes_on_without_it(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    message = "cannot be traced\nat all"

    def fail(program: Program) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
    monkeypatch.setattr(inductor, "of_one_token", fail)
    with caplog.at_level("WARNING"):
        assert compiled(program, tmp_path, monkeypatch) == ["model.pt2"]
    assert "RuntimeError: cannot be traced" in caplog.text and "at all" not in caplog.text


def test_a_module_has_no_step_of_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(3, 3).eval()
    plain = export_module(module, [{"input": torch.zeros(2, 3)}, {"input": torch.zeros(5, 3)}])
    assert one_token_shapes(plain) == {}
    monkeypatch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
    assert compiled(plain, tmp_path, monkeypatch) == ["model.pt2"]
