"""The printed results are computed a second time, by plain PyTorch, and have to be the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.results import ResultComparison
from tests.diagnose.end_to_end.outside import Decoder, Image, Net, Words, changed, ids, pixels, tokens, x

BASES: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "net": (Net, x),
    "words": (Words, ids),
    "image": (Image, pixels),
    "decoder": (Decoder, tokens),
}


def rounded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights in a coarser dtype, computed in float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return module


def noisy(module: nn.Module, size: float) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = parameter.data * (1 + size * torch.randn(parameter.shape, generator=generator))
    return module


def in_eight_bits(module: nn.Module) -> nn.Module:
    """Each row of a matrix on a grid of its own."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            step = parameter.data.abs().flatten(1).amax(1) / 127
            step = step.reshape(-1, *[1] * (parameter.dim() - 1))
            parameter.data = (parameter.data / step).round() * step
    return module


def scaled(module: nn.Module) -> nn.Module:
    last = list(module.parameters())[-1]
    last.data = last.data * 1.5
    return module


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the same": lambda module: module,
    "weights in bfloat16": lambda module: rounded(module, torch.bfloat16),
    "weights in half": lambda module: rounded(module, torch.float16),
    "weights in float8": lambda module: rounded(module, torch.float8_e4m3fn),
    "weights in eight bits": in_eight_bits,
    "noise 1e-5": lambda module: noisy(module, 1e-5),
    "noise 1e-2": lambda module: noisy(module, 1e-2),
    "noise 1": lambda module: noisy(module, 1.0),
    "last scaled": scaled,
    "in bfloat16": lambda module: module.to(torch.bfloat16),
    "in double": lambda module: module.double(),
    "training": lambda module: module.train(),
}

QUICK = {("net", "weights in bfloat16"), ("words", "noise 1e-2"), ("image", "in bfloat16"), ("decoder", "last scaled")}


def leaves(value: Any) -> dict[str, Tensor]:
    """Results by the names that an answer has for them."""
    if isinstance(value, Tensor):
        return {"output": value}
    if isinstance(value, Mapping):
        return dict(value)
    return {str(i): item for i, item in enumerate(value)}


def run(module: nn.Module, given: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    dtype = next(module.parameters()).dtype
    found = []
    with torch.no_grad():
        for step in given:
            own = {k: (v.to(dtype) if v.is_floating_point() else v).clone() for k, v in step.items()}
            found.append({k: v.clone() for k, v in leaves(module(**own)).items()})
    return found


def decibels(ours: Tensor, theirs: Tensor) -> float:
    b, c = ours.double(), theirs.double()
    noise, signal = float((b - c).square().sum()), float(b.square().sum())
    return 10 * math.log10(signal / noise) if noise else math.inf


def audited(found: ResultComparison, ours: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]]) -> None:
    """Compare what an answer says of one result with what both sides returned."""
    name = found.name
    pairs = [(a[name], b[found.candidate_name]) for a, b in zip(ours, theirs, strict=True)]
    least = min(decibels(*pair) for pair in pairs)
    assert found.snr_db is not None
    assert found.snr_db == least or abs(found.snr_db - least) < 0.1
    b, c = (value.double() for value in pairs[found.step])
    assert found.max_abs_diff == pytest.approx(float((b - c).abs().max()), rel=1e-6)
    assert found.largest == pytest.approx(float(b.abs().max()), rel=1e-6)
    if name == "logits":
        rows = [(a.double().flatten(0, -2), b.double().flatten(0, -2)) for a, b in pairs]
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in rows)
        logs = [(a.log_softmax(-1), b.log_softmax(-1)) for a, b in rows]
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in logs])
        assert (found.num_tokens, found.same_tokens) == (sum(len(a) for a, _ in rows), same)
        assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-12)
        assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-3, abs=1e-12)


def pairs() -> Iterator[Any]:
    for base in BASES:
        for change in CHANGES:
            marks = () if (base, change) in QUICK else (pytest.mark.slow,)
            yield pytest.param(base, change, marks=marks, id=f"{base}-{change}")


@pytest.mark.parametrize(("base", "change"), list(pairs()))
def test_results_of_a_port_are_what_plain_pytorch_gives(base: str, change: str) -> None:
    made, inputs = BASES[base]
    given = inputs() if isinstance(inputs(), list) else [inputs()]
    ours, theirs = made().eval(), CHANGES[change](made().eval())
    if change == "in bfloat16" or change == "in double":
        # The inputs are the baseline's; a port in another dtype casts them itself.
        forward = type(theirs).forward
        dtype = next(theirs.parameters()).dtype

        def cast(self: Any, **named: Tensor) -> Any:
            return forward(self, **{k: v.to(dtype) if v.is_floating_point() else v for k, v in named.items()})

        theirs.forward = cast.__get__(theirs)  # type: ignore[method-assign]
    torch.manual_seed(0)
    result = check(ours, candidate=theirs, inputs=given)
    if change == "training":
        is_random = base in ("net",)
        assert result.ok == (base in ("words", "decoder"))
        if is_random:
            return  # the next draw is another
        theirs.train()
    last = [found for found in result.results if found.level == result.results[-1].level]
    plain, other = run(made().eval(), given), run(theirs, given)
    names = set(plain[0])
    if base == "words":  # nothing defines the rows of padding
        real = ids()["mask"] > 0
        plain, other = ([{k: v[real] for k, v in step.items()} for step in side] for side in (plain, other))
    assert {found.name for found in last} == names
    for found in last:
        assert found.left_out == pytest.approx(3 / 18 if base == "words" else 0)
        audited(found, plain, other)
        if found.agrees and found.is_decided:
            assert found.snr_db is not None
            assert found.snr_db > 20
        if result.ok:
            assert found.agrees


def test_results_of_a_dump_are_what_plain_pytorch_gives(tmp_path: Path) -> None:
    net, given = Net().eval(), x()
    with torch.no_grad():
        right = net(given["x"])["y"]
    for size in (0.0, 1e-7, 1e-2, 1.0):
        theirs = right * (1 + size * torch.randn(right.shape, generator=torch.Generator().manual_seed(2)))
        np.savez(tmp_path / f"dump{size}.npz", x=given["x"].numpy(), y=theirs.numpy())
        result = check(net, candidate=tmp_path / f"dump{size}.npz", min_coverage=0.0)
        assert result.results, result.not_ok_because
        audited(result.results[-1], [{"y": right}], [{"y": theirs}])
        assert result.ok == (size < 1e-3)


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def test_results_of_an_engine_are_what_its_engine_gives(backend: str, tmp_path: Path) -> None:
    import glassengine as glass

    for base in ("net", "image"):
        made, inputs = BASES[base]
        other = noisy(made().eval(), 1e-3)
        engine = glass.build(other, tmp_path / base, backend=backend, inputs=inputs())
        given = inputs()
        returned = engine(**given)
        result = check(made().eval(), candidate=tmp_path / base, inputs=given)
        with torch.no_grad():
            plain = leaves(made().eval()(**given))
        last = [found for found in result.results if found.level == "release"]
        assert last
        for found in last:
            audited(found, [plain], [returned])


def test_a_changed_dtype_is_in_the_answer() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return {"y": Net.forward(self, x)["y"].half()}

    result = check(Net().eval(), candidate=changed(Net, forward), inputs=x())
    assert result.results[-1].candidate_dtype == "float16"
