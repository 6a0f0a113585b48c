"""Functions of every kind are judged: custom operators, compiled functions, modules, arrays, quantized results."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import cpp_extension

import glassengine as glass
from tests.kernels.corpus.right import drawn


@torch.library.custom_op("glasstests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor + 0.0


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("glasstests::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> None:
    total.copy_(total + x)


def test_custom_operators() -> None:
    x = drawn(8, 8)
    assert glass.matches(torch.ops.glasstests.scaled, lambda x, f: x * f, (x, 0.3)).ok
    assert not glass.matches(torch.ops.glasstests.scaled, lambda x, f: x * f * f, (x, 0.3)).ok

    def into(total: Tensor, x: Tensor) -> None:
        total += x

    assert glass.matches(torch.ops.glasstests.accumulate, into, (drawn(8, 8, seed=1), x)).ok
    assert not glass.matches(torch.ops.glasstests.accumulate, lambda total, x: None, (drawn(8, 8, seed=1), x)).ok


@torch.library.custom_op("glasstests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x * 0.5


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _halved_backward(ctx: object, given: Tensor) -> Tensor:
    return given * 0.25  # wrong: `opcheck` looks at how an operator is registered, not at its values


halved.register_autograd(_halved_backward)


def test_custom_operators_beside_opcheck() -> None:
    x = drawn(8, 8).requires_grad_()
    torch.library.opcheck(halved, (x,))
    glass.assert_matches(halved, lambda x: x / 2, (x,))
    with pytest.raises(AssertionError, match=r"multiplied by 0\.5"):
        glass.testing.assert_gradients_match(halved, lambda x: x / 2, (x,))


def test_compiled_functions_and_modules() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(x).softmax(-1)

    assert glass.matches(torch.compile(f, backend="aot_eager"), f, drawn(8, 9)).ok
    one, other = nn.Linear(9, 4), nn.Linear(9, 4)
    other.load_state_dict(one.state_dict())
    assert glass.matches(one, other, drawn(8, 9)).ok
    with torch.no_grad():
        other.bias[0] += 1
    found = glass.matches(one, other, drawn(8, 9))
    assert not found.ok and found.worst is not None and found.worst.where == "the first of 4 columns"


_EXTENSION = """
torch::Tensor silu(torch::Tensor x, bool keeps_strides) {
  auto given = x.contiguous();
  auto out = keeps_strides ? torch::empty_like(x) : torch::empty(x.sizes(), x.options());
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = given.data_ptr<float>()[i] / (1.f + std::exp(-given.data_ptr<float>()[i]));
  return out;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None or shutil.which("ninja") is None, reason="no compiler, or no ninja")
def test_extensions_in_cpp(tmp_path: Path) -> None:
    made = cpp_extension.load_inline(
        "glass_silu", _EXTENSION, functions=["silu"], build_directory=str(tmp_path), extra_cflags=["-O0"]
    )
    glass.testing.assert_sweep(lambda x: made.silu(x, False), F.silu, "B S")
    found = glass.testing.sweep(lambda x: made.silu(x, True), F.silu, "B S")
    assert found.when == "transposed in memory" and found.mistakes[0].kind == "layout"


def test_arrays_in_and_out() -> None:
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)

    def writes(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        x *= 2
        return x

    assert not glass.matches(writes, lambda x: x * 2, (x,)).ok
    assert float(x[0, 0]) == -2
    assert glass.matches(lambda x: x * 2, lambda x: x * 2, (x,)).ok
    assert glass.matches((x * 2)[:, ::-1], lambda x: (x * 2).flip(-1), (x,)).ok
    assert glass.matches((x * 2).astype(">f4"), lambda x: x * 2, (x,)).ok
    assert not glass.matches(lambda x: x[::-1], lambda x: x, (x,)).ok
    read_only = x * 2
    read_only.flags.writeable = False
    assert glass.matches(read_only, lambda x: x * 2, (x,)).ok


def quantize(x: Tensor) -> Tensor:
    return torch.clamp(torch.round(x * (127 / 3.1)), -128, 127).to(torch.int8)


def test_quantized_results_by_their_grid() -> None:
    x = drawn(40, 50)
    x[0, 0] = 0.5 * 3.1 / 127  # rounding decides between two steps
    assert glass.matches(lambda x: torch.clamp((x / 3.1 * 127).round(), -128, 127).to(torch.int8), quantize, (x,)).ok
    assert not glass.matches(lambda x: (x * (127 / 3.1)).floor().clamp(-128, 127).to(torch.int8), quantize, (x,)).ok
    assert not glass.matches(lambda x: quantize(x * 1.01), quantize, (x,)).ok


def test_triton_kernels_by_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(source, target, number, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(source + at, mask=at < number, other=0.0)
        tl.store(target + at, tl.exp(x), mask=at < number)

    def exp(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), 64)
        return out

    assert glass.matches(exp, torch.exp, (drawn(10, 13),)).ok
