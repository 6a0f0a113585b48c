"""A quantized ONNX file beside a model of PyTorch: drift where it is right, never ok for a mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.diagnose.check_ladder import Ladder
from glassengine.results import Findings

onnx = pytest.importorskip("onnx")
quantization = pytest.importorskip("onnxruntime.quantization")


class Picture(nn.Module):
    """Convolutions with norms that an exporter folds into them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.one(x)))
        return self.head(torch.relu(self.two(x)).mean((2, 3)))


class Text(nn.Module):
    """Two tables, whose rows are alike in nothing but their name, and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(40, 16), nn.Embedding(2, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.kinds(kinds)
        scores = (self.q(x) @ self.k(x).transpose(1, 2)) * 0.25
        x = self.norm(x + self.o(scores.softmax(-1) @ self.v(x)))
        return x + self.down(nn.functional.gelu(self.up(x)))


def picture() -> nn.Module:
    torch.manual_seed(0)
    model = Picture()
    for _ in range(3):
        model(torch.randn(8, 3, 8, 8) * 2 + 1)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        model.norm.bias.uniform_(-1, 1)
    return model.eval()


def text() -> nn.Module:
    torch.manual_seed(0)
    return Text().eval()


GIVEN: dict[str, dict[str, torch.Tensor]] = {
    "picture": {"x": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 + 1},
    "text": {"ids": torch.arange(12).reshape(2, 6) * 3 % 40, "kinds": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)},
}
MODELS: dict[str, Callable[[], nn.Module]] = {"picture": picture, "text": text}


class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        self.given = iter([{name: value.numpy() for name, value in given.items()}])

    def get_next(self) -> Any:
        return next(self.given, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("quantized")
    found = {}
    for name, make in MODELS.items():
        path = folder / f"{name}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: Any = {"opset_version": 17, "dynamo": False, "input_names": list(GIVEN[name])}
            torch.onnx.export(make(), tuple(GIVEN[name].values()), str(path), **options)
        found[name, "dynamic"] = folder / f"{name}_dynamic.onnx"
        kind = quantization.QuantType.QUInt8 if name == "picture" else quantization.QuantType.QInt8
        quantization.quantize_dynamic(str(path), str(found[name, "dynamic"]), weight_type=kind)
        for form in (quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator):
            found[name, form.name] = folder / f"{name}_{form.name}.onnx"
            quantization.quantize_static(
                str(path),
                str(found[name, form.name]),
                Reader(GIVEN[name]),
                quant_format=form,
                per_channel=form.name == "QDQ",
            )
    return found


def checked(name: str, path: Path, folder: Path, **changed: torch.Tensor) -> glass.Comparison:
    given = folder / "given.npz"
    np.savez(given, **{key: value.numpy() for key, value in (GIVEN[name] | changed).items()})
    return glass.check(MODELS[name](), candidate=path, inputs=str(given))


@pytest.mark.parametrize("form", ["dynamic", "QDQ", "QOperator"])
@pytest.mark.parametrize("name", list(MODELS))
def test_f8_a_right_quantization_is_drift(
    name: str, form: str, files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    result = checked(name, files[name, form], tmp_path)
    assert result.ok, result.not_ok_because
    assert result.drift and result.results[0].judged_by == "signal" and result.coverage >= 0.9
    if name == "text":
        # Both tables have rows of the same length; each is paired with its own.
        pairs = {pair.site: pair.candidate_site for pair in result.pairs}
        tables = {site: own for site, own in pairs.items() if site in ("words.weight:param", "kinds.weight:param")}
        assert len(tables) == 2 and all(site == own for site, own in tables.items())


def test_results_that_differ_without_the_grids_are_never_ok_behind_what_rounding_costs(
    files: dict[tuple[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Ladder._of_file

    def planted(ladder: Ladder, path: Path) -> Findings:
        found = judge(ladder, path)
        found.results = [replace(one, verdict="wrong", reason="planted") for one in found.results]
        return found

    monkeypatch.setattr(Ladder, "_of_file", planted)
    result = checked("picture", files["picture", "QDQ"], tmp_path)
    assert (result.ok, result.too_little, result.standing) == (False, False, "results differ")
    assert "without its grids" in (result.not_ok_because or "")


def scaled(part: str, factor: float) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        tensor = next(t for t in model.graph.initializer if part in t.name and t.name.endswith("_scale"))
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array((values * factor).astype(values.dtype), tensor.name))

    return edit


def another_op(old: str, new: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        next(node for node in model.graph.node if node.op_type == old).op_type = new

    return edit


MISTAKES = {
    "weight scale": ("text", "dynamic", scaled("words.weight", 1.05)),
    "weight scale, static": ("picture", "QDQ", scaled("two.weight", 1.05)),
    "scale of a product": ("picture", "QOperator", scaled("head.weight", 1.1)),
    "activation": ("text", "dynamic", another_op("Erf", "Tanh")),
    "activation, static": ("picture", "QDQ", another_op("ReduceMean", "ReduceMax")),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_f8_a_wrong_quantization_is_never_ok(mistake: str, files: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    name, form, edit = MISTAKES[mistake]
    model = onnx.load(files[name, form])
    edit(model)
    onnx.save(model, tmp_path / "edited.onnx")
    result = checked(name, tmp_path / "edited.onnx", tmp_path)
    assert not result.ok and result.first_divergence is not None


class Packed(nn.Module):
    """Queries, keys and values in one weight, which an exporter takes apart or keeps whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(40, 32)
        self.one, self.two = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(32, 32)
        self.head = nn.Linear(32, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.kind == "attention":
            x = x + self.one(x, x, x, need_weights=False)[0]
            return self.head(x + self.two(x, x, x)[0])
        if self.kind == "cross":
            return self.head(x + self.one(x, x.flip(1), x.flip(1), need_weights=False)[0])
        rows = [nn.functional.linear(x, self.wide.weight[at : at + 32], self.wide.bias[at : at + 32]) for at in (0, 32)]
        return self.head(x + rows[0].sigmoid() * rows[1])


def packed(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Packed(kind).eval()


IDS = {"ids": torch.arange(24).reshape(2, 12) * 3 % 40}


@pytest.fixture(scope="module")
def packed_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in ("attention", "cross", "slices"):
        path = tmp_path_factory.mktemp("packed") / f"{kind}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                packed(kind), (IDS["ids"],), str(path), opset_version=17, dynamo=False, input_names=["ids"]
            )
        found[kind] = path.with_name("int8.onnx")
        of_weights = quantization.QuantType.QUInt8 if kind == "cross" else quantization.QuantType.QInt8
        quantization.quantize_dynamic(str(path), str(found[kind]), weight_type=of_weights)
    return found


def signal(path: Path, module: nn.Module) -> float:
    """Return the dB of a file in a session as users make it, beside the model of floats."""
    runtime = pytest.importorskip("onnxruntime")
    (found,) = runtime.InferenceSession(str(path)).run(None, {"ids": IDS["ids"].numpy()})
    with torch.no_grad():
        expected = module(IDS["ids"]).double().numpy()
    return float(10 * np.log10((expected**2).sum() / ((found - expected) ** 2).sum()))


@pytest.mark.parametrize("kind", ["attention", "cross", "slices"])
def test_f60_parts_of_a_packed_weight_are_rounded_weights(
    kind: str, packed_files: dict[str, Path], tmp_path: Path
) -> None:
    np.savez(tmp_path / "given.npz", ids=IDS["ids"].numpy())
    result = glass.check(packed(kind), candidate=packed_files[kind], inputs=str(tmp_path / "given.npz"))
    assert result.ok, (result.not_ok_because, result.origins)
    assert result.results[0].snr_db == pytest.approx(signal(packed_files[kind], packed(kind)), abs=0.1)


@pytest.mark.parametrize("kind", ["attention", "slices"])
def test_f60_results_are_those_of_the_file_where_its_graph_is_wrong(
    kind: str, packed_files: dict[str, Path], tmp_path: Path
) -> None:
    model = onnx.load(str(packed_files[kind]))
    wrong = next(node for node in model.graph.node if node.op_type in ("Softmax", "Sigmoid"))
    wrong.op_type = "Tanh"
    del wrong.attribute[:]
    onnx.save(model, str(tmp_path / "wrong.onnx"))
    np.savez(tmp_path / "given.npz", ids=IDS["ids"].numpy())
    result = glass.check(packed(kind), candidate=tmp_path / "wrong.onnx", inputs=str(tmp_path / "given.npz"))
    assert not result.ok and result.first_divergence is not None
    assert [one.snr_db for one in result.results] == [
        pytest.approx(signal(tmp_path / "wrong.onnx", packed(kind)), abs=0.1)
    ]
    assert "with the baseline's weights where they were rounded" in result.notes[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_f8_activations_of_16_bits_are_drift(name: str, tmp_path: Path) -> None:
    path = tmp_path / "floats.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: Any = {"opset_version": 17, "dynamo": False, "input_names": list(GIVEN[name])}
        torch.onnx.export(MODELS[name](), tuple(GIVEN[name].values()), str(path), **options)
    quantization.quantize_static(
        str(path),
        str(tmp_path / "int16.onnx"),
        Reader(GIVEN[name]),
        activation_type=quantization.QuantType.QUInt16,
        extra_options={"UseQDQContribOps": True},
    )
    result = checked(name, tmp_path / "int16.onnx", tmp_path)
    assert result.ok, result.not_ok_because
