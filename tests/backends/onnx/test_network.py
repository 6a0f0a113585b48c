"""Layers of the ONNX graph: one that is called like a node yields that node's value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.backends.onnx.export import MODEL_FILE, export_onnx
from glassengine.backends.onnx.network import list_network, list_optimized
from glassengine.backends.protocol.backend import Network
from glassengine.capture.observers import run_program
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import Program
from glassengine.testing import models


@pytest.fixture(scope="module")
def converted(program_of: Callable[..., Program], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: name of a model -> its ONNX file; each is converted once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            export_onnx(program_of(name), directory)
            made[name] = directory / MODEL_FILE
        return made[name]

    return make


def inputs_of(program: Program, name: str) -> dict[str, torch.Tensor]:
    if program.layout is None:
        made: dict[str, torch.Tensor] = getattr(models, f"{name}_inputs")(2)
        return made
    generator = torch.Generator().manual_seed(0)
    cache = program.layout.allocate(2, 12, torch.float32)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[:, 8:] = 0
    mask[0, 0] = 0
    return {
        **{name: torch.randn(tensor.shape, generator=generator) for name, tensor in cache.items()},
        "input_ids": torch.randint(3, 200, (2, 5), generator=generator),
        "attention_mask": mask,
        "position_ids": torch.arange(3, 8).repeat(2, 1),
        "cache_position": torch.arange(3, 8),
    }


def values_of_layers(path: Path, network: Network, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return layer -> its first output, of a graph that returns every value."""
    import onnx
    import onnxruntime

    model = onnx.load(path)
    have = {value.name for value in model.graph.output}
    wanted = {layer.name: layer.outputs[0].name for layer in network.layers}
    for name in dict.fromkeys(wanted.values()):
        if name not in have:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    results = session.run(list(wanted.values()), {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(wanted, results, strict=True))


@pytest.mark.parametrize(
    ("name", "least"),
    [("vision", 12), *(pytest.param(*large, marks=pytest.mark.slow) for large in (("llama", 120), ("mixtral", 150)))],
)
def test_layer_called_like_a_node_yields_its_value(
    program_of: Callable[..., Program], converted: Callable[[str], Path], name: str, least: int
) -> None:
    program = program_of(name)
    network = list_network(converted(name), program, "a runtime")
    assert len({layer.name for layer in network.layers}) == len(network.layers)
    inputs = inputs_of(program, name)
    expected: dict[str, Any] = {}
    run_program(program, inputs, lambda node, value: expected.__setitem__(node.name, value))
    found = values_of_layers(converted(name), network, inputs)
    judged = 0
    for layer in network.layers:
        value = expected.get(layer.name)
        if isinstance(value, torch.Tensor):
            assert layer.nodes == (layer.name,)
            torch.testing.assert_close(
                torch.from_numpy(found[layer.name]).double(), value.double(), rtol=1e-3, atol=1e-4, msg=layer.name
            )
            judged += 1
        elif value is None:
            node, _, part = layer.name.partition("/")
            assert part and (node in expected or node == "shared"), layer.name
    assert judged >= least


def test_keys_that_heads_share_are_not_repeated(
    program_of: Callable[..., Program], converted: Callable[[str], Path]
) -> None:
    program = program_of("llama")
    layers = list_network(converted("llama"), program, "a runtime").layers
    assert {node for layer in layers for node in layer.nodes} <= {node.name for node in program.graph.nodes}
    scores = [layer.outputs[0].shape for layer in layers if layer.operation == "Softmax"]
    assert scores == ["[batch, 2, 2*sequence, cache]"] * len(scores) and len(scores) > 1


def test_a_runtime_knows_the_norms_of_a_graph(
    program_of: Callable[..., Program], converted: Callable[[str], Path], tmp_path: Path
) -> None:
    program = program_of("llama")
    assert _num_norms(converted("llama"), program) == 5
    # One whose root is an output stays as it is.
    export_onnx(add_outputs(program, ["rsqrt"]), tmp_path)
    assert _num_norms(tmp_path / MODEL_FILE, program) == 4


def _num_norms(path: Path, program: Program) -> int:
    optimized = list_optimized(path, program, list_network(path, program, "a runtime"))
    assert optimized is not None
    return sum(layer.operation == "SimplifiedLayerNormalization" for layer in optimized.layers)


def test_handles_stay_out_of_the_program(program_of: Callable[..., Program], converted: Callable[[str], Path]) -> None:
    program = program_of("vision")
    assert b"glass node conv2d" in converted("vision").read_bytes()
    assert not any("glass node" in (node.meta.get("stack_trace") or "") for node in program.graph.nodes)


def test_sizes_have_the_names_of_the_program(
    program_of: Callable[..., Program], converted: Callable[[str], Path]
) -> None:
    network = list_network(converted("llama"), program_of("llama"), "a runtime")
    shapes = {tensor.name: tensor.shape for layer in network.layers for tensor in layer.outputs}
    assert shapes["logits"] == "[batch, sequence, 272]"
    optimized = list_optimized(converted("llama"), program_of("llama"), network)
    assert optimized is not None and optimized.layers
