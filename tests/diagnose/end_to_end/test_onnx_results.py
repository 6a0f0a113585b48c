"""An auditor of ONNX candidates: what is said of results is what PyTorch and a plain session of ONNX Runtime give."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from onnxruntime import quantization
from torch import nn

import glassengine as glass
from glassengine.errors import BackendError

VOCABULARY = 50
Edit = Callable[[onnx.ModelProto], None]


class Scores(nn.Module):
    """Scores of tokens: what is printed of them has KL and the share of equal next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, 24), nn.LayerNorm(24)
        self.up, self.down, self.head = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return self.head(x.mean((2, 3)))


class InHalf(nn.Module):
    """A file whose weights are float16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.half()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.module(given.half() if given.is_floating_point() else given).float()


MODELS: dict[str, Callable[[], nn.Module]] = {"scores": Scores, "image": Image}
DRAW = torch.Generator().manual_seed(3)
GIVEN: dict[str, dict[str, torch.Tensor]] = {
    "scores": {"ids": torch.randint(0, VOCABULARY, (2, 20), generator=DRAW)},
    "image": {"x": torch.randn(4, 3, 9, 9, generator=DRAW)},
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def exported(name: str, path: Path, module: nn.Module | None = None, *, dynamo: bool = False) -> Path:
    (argument,) = GIVEN[name]
    results = ["logits"] if name == "scores" else ["y"]
    options: dict[str, Any] = {"input_names": [argument], "output_names": results, "opset_version": 18}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = tuple(GIVEN[name].values())
        torch.onnx.export(module or made(name), given, str(path), dynamo=dynamo, **options)
    return path


class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.given = iter([{key: value.numpy() for key, value in GIVEN[name].items()}])

    def get_next(self) -> Any:
        return next(self.given, None)


def static(name: str, form: str, activations: str, weights: str, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source, target = exported(name, folder / "floats.onnx"), folder / "int8.onnx"
        kinds = {"activation_type": quantization.QuantType[activations], "weight_type": quantization.QuantType[weights]}
        told = {"quant_format": quantization.QuantFormat[form], **kinds, **options}
        quantization.quantize_static(str(source), str(target), Reader(name), **told)
        return target

    return make


def dynamic(name: str, weights: str, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source, target = exported(name, folder / "floats.onnx"), folder / "int8.onnx"
        kind = quantization.QuantType[weights]
        quantization.quantize_dynamic(str(source), str(target), weight_type=kind, **options)
        return target

    return make


def plain(name: str, *, dynamo: bool = False, half: bool = False, apart: bool = False) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        module = InHalf(made(name)).eval() if half else None
        path = exported(name, folder / "model.onnx", module, dynamo=dynamo)
        if not apart:
            return path
        target = folder / "apart.onnx"
        onnx.save(onnx.load(path), target, save_as_external_data=True, location="apart.data", size_threshold=0)
        return target

    return make


def edited(make: Callable[[Path], Path], edit: Edit) -> Callable[[Path], Path]:
    def changed(folder: Path) -> Path:
        path = make(folder)
        model = onnx.load(path)
        edit(model)
        onnx.save(model, path)
        return path

    return changed


def another_activation(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Sigmoid"


def larger_scale(model: onnx.ModelProto) -> None:
    scale = next(one for one in model.graph.initializer if one.name.endswith("weight_scale"))
    value = np.asarray(numpy_helper.to_array(scale) * np.float32(1.5))
    scale.CopyFrom(numpy_helper.from_array(value, scale.name))


PAIRS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "floats": ("scores", plain("scores")),
    "QDQ of int8 weights": ("scores", static("scores", "QDQ", "QUInt8", "QInt8")),
    "dynamic, int8": ("scores", dynamic("scores", "QInt8")),
    "another activation": ("image", edited(plain("image"), another_activation)),
    "float16": ("scores", plain("scores", half=True)),
    "floats, images": ("image", plain("image")),
    "floats by dynamo": ("scores", plain("scores", dynamo=True)),
    "floats, images by dynamo": ("image", plain("image", dynamo=True)),
    "external data": ("scores", plain("scores", apart=True)),
    "external data, images": ("image", plain("image", apart=True)),
    "float16, images": ("image", plain("image", half=True)),
    "QDQ of uint8": ("scores", static("scores", "QDQ", "QUInt8", "QUInt8")),
    "QDQ of int8 per channel": ("image", static("image", "QDQ", "QInt8", "QInt8", per_channel=True)),
    "QDQ of images": ("image", static("image", "QDQ", "QUInt8", "QInt8", reduce_range=True)),
    "QOperator": ("scores", static("scores", "QOperator", "QUInt8", "QInt8")),
    "QOperator of images": ("image", static("image", "QOperator", "QUInt8", "QInt8", per_channel=True)),
    "dynamic, uint8": ("scores", dynamic("scores", "QUInt8", per_channel=False)),
    "dynamic, images": ("image", dynamic("image", "QUInt8")),
    "another scale of scores": ("scores", edited(static("scores", "QOperator", "QUInt8", "QUInt8"), larger_scale)),
    "another scale": ("image", edited(static("image", "QDQ", "QUInt8", "QUInt8"), larger_scale)),
}


def audited(found: glass.Comparison, expected: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> None:
    """Compare what is said of the last level with what NumPy makes of both results."""
    (said,) = [one for one in found.results if one.level == found.results[-1].level]
    ours, theirs = expected.astype(np.float64), value.astype(np.float64)
    noise = ((theirs - ours) ** 2).sum()
    assert said.snr_db is not None
    assert said.snr_db == pytest.approx(10 * np.log10((ours**2).sum() / noise) if noise else np.inf, abs=0.1)
    assert said.max_abs_diff == pytest.approx(np.abs(theirs - ours).max(), rel=0.01)
    if said.name == "logits":
        logs = [one - np.log(np.exp(one - one.max(-1, keepdims=True)).sum(-1, keepdims=True)) for one in (ours, theirs)]
        logs = [log - raw.max(-1, keepdims=True) for log, raw in zip(logs, (ours, theirs), strict=True)]
        kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
        same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        assert (said.num_tokens, said.same_tokens) == (ours[..., 0].size, same)
        assert said.mean_kl == pytest.approx(kl.mean(), rel=0.02, abs=1e-9)
    if found.ok:
        assert said.snr_db > 10 and said.agrees


def is_slow(pair: str) -> bool:
    return any(word in pair for word in ("dynamo", "images", "per channel"))


@pytest.mark.parametrize(
    "pair", [pytest.param(name, marks=pytest.mark.slow if is_slow(name) else ()) for name in PAIRS], ids=[*PAIRS]
)
def test_f53_results_are_what_a_plain_session_gives(pair: str, tmp_path: Path) -> None:
    name, make = PAIRS[pair]
    path, given = make(tmp_path), tmp_path / "given.npz"
    np.savez(given, **{key: value.numpy() for key, value in GIVEN[name].items()})
    found = glass.check(made(name), candidate=path, inputs=str(given))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (value,) = session.run(None, {key: one.numpy() for key, one in GIVEN[name].items()})
    with torch.no_grad():
        expected = made(name)(**GIVEN[name]).numpy()
    audited(found, expected, value)
    is_wrong = pair.startswith("another")
    assert found.ok != is_wrong, found.not_ok_because


class Pair(nn.Module):
    """Two results of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box, self.score = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.box(x), torch.relu(self.score(x))


@pytest.mark.parametrize("names", [("box", "score"), ("score", "box")])
def test_results_in_another_order_are_named(names: tuple[str, str], tmp_path: Path) -> None:
    net, helper = Pair().eval(), onnx.helper
    tensors = [
        numpy_helper.from_array(tensor.detach().numpy(), name.replace(".", "_"))
        for name, tensor in net.state_dict().items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "box_weight", "box_bias"], ["box"], transB=1),
        helper.make_node("Gemm", ["x", "score_weight", "score_bias"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["score"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, size])
        for name, size in zip(("x", *names), (8, 4, 4), strict=True)
    ]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "pair.onnx")
    result = glass.check(net, candidate=tmp_path / "pair.onnx", inputs={"x": torch.randn(3, 8, generator=DRAW)})
    assert result.ok == (names == ("box", "score")), result.not_ok_because
    if not result.ok:
        assert result.standing == "results differ" and "in another order: result 0 is box, its number 1" in str(
            result.not_ok_because
        )


@pytest.mark.parametrize("apart", [0.0, 1e-8])
def test_results_that_are_alike_are_in_their_order(apart: float, tmp_path: Path) -> None:
    class Alike(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.tanh(x)
            return y * 1.0, y * (1.0 + apart)

    helper = onnx.helper
    nodes = [helper.make_node("Tanh", ["x"], ["y"])]
    nodes += [helper.make_node("Mul", ["y", name], [f"{name}_result"]) for name in ("one", "other")]
    sizes = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 8])
        for name in ("x", "one_result", "other_result")
    ]
    factors = [
        numpy_helper.from_array(np.float32(value), name) for name, value in (("one", 1.0), ("other", 1.0 + apart))
    ]
    graph = helper.make_graph(nodes, "graph", sizes[:1], sizes[1:], factors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "alike.onnx")
    result = glass.check(Alike(), candidate=tmp_path / "alike.onnx", inputs={"x": torch.randn(3, 8, generator=DRAW)})
    assert "another order" not in str(result.not_ok_because), result.not_ok_because


def written(
    path: Path, nodes: list[Any], tensors: dict[str, np.ndarray[Any, Any]], sizes: tuple[list[int], list[int]]
) -> Path:
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, size)
        for name, size in zip(("x", "y"), sizes, strict=True)
    ]
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:], stored)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_graph_that_cannot_run_is_the_candidates_fault(tmp_path: Path) -> None:
    node = onnx.helper.make_node
    weights = {"w": np.random.default_rng(0).standard_normal((5, 3))}
    paths = [
        written(
            tmp_path / f"{name}.onnx",
            [node("Transpose", ["x"], ["t"], perm=perm), node("MatMul", ["t", "w"], ["y"])],
            weights,
            (["a", "b", "c"], ["d", "e", "f"]),  # type: ignore[list-item]
        )
        for name, perm in (("right", [1, 0, 2]), ("wrong", [1, 2, 0]))
    ]
    with pytest.raises(BackendError, match="cannot run") as caught:
        glass.check(paths[0], candidate=paths[1], inputs={"x": torch.randn(2, 4, 5, generator=DRAW)})
    assert "wrong.onnx" in str(caught.value) or "candidate" in str(caught.value)


def test_an_epsilon_and_a_sign_of_a_file_are_named(tmp_path: Path) -> None:
    node = onnx.helper.make_node
    draw = np.random.default_rng(1)
    names = ("Scale", "B", "Mean", "Var")
    weights = {name: draw.random(4) * (0.01 if name == "Var" else 1) for name in names}

    def file(sign: str, eps: float) -> Path:
        nodes = [
            node("BatchNormalization", ["x", *names], ["Norm_1"], epsilon=eps),
            node("ReduceMean", ["Norm_1"], ["ReduceMean_1"], axes=[1], keepdims=1),
            node(sign, ["Norm_1", "ReduceMean_1"], ["y"]),
        ]
        return written(tmp_path / f"{sign}{eps}.onnx", nodes, weights, ([3, 4, 6], [3, 4, 6]))

    right, texts = file("Sub", 1e-5), []
    for wrong in (file("Sub", 1e-3), file("Add", 1e-5)):
        result = glass.check(right, candidate=wrong, inputs={"x": torch.randn(3, 4, 6, generator=DRAW)})
        assert result.first_divergence is not None
        texts.append(result.first_divergence.hints[0].text)
    eps = "eps of batch_norm: 1e-05 in the baseline, 0.001 in the candidate"
    assert texts == [eps, "ReduceMean_1 is added, not subtracted"]
