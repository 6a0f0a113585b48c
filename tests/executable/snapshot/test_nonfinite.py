"""NaN and Inf: found exactly, told from masks, blamed on the op that made them, with one snapshot; then stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softmax

import glassengine as glass
from glassengine.errors import BackendError
from glassengine.executable.run.executable import Executable
from glassengine.executable.snapshot.nonfinite import FINITE, Kinds, kinds_of, probe

MakeExecutable = Callable[..., Executable]
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
CAUSAL = torch.full((3, 3), -math.inf).triu(1)
WRONG = ("nonfinite", "error")


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def stopped(executable: Executable, *arguments: Any, directory: Path, **options: Any) -> glass.snapshots.NonFiniteError:
    """Run once, armed, and return the error."""
    with (
        glass.snapshots.take(directory, on=WRONG, **options) as snapshots,
        pytest.raises(glass.snapshots.NonFiniteError) as caught,
    ):
        executable.run(list(arguments))
    assert [caught.value.snapshot] == list(snapshots.written)
    return caught.value


def passed(executable: Executable, *arguments: Any, directory: Path) -> None:
    with glass.snapshots.take(directory, on=WRONG) as snapshots:
        for _ in range(2):
            executable.run(list(arguments))
    assert snapshots.written == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (math.nan, Kinds(nan=True)),
        (math.inf, Kinds(positive=True)),
        (-math.inf, Kinds(negative=True)),
        (7.0, FINITE),
    ],
)
def test_every_kind_is_found_in_every_dtype(dtype: torch.dtype, value: float, kinds: Kinds) -> None:
    tensor = torch.ones(100, 7).to(dtype)
    tensor[50, 3] = value
    assert kinds_of(tensor) == kinds
    assert [name for name, _ in probe([("one", torch.ones(2)), ("x", tensor)])] == (["x"] if any(kinds) else [])


def test_several_kinds_are_told_apart() -> None:
    assert kinds_of(torch.tensor([math.nan, math.inf])) == Kinds(nan=True, positive=True)
    assert kinds_of(torch.tensor([math.inf, -math.inf])) == Kinds(positive=True, negative=True)
    assert kinds_of(torch.tensor([1.0, complex(0, math.nan)])) == Kinds(nan=True)
    assert str(Kinds(True, False, True)) == "NaN and -inf"


def test_a_sum_that_overflows_is_no_finding(tmp_path: Path, make_executable: MakeExecutable) -> None:
    large = torch.full((4,), 3e38)
    assert probe([("x", large)]) and kinds_of(large) == FINITE
    passed(make_executable(lambda x: (x * 1,), x=large), large, directory=tmp_path)


def test_tensors_without_values_are_skipped() -> None:
    values = [3, None, torch.ones(2, dtype=torch.int64), torch.empty(0), torch.ones(2, device="meta"), "x"]
    assert probe([(str(index), value) for index, value in enumerate(values)]) == []


def test_the_op_that_made_it_is_named(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.log(x - 3)  # the fault
        return (y.exp() + 1, x.sum())

    error = stopped(make_executable(function, x=X), X, directory=tmp_path)
    assert error.origin is not None
    assert (error.origin.op, error.origin.kinds) == ("aten.log.default", "NaN and -inf")
    assert (error.origin.num_elements, error.origin.total_elements) == (3, 6)
    assert "execution 0 of 'tiny/main'" in str(error) and "NaN in output[0]" in str(error)
    assert f"glass replay {error.snapshot} --first-nonfinite" in str(error)
    snapshot = glass.snapshots.Snapshot.open(error.snapshot or "")
    assert (snapshot.reason, snapshot.origin) == ("nonfinite", error.origin)
    # Both sides of the execution are there.
    assert torch.equal(snapshot.input("x"), X)
    assert bool(snapshot.output("output[0]").isnan().any())


def test_a_detour_that_reached_no_output_is_not_blamed(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        detour = torch.where(x > 100, 1 / (x - x), x)  # infinite, and not taken
        return (torch.sqrt(detour - 2),)

    error = stopped(make_executable(function, x=X), X, directory=tmp_path)
    assert error.origin is not None and error.origin.op == "aten.sqrt.default"


def test_an_overflow_is_blamed_and_not_the_nan_after_it(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        high = torch.exp(x * 100)
        return (high - high,)

    error = stopped(make_executable(function, x=X), X, directory=tmp_path)
    assert error.origin is not None and (error.origin.op, error.origin.kinds) == ("aten.exp.default", "inf")


def test_nan_in_an_input_is_blamed_on_the_input(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x, w: (x * w,), {"w": "parameter"}, x=X, w=X)
    error = stopped(executable, X, X / 0, directory=tmp_path)
    assert error.origin is not None and (error.origin.op, error.origin.node) == ("input", "w")
    assert "input 'w' already holds inf" in str(error)


def masked(scores: Tensor) -> tuple[Tensor, ...]:
    mask = torch.full((3, 3), -math.inf).triu(1)
    return (softmax(scores + mask, -1), mask, (scores + mask).masked_fill(scores > 2, -math.inf))


def test_a_mask_is_legal(tmp_path: Path, make_executable: MakeExecutable) -> None:
    scores = torch.ones(3, 3)
    passed(make_executable(masked, scores=scores), scores, directory=tmp_path)


def test_a_mask_that_comes_in_is_legal(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x, m: (x + m, m * 2), x=torch.ones(3, 3), m=CAUSAL)
    passed(executable, torch.ones(3, 3), CAUSAL, directory=tmp_path)


@pytest.mark.parametrize("kind", ["parameter", "tangent"])
def test_minus_infinity_in_a_weight_or_gradient_is_no_mask(
    tmp_path: Path, make_executable: MakeExecutable, kind: str
) -> None:
    executable = make_executable(lambda w: (w + 1,), {"w": kind}, w=CAUSAL)
    error = stopped(executable, CAUSAL, directory=tmp_path)
    assert error.origin is not None and error.origin.op == "input"


def test_nan_is_never_legal(tmp_path: Path, make_executable: MakeExecutable) -> None:
    # A row that is masked from end to end: the classic.
    executable = make_executable(lambda x, m: (softmax(x + m, -1), m * 1), x=torch.ones(3, 3), m=CAUSAL)
    with glass.snapshots.take(tmp_path, on="nonfinite"):
        executable.run([torch.ones(3, 3), CAUSAL])
        with pytest.raises(glass.snapshots.NonFiniteError) as caught:
            executable.run([torch.ones(3, 3), torch.full((3, 3), -math.inf)])
    assert caught.value.origin is not None and caught.value.origin.op == "aten._softmax.default"


def test_minus_infinity_of_a_logarithm_is_no_mask(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x, m: (torch.log(x), m * 1), x=torch.ones(3, 3), m=CAUSAL)
    error = stopped(executable, torch.zeros(3, 3), CAUSAL, directory=tmp_path)
    assert error.origin is not None and error.origin.op == "aten.log.default"
    assert "-inf in output[0]" in str(error) and "output[1]" in str(error)


def test_memory_that_nothing_wrote_is_not_blamed(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        room = torch.empty_like(x)
        return (torch.sqrt(-x), torch.where(x > 0, x, room))

    executable = make_executable(function, x=X)
    error = stopped(executable, X, directory=tmp_path)
    assert error.origin is not None and error.origin.op == "aten.sqrt.default"


def test_nan_of_the_compiled_code_alone_is_named_as_its_own(tmp_path: Path, make_executable: MakeExecutable) -> None:
    # Planted: a compiler that gets it wrong.
    executable = make_executable(lambda x: (x + 1,), function=lambda arguments: [arguments[0] * math.nan], x=X)
    error = stopped(executable, X, directory=tmp_path)
    assert error.origin is None
    assert "the same graph gives finite values: the compiled code made them\n" in str(error)


def test_compiled_code_may_have_drawn_other_random_numbers(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(
        lambda x: (torch.dropout(x, 0.5, True),), function=lambda arguments: [arguments[0] * math.nan], x=X
    )
    error = stopped(executable, X, directory=tmp_path)
    assert error.origin is None and "or it drew other random numbers" in str(error)


def test_memory_that_nothing_wrote_is_called_that(tmp_path: Path, make_executable: MakeExecutable) -> None:
    # Planted: memory that happens to hold NaN, on both sides.
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert fill
        executable = make_executable(lambda x: (torch.empty_like(x) + 1,), x=X)
        error = stopped(executable, X, directory=tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert error.origin is None and "memory that the graph never writes to" in str(error)


def test_an_input_that_the_graph_writes_to_is_looked_at(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        total.copy_(torch.sqrt(x - 2))
        return (x * 2,)

    executable = make_executable(function, x=X, total=X.clone())
    error = stopped(executable, X, X.clone(), directory=tmp_path)
    assert error.origin is not None and error.origin.op == "aten.sqrt.default"
    assert "NaN in total" in str(error)
    assert torch.equal(glass.snapshots.Snapshot.open(error.snapshot or "").input("total"), X)


@pytest.mark.parametrize("keep_inputs", ["reference", "device", "host"])
def test_inputs_outlast_a_run_that_overwrites_them(
    tmp_path: Path, make_executable: MakeExecutable, keep_inputs: str
) -> None:
    def function(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        total.add_(x)
        return (torch.sqrt(total),)

    executable = make_executable(function, x=X, total=X.clone())
    base = torch.zeros(2, 3)
    with glass.snapshots.take(tmp_path, on="nonfinite", keep_inputs=keep_inputs) as snapshots:
        for _ in range(3):
            executable.run([X, base])
        expected = base.clone()
        with pytest.raises(glass.snapshots.NonFiniteError):
            executable.run([-10 * X, base])
    (path,) = snapshots.written
    assert torch.equal(glass.snapshots.Snapshot.open(path).input("total"), expected)
    assert torch.equal(glass.snapshots.Snapshot.open(path).input("x"), -10 * X)


@pytest.mark.parametrize(("keep_inputs", "samples"), [("reference", 0), ("device", 0), ("host", 3)])
def test_values_copied_to_the_host_are_measured(
    tmp_path: Path, make_executable: MakeExecutable, keep_inputs: Any, samples: int
) -> None:
    executable = make_executable(lambda x, y: (x + y,), x=X, y=X)
    glass.metrics.reset()
    with glass.snapshots.take(tmp_path, on="nonfinite", keep_inputs=keep_inputs):
        for _ in range(3):
            executable.run([X, X])
    found = {metric.name: metric for metric in glass.metrics.current().metrics}
    assert ("TransferFromDeviceTime" in found) == ("InboundData" in found) == (samples > 0)
    if samples:
        assert found["TransferFromDeviceTime"].total_samples == samples
        assert found["InboundData"].accumulator == samples * 2 * X.nbytes


def test_a_view_of_what_is_overwritten_is_kept_as_well(tmp_path: Path, make_executable: MakeExecutable) -> None:
    def function(row: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        total.add_(1)
        return (torch.sqrt(total) + row,)

    executable = make_executable(function, row=X[0], total=X)
    total = -3 * X
    with glass.snapshots.take(tmp_path, on="nonfinite") as snapshots, pytest.raises(glass.snapshots.NonFiniteError):
        executable.run([total[0], total])
    assert torch.equal(glass.snapshots.Snapshot.open(snapshots.written[0]).input("row"), -3 * X[0])


def test_one_snapshot_and_an_error_each_time(tmp_path: Path, make_executable: MakeExecutable) -> None:
    executable = make_executable(lambda x: (torch.sqrt(x),), x=X)
    with glass.snapshots.take(tmp_path / "a b", on=WRONG) as snapshots:
        for execution in range(3):
            with pytest.raises(glass.snapshots.NonFiniteError, match=f"execution {execution} of") as caught:
                executable.run([-X])
            assert caught.value.snapshot == snapshots.written[0]
            assert f"glass replay '{snapshots.written[0]}' --first-nonfinite" in str(caught.value)
    assert len(snapshots.written) == 1


def test_with_every_execution_taken_the_one_that_goes_wrong_is_taken_once(
    tmp_path: Path, make_executable: MakeExecutable
) -> None:
    executable = make_executable(lambda x: (torch.sqrt(x),), x=X)
    with glass.snapshots.take(tmp_path, on=("every", *WRONG)) as snapshots:
        executable.run([X])
        with pytest.raises(glass.snapshots.NonFiniteError) as caught:
            executable.run([-X])
    assert len(snapshots.written) == 2 and caught.value.snapshot == snapshots.written[1]
    first, second = map(glass.snapshots.Snapshot.open, snapshots.written)
    assert (first.reason, first.outputs) == ("every", None)
    assert second.reason == "nonfinite" and second.origin == caught.value.origin
    assert bool(second.output("output[0]").isnan().all())


def test_an_error_leaves_a_snapshot_and_stays_what_it_is(
    tmp_path: Path, make_executable: MakeExecutable, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(arguments: list[Any]) -> Any:
        arguments.clear()
        raise RuntimeError("segment of the third kind")

    executable = make_executable(lambda x: (x,), function=fail, x=X)
    with (
        glass.snapshots.take(tmp_path, on="error") as snapshots,
        pytest.raises(RuntimeError, match="third kind") as caught,
    ):
        executable.run([X])
    (path,) = snapshots.written
    assert f"snapshot: {path}" in caught.value.__notes__ and str(path) in caplog.text
    snapshot = glass.snapshots.Snapshot.open(path)
    assert torch.equal(snapshot.input("x"), X)
    assert snapshot.reason == "error" and "segment of the third kind" in snapshot.meta["error"]


def test_an_interruption_is_no_error(make_executable: MakeExecutable, tmp_path: Path) -> None:
    def interrupted(_: list[Any]) -> Any:
        raise KeyboardInterrupt

    executable = make_executable(lambda x: (x * 2,), function=interrupted, x=X)
    with glass.snapshots.take(tmp_path, on=WRONG) as snapshots, pytest.raises(KeyboardInterrupt):
        executable.run([X])
    assert snapshots.written == () and list(tmp_path.iterdir()) == []


def test_an_error_of_an_engine_leaves_a_snapshot(tmp_path: Path) -> None:
    def fail(inputs: Any) -> Any:
        raise RuntimeError("third kind")

    executable = Executable("tiny/main", fail)
    with glass.snapshots.take(tmp_path, on="error") as snapshots, pytest.raises(BackendError):
        executable.run({"x": X})
    assert torch.equal(glass.snapshots.Snapshot.open(snapshots.written[0]).input("x"), X)


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_nan(
    tmp_path: Path, make_executable: MakeExecutable
) -> None:
    (tmp_path / "file").write_text("in the way")
    executable = make_executable(lambda x: (torch.sqrt(x),), x=X)
    with (
        glass.snapshots.take(tmp_path / "file", on="nonfinite") as snapshots,
        pytest.raises(glass.snapshots.NonFiniteError) as caught,
    ):
        executable.run([-X])
    assert caught.value.snapshot is None and caught.value.origin is not None
    assert "no snapshot could be written" in str(caught.value) and snapshots.left_out.total() == 1


def test_without_a_graph_the_output_is_named_and_masks_are_known_by_their_inputs(tmp_path: Path) -> None:
    executable = Executable("plain", lambda arguments: [arguments[0] + arguments[1]], ("x", "m"), ("y",))
    passed(executable, torch.ones(3, 3), CAUSAL, directory=tmp_path)
    error = stopped(executable, torch.ones(3, 3), -CAUSAL, directory=tmp_path)
    assert error.origin is None and "inf in y" in str(error)


@pytest.fixture(scope="module")
def training() -> Callable[[str, int | None], list[float]]:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.block = Block()
            self.drop = torch.nn.Dropout(0.25)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.drop(self.linear(x)).square() + 1e-3 - x.square()).sum()

    def train(backend: str, fault: int | None, steps: int = 10) -> list[float]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Model()
        step = torch.compile(model, backend="glass", options={"backend": backend})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number in range(steps):
            x = torch.zeros(3, 4)
            if number == fault:
                x[1, 2] = 5.0
            loss = step(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_nan_in_step_7_of_training_leaves_one_snapshot_and_the_right_op(
    tmp_path: Path, training: Callable[[str, int | None], list[float]], backend: str
) -> None:
    plain = training(backend, None)
    with glass.snapshots.take(tmp_path, on=WRONG) as snapshots:
        # Armed, nothing else changes: the same losses, to the bit.
        assert training(backend, None) == plain
        with pytest.raises(glass.snapshots.NonFiniteError) as caught:
            training(backend, 7)
    (path,) = snapshots.written
    snapshot = glass.snapshots.Snapshot.open(path)
    assert (snapshot.kind, snapshot.execution) == ("forward", 7)
    origin = caught.value.origin
    assert origin is not None and origin == snapshot.origin
    assert (origin.op, origin.module) == ("aten.log.default", "block")
    assert "test_nonfinite.py" in (origin.source or "") and "return torch.log(x)" in (origin.source or "")
    if backend == "eager":
        with torch.random.fork_rng(), torch.no_grad():
            torch.set_rng_state(snapshot.rng_states["cpu"])
            results = snapshot.graph.graph_module(*snapshot.arguments())
        for name, value in zip(snapshot.output_names, results, strict=True):
            assert torch.equal(bits(value), bits(snapshot.output(name))), name


def test_a_nan_of_the_backward_graph_is_found_there(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt((self.linear(x) * 0).square().sum())  # the gradient of a root at 0 times 0

    torch.compiler.reset()
    model = Model()
    step = torch.compile(model, backend="glass", options={"backend": "eager"})
    with glass.snapshots.take(tmp_path, on=WRONG) as snapshots, pytest.raises(glass.snapshots.NonFiniteError) as caught:
        step(torch.ones(2, 4)).backward()
    snapshot = glass.snapshots.Snapshot.open(snapshots.written[0])
    assert snapshot.kind == "backward"
    assert caught.value.origin is not None
    assert "test_nonfinite.py" in (caught.value.origin.source or "")


def test_op_by_op_the_op_itself_is_stopped_and_its_snapshot_runs_again(tmp_path: Path) -> None:
    torch.compiler.reset()
    options = {"backend": "eager", "mode": "eager_debug"}
    step = torch.compile(lambda x: torch.log(x * 2 - 3).exp(), backend="glass", options=options)
    with (
        glass.snapshots.take(tmp_path, on=("every", "nonfinite"), contents="inputs outputs") as snapshots,
        pytest.raises(glass.snapshots.NonFiniteError, match=r"execution 0 of 'aten\.log\.default'") as caught,
    ):
        step(torch.ones(3))
    assert "torch.log(x * 2 - 3)" in str(caught.value)
    found = [glass.snapshots.Snapshot.open(path) for path in snapshots.written]
    assert [snapshot.name for snapshot in found[:2]] == ["aten.mul.Tensor", "aten.sub.Tensor"]
    for snapshot in found[:2]:
        results = torch.utils._pytree.tree_leaves(snapshot.graph.graph_module(*snapshot.arguments()))
        assert torch.equal(results[0], snapshot.output(snapshot.output_names[0]))


def test_models_with_masks_train_undisturbed(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 31, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    torch.compiler.reset()
    compiled = torch.compile(model, backend="glass", options={"backend": "eager"})
    with glass.snapshots.take(tmp_path, on=WRONG) as snapshots:
        compiled(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert snapshots.written == () and snapshots.left_out.total() == 0


@pytest.mark.slow
def test_compiled_backward_graphs_do_not_overwrite_what_was_saved_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inputs are kept by reference, so Inductor must not be told that it may put results where activations were, which
    # it is in torch.compile(backend="inductor").
    import torch._inductor.graph as inductor

    donated = []
    told = inductor.get_donated_idxs
    monkeypatch.setattr(inductor, "get_donated_idxs", lambda: donated.append(told()) or donated[-1])
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path))
    linear = torch.nn.Linear(64, 64)

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(linear(x)).sin().sum()

    # (pytest's setattr would not put torch's settings back.)
    with (
        torch._inductor.config.patch("fx_graph_cache", False),
        torch._functorch.config.patch("enable_autograd_cache", False),
    ):
        torch.compiler.reset()
        torch.compile(loss, backend="glass", options={"backend": "inductor"})(torch.randn(32, 64)).backward()
        assert len(donated) >= 2 and not any(donated)
        torch.compiler.reset()
        torch.compile(loss, backend="inductor")(torch.randn(32, 64)).backward()
    assert any(donated), "this would not notice"
