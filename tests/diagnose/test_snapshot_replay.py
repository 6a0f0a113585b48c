"""Replays on every back-end: the same bits again, and what a planted bug of the compiler breaks cut down to one op."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.diagnose.reproduction.files import run_reproduction
from glassengine.errors import BackendError, UsageError
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.results import Result
from glassengine.testing import models
from tests import children


class Net(nn.Module):
    """Counts its calls, so that its graph writes to an input."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down((self.up(x) * 2).sin().relu()) + self.calls


def taken(directory: Path, backend: str) -> Path:
    """Take a snapshot of one execution; the bits are those of the back-end."""
    torch._dynamo.reset()
    with glass.snapshots.take(directory, contents="inputs outputs") as snapshots, torch.no_grad():
        torch.compile(Net(), backend="glass", options={"backend": backend})(torch.linspace(-2, 2, 24).reshape(3, 8))
    assert snapshots is not None
    (found,) = directory.iterdir()
    return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taken(tmp_path_factory.mktemp("eager") / "snapshots", "eager")


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("onnxruntime", marks=pytest.mark.slow),
        pytest.param("openvino", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_executions_of_an_engine_are_replayed_bit_by_bit(tmp_path: Path, backend: str) -> None:
    # Neither step has the sizes that the program was exported with, and the ids of a decode step are not contiguous.
    if backend == "openvino":
        pytest.importorskip("openvino")
    engine = glass.build(models.llama(num_hidden_layers=1), tmp_path / "engine", backend=backend, max_seq_len=16)
    with glass.snapshots.take(tmp_path / "snapshots", contents="inputs outputs") as snapshots:
        engine.generate(input_ids=[[5, 6, 7], [0, 9, 10], [11, 12, 13]], max_new_tokens=2)
    prefill, decode = snapshots.written
    for path, length in ((prefill, 3), (decode, 1)):
        found = glass.replay(path)
        logits = next(output for output in found.outputs if output.name == "logits")
        assert found.ok and found.error is None and found.notes == ()
        assert logits.same_bits and logits.shape[:2] == (3, length)
        if backend == "inductor" and length == 1:
            assert glass.replay(path, compare=True).ok


@contextlib.contextmanager
def bug(kind: str) -> Iterator[None]:
    with torch._inductor.config.patch("cpp.inject_relu_bug_TESTING_ONLY", kind):
        yield


@pytest.mark.slow
def test_inductor_gives_the_same_bits_again(tmp_path: Path) -> None:
    snapshot = taken(tmp_path / "snapshots", "inductor")
    assert Snapshot.open(snapshot).meta["backend"] == "inductor"
    found = glass.replay(snapshot)
    assert found.ok and found.backend == "inductor"
    bits = {output.name: output.same_bits for output in found.outputs}
    assert {"calls", "output[0]"} <= bits.keys() and all(bits.values())
    # Another back-end is judged, because no two have the same bits.
    judged = glass.replay(snapshot, backend="eager")
    assert judged.ok and judged.comparison is not None and judged.comparison.coverage == 1.0
    assert [level.name for level in judged.comparison.levels] == ["recorded", "engine", "release"]


def test_the_settings_of_this_process_are_left_as_they_were(eager: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    assert glass.replay(eager).ok
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before[1:]


@pytest.mark.slow
def test_an_inductor_bug_is_cut_down_to_one_op(eager: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repro"
    with bug("accuracy"):
        found = glass.replay(eager, backend="inductor", bisect=True, reproduction=folder)
        assert "further from float64 than rounding explains" in run_reproduction(folder)
    bisection = found.bisection
    assert not found.ok and bisection is not None and bisection.failure == "accuracy"
    assert len(bisection.ops) <= 3 and [op.op for op in bisection.ops] == ["aten.relu.default"]
    assert bisection.ops[0].source is not None and "test_snapshot_replay.py:" in bisection.ops[0].source
    assert bisection.part is not None and bisection.part.startswith("inductor, lowerings")
    assert bisection.num_ops >= 6 and bisection.reproduction == str(folder)
    # The setting that plants the bug is one of the compiler: it is written down, and without it the test passes.
    path = folder / "test_repro.py"
    planted = "{'cpp.inject_relu_bug_TESTING_ONLY': 'accuracy'}"
    assert path.read_text().count(planted) == 1
    path.write_text(path.read_text().replace(planted, "{}"))
    assert run_reproduction(folder) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compile_error", "runtime_error"])
def test_an_inductor_bug_that_raises_is_cut_down_to_one_op(eager: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "repro"
    with bug(kind):
        found = glass.replay(eager, backend="inductor", bisect=True, reproduction=folder).bisection
        with pytest.raises(Exception, match=r"C\+\+ compile error|unhandled"):
            run_reproduction(folder)
    assert found is not None and found.failure == kind and [op.op for op in found.ops] == ["aten.relu.default"]
    assert found.part is not None and found.part.startswith("inductor, lowerings")
    path = folder / "test_repro.py"
    path.write_text(path.read_text().replace(f"'{kind}'", "None"))
    assert run_reproduction(folder) == ""
    # The bisector of torch leaves nothing of itself behind.
    from torch._inductor.compiler_bisector import CompilerBisector

    assert not CompilerBisector.bisection_enabled


@pytest.mark.slow
def test_a_backend_that_only_builds_is_judged(eager: Path) -> None:
    found = glass.replay(eager, backend="onnxruntime")
    assert found.ok and found.comparison is not None and found.comparison.coverage > 0.8
    assert {level.verdict for level in found.comparison.levels} <= {"identical", "rounding"}


@pytest.mark.slow
def test_the_bug_is_named_by_compare(eager: Path) -> None:
    with bug("accuracy"):
        found = glass.replay(eager, backend="inductor", compare=True)
    assert not found.ok and found.comparison is not None
    first = found.comparison.first_divergence
    assert first is not None and first.site == "./relu.0" and first.level == "engine" and first.verdict == "wrong"


@pytest.mark.slow
def test_a_compiler_that_kills_its_process_is_cut_down_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An exception that leaves a thread of OpenMP ends the process; two of them work only on tensors of some size.
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.ReLU(), nn.Linear(1024, 16))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    try:
        torch.set_num_threads(2)
        with glass.snapshots.take(tmp_path / "snapshots"), torch.no_grad():
            torch.compile(model, backend="glass", options={"backend": "eager"})(torch.randn(256, 256))
    finally:
        torch.set_num_threads(threads)
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    monkeypatch.setenv("GLASS_CC_FLAGS", "--cpp.inject_relu_bug_TESTING_ONLY=runtime_error")
    found = glass.replay(snapshot, backend="inductor", bisect=True, reproduction=tmp_path / "repro").bisection
    assert found is not None and found.failure == "crash" and "SIGABRT" in found.message
    assert [op.op for op in found.ops] == ["aten.relu.default"]
    command = [sys.executable, str(tmp_path / "repro" / "test_repro.py")]
    done = children.run(command, imports=children.COMPILING)
    assert done.returncode == -signal.SIGABRT


def test_inputs_that_the_graph_writes_to_are_compared(eager: Path) -> None:
    found = glass.replay(eager)
    same = {output.name: output.same_bits for output in found.outputs}
    assert "calls" in same and set(same.values()) == {True}


def test_a_nan_of_a_compiled_optimizer_is_replayed(tmp_path: Path) -> None:
    # Its graph has no results: it writes to parameters and states.
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(lambda: optimizer.step(), backend="glass", options={"backend": "eager"})
    policy = glass.snapshots.take(tmp_path / "snapshots", on="nonfinite")
    with policy, pytest.raises(glass.snapshots.NonFiniteError) as caught:
        for number in range(5):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(number))).sum().backward()
            if number == 3:
                assert model.weight.grad is not None
                model.weight.grad[0, 0] = torch.nan
            step()
    assert caught.value.origin is not None and caught.value.origin.op == "input"
    assert ".grad" in caught.value.origin.node and caught.value.snapshot is not None
    packed = Snapshot.open(caught.value.snapshot).pack(tmp_path / "packed.safetensors")
    for path in (caught.value.snapshot, packed):
        found = glass.replay(path)
        assert found.ok and found.outputs and all(output.same_bits for output in found.outputs)
        assert any(output.nonfinite == "NaN" for output in found.outputs)
        origin = glass.replay(path, first_nonfinite=True).first_nonfinite
        assert origin is not None and origin["node"] == caught.value.origin.node


def test_a_graph_that_raises_has_no_first_nonfinite_op(tmp_path: Path) -> None:
    torch._dynamo.reset()
    take = torch.compile(lambda x, index: x[index], backend="glass", options={"backend": "eager"})
    with glass.snapshots.take(tmp_path, on="error") as snapshots, torch.no_grad(), pytest.raises(IndexError):
        take(torch.ones(3), torch.tensor([7]))
    (path,) = snapshots.written
    found = glass.replay(path)
    assert not found.ok and found.error is not None and found.error.startswith("IndexError: index 7 is out of bounds")
    with pytest.raises(UsageError, match="cannot be run node by node"):
        glass.replay(path, first_nonfinite=True)


def test_complex_results_may_not_be_finite(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with glass.snapshots.take(tmp_path, contents="inputs outputs") as snapshots, torch.no_grad():
        torch.compile(lambda x: torch.fft.fft(x) / 0, backend="glass", options={"backend": "eager"})(torch.randn(4))
    (output,) = glass.replay(snapshots.written[0]).outputs
    assert "NaN" in output.nonfinite and output.same_bits


def test_nothing_is_broken_by_eager(eager: Path, tmp_path: Path) -> None:
    found = glass.replay(eager, bisect=True, reproduction=tmp_path / "repro")
    assert found.ok and found.bisection is not None and found.bisection.failure is None
    assert not (tmp_path / "repro").exists()


def test_a_result_is_json(eager: Path) -> None:
    found: Result = glass.replay(eager)
    told: dict[str, Any] = found.to_dict()
    assert told["ok"] and told["schema_version"] == 1 and told["outputs"][0]["same_bits"]


def test_snapshots_without_values_cannot_be_replayed(tmp_path: Path) -> None:
    with glass.snapshots.take(tmp_path, redact=True), torch.no_grad():
        torch._dynamo.reset()
        torch.compile(Net(), backend="glass", options={"backend": "eager"})(torch.ones(2, 8))
    (found,) = tmp_path.iterdir()
    with pytest.raises(UsageError, match="redacted"):
        glass.replay(found)


def test_a_backend_that_fails_says_so(eager: Path) -> None:
    with bug("compile_error"), pytest.raises(BackendError, match="compiling"):
        glass.replay(eager, backend="inductor", compare=True)
