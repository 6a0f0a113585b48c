"""Profiles: what is in the trace, named how, and that nothing is left behind when one ends."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import spans
from glassengine.errors import BackendError, CorruptError, UsageError
from glassengine.executable.graph import observers
from glassengine.executable.profile_trace import ProfileSpan, annotate, kind_of, nest, summarize
from glassengine.executable.run.executable import Executable
from tests import children


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(torch.relu(self.up(x)))


def trace_of(taken: Any) -> dict[str, Any]:
    (path,) = taken.directory.glob("*.pt.trace.json.gz")
    with gzip.open(path, "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def summary_of(taken: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((taken.directory / "profile.json").read_text())
    return found


def named(trace: dict[str, Any], kind: str) -> list[str]:
    return [e["name"] for e in trace["traceEvents"] if e.get("args", {}).get("kind") == kind]


def test_modules_executions_steps_and_the_users_spans_are_named_and_nested(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 8)
    executable = Executable("double/main", lambda inputs: {"y": inputs["x"] * 2})

    @glass.profiler.Trace("decorated")
    def decorated() -> None:
        executable.run({"x": x})

    with glass.profiler.profile(tmp_path) as taken:
        for _ in range(3):
            with glass.profiler.Trace("forward"):
                model(x)
            decorated()
            spans.step_ended()
    trace = trace_of(taken)
    assert named(trace, "module") == [".", "up", "stack", "stack.0", "stack.1"] * 3
    assert named(trace, "execute") == ["double/main"] * 3
    assert sorted(named(trace, "trace")) == ["decorated"] * 3 + ["forward"] * 3
    assert named(trace, "step") == [f"ProfilerStep#{step}" for step in range(3)]

    def chain(name: str) -> list[str]:
        def walk(level: Any, path: list[str]) -> list[str] | None:
            for span in level:
                here = [*path, span.event["name"]]
                if span.event["name"] == name:
                    return here
                if (found := walk(span.children, here)) is not None:
                    return found
            return None

        return walk(nest(trace), []) or []

    assert chain("stack.0") == ["forward", ".", "stack", "stack.0"]
    assert chain("double/main") == ["decorated", "double/main"]
    summary = summary_of(taken)
    assert summary["num_steps"] == 3 == len(summary["steps_us"])
    assert summary["paths"]["stack.0"]["calls"] == 3 and summary["paths"]["stack.0"]["own_us"] > 0
    everything = sum(entry["total_us"] for entry in summary["flame"].values())
    own = sum(entry["own_us"] for entry in summary["paths"].values())
    assert own == pytest.approx(everything, rel=1e-6) and everything <= summary["wall_us"]


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def nested(trace: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the chain of our spans above and with each of them, in order of time."""
    found: list[tuple[str, ...]] = []

    def walk(level: list[ProfileSpan], above: tuple[str, ...]) -> None:
        for span in level:
            kind = kind_of(span.event)
            here = above if kind is None else (*above, f"{kind} {span.event['name']}")
            if kind is not None:
                found.append(here)
            walk(span.children, here)

    walk(nest(trace), ())
    return found


def test_compilations_transfers_executions_and_snapshots_are_nested_and_named(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = torch.compile(Root(), backend="glass", options={"backend": "eager"})
    policy = {"on": ("every", "nonfinite"), "keep_inputs": "host"}
    with glass.profiler.profile(tmp_path / "profiles") as taken, glass.snapshots.take(tmp_path / "snapshots", **policy):
        for _ in range(2):
            with glass.profiler.Trace("loss"):
                loss = model(torch.randn(2, 8)).sum()
            loss.backward()
    found = nested(trace_of(taken))
    forward, backward = (
        next(chain[-1].split(" ", 1)[1] for chain in found if chain[-1].startswith(f"compile Root/{kind}"))
        for kind in ("forward", "backward")
    )
    root = ("trace loss", "module .")

    def run(name: str, *above: str) -> list[tuple[str, ...]]:
        within = (*above, f"execute {name}")
        return [within, (*within, f"snapshot {name}"), (*within, f"transfer {name}")]

    compiled = [(*root, f"compile {forward}")], [(f"compile {backward}",)]
    again = [root[:1], root, *run(forward, *root), *run(backward)]
    assert found == [root[:1], root, *compiled[0], *run(forward, *root), *compiled[1], *run(backward), *again]
    # Modules of the graph that the back-end runs are not the user's.
    assert set(summary_of(taken)["paths"]) == {".", "(outside of modules)"}


def test_an_execution_that_ends_otherwise_ends_its_span(tmp_path: Path) -> None:
    errors = [RuntimeError("of the device"), KeyboardInterrupt()]

    def run(inputs: Any) -> Any:
        raise errors.pop()

    broken, whole = Executable("broken", run), Executable("whole", lambda inputs: {"y": inputs["x"].log()})
    zero = {"x": torch.zeros(2)}
    with glass.snapshots.take(tmp_path / "bad", on="nonfinite"), glass.profiler.profile(tmp_path / "profiles") as taken:
        for error in (KeyboardInterrupt, BackendError):
            with pytest.raises(error):
                broken.run(zero)
        with pytest.raises(glass.snapshots.NonFiniteError):
            whole.run(zero)
        with glass.profiler.Trace("after"):
            torch.ones(2).sum()
    chains = [chain for chain in nested(trace_of(taken)) if not chain[-1].startswith("snapshot")]
    assert chains == [("execute broken",), ("execute broken",), ("execute whole",), ("trace after",)]


def test_copies_of_an_accelerator_are_transfers() -> None:
    copy = event("Memcpy HtoD (Pageable -> Device)", 3, 7, cat="gpu_memcpy", tid=7)
    trace = {"traceEvents": [event("glass|execute|m/main", 0, 100), copy]}
    annotate(trace, lambda _: ())
    assert summarize(trace)["kinds"]["transfer"] == {"count": 1, "total_us": 7.0}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 8)
    with pytest.raises(KeyError), glass.profiler.profile(tmp_path):
        model(x)
        raise KeyError("of the user")
    assert (tmp_path / "profile-000001" / "profile.json").is_file(), "what was taken so far is kept"
    assert not observers() and not spans.is_recording()
    assert not nn.modules.module._has_any_global_hook()
    with glass.profiler.profile(tmp_path) as second:
        model(x)
    assert second.directory.name == "profile-000002"


def test_a_module_that_raises_ends_its_spans(tmp_path: Path) -> None:
    model = Block()
    with glass.profiler.profile(tmp_path) as taken:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 7))
        model(torch.randn(2, 8))
    assert named(trace_of(taken), "module") == [".", "up", ".", "up", "stack", "stack.0", "stack.1"]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with (
        glass.profiler.profile(tmp_path),
        pytest.raises(UsageError, match="another profile"),
        glass.profiler.profile(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["profile-000001"]


def test_a_profile_ends_after_the_requested_steps(tmp_path: Path) -> None:
    with glass.profiler.profile(tmp_path, steps=2) as taken:
        for _ in range(5):
            torch.ones(2).sum()
            spans.step_ended()
    assert taken.num_steps == 2 and named(trace_of(taken), "step") == ["ProfilerStep#0", "ProfilerStep#1"]


def test_other_threads_are_in_it(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 8)
    with glass.profiler.profile(tmp_path) as taken:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()
    assert named(trace_of(taken), "module") == [".", "up", "stack", "stack.0", "stack.1"]


def test_compiled_code_is_not_compiled_again(tmp_path: Path) -> None:
    compiled: list[Any] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, x = torch.compile(Block(), backend=count), torch.randn(2, 8)
    with torch.no_grad():
        before = model(x)
        with glass.profiler.profile(tmp_path):
            assert torch.equal(model(x), before)
        model(x)
    assert len(compiled) == 1


def test_ranks_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with glass.profiler.profile(tmp_path) as taken:
        torch.ones(2).sum()
    assert taken.directory == tmp_path / "rank3" / "profile-000001"
    assert (taken.directory / "rank3.pt.trace.json.gz").is_file()


def test_a_directory_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), glass.profiler.profile(tmp_path / "file"):
        raise AssertionError
    assert not spans.is_recording()
    with glass.profiler.profile(tmp_path / "other"):  # the lock was given back
        pass


def test_tensorboard_reads_the_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with glass.profiler.profile(tmp_path) as taken:
        for _ in range(3):
            torch.ones(2).sum()
            spans.step_ended()
    found = EventAccumulator(str(taken.directory))
    found.Reload()
    scalars = found.Scalars("step_ms")
    assert [item.step for item in scalars] == [0, 1, 2]
    expected = [length / 1e3 for length in summary_of(taken)["steps_us"]]
    assert [item.value for item in scalars] == pytest.approx(expected, rel=1e-5)
    assert "total_ms/step" in found.Tags()["scalars"]


# In a process of its own: the plugin's cache starts another one.
READ_BY_THE_PLUGIN = """
import json, sys
from torch_tb_profiler.io.cache import Cache
from torch_tb_profiler.profiler import RunLoader

if __name__ == "__main__":
    ((worker, _), found), = RunLoader("run", sys.argv[1], Cache()).load().profiles.items()
    print(json.dumps({"worker": worker, "views": [view.display_name for view in found.views]}))
"""


def test_the_plugin_of_tensorboard_reads_the_trace(tmp_path: Path) -> None:
    with glass.profiler.profile(tmp_path) as taken:
        for _ in range(3):
            Block()(torch.randn(2, 8))
            spans.step_ended()
    script = tmp_path / "read.py"
    script.write_text(READ_BY_THE_PLUGIN)
    command = [sys.executable, str(script), str(taken.directory)]
    done = children.run(command, timeout=600, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"worker": "rank0", "views": ["Overview", "Operator", "Trace"]}


def event(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "name": name, "ts": start, "dur": length, **more}


def test_kernels_get_the_sites_that_they_compute() -> None:
    kernels = [
        ("aoti_torch_cpu_linear", "a/linear.0"),
        ("cpp_fused_relu_0", "a/relu.0"),
        ("aoti_torch_cpu_linear", "b/linear.0"),
    ]
    events = [event("glass|execute|m/main", 0, 100)]
    events += [
        event("aoti_torch_cpu_linear", 1, 10),
        event("aten::empty", 2, 1),
        event("graph_0_cpp_fused_relu_0", 20, 5),
    ]
    events += [event("aoti_torch_cpu_linear", 30, 20), event("aoti_torch_cpu_linear", 60, 20)]
    trace = {"traceEvents": events}
    annotate(trace, {"m/main": kernels}.__getitem__)
    assert [e["name"] for e in events] == [
        "m/main", "a/linear.0", "aten::empty", "a/relu.0", "b/linear.0", "aoti_torch_cpu_linear",
    ]  # fmt: skip
    found = summarize(trace)
    assert found["paths"]["a"]["own_us"] == 15 and found["paths"]["b"]["own_us"] == 20
    assert found["paths"]["(outside of modules)"]["own_us"] == 65


def test_spans_cost_nothing_while_no_profile_is_taken() -> None:
    assert spans.span("trace", "x") is spans.span("op", "y")


def memory() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures by /proc")
def test_s5_a_child_forked_meanwhile_takes_no_profile(tmp_path: Path) -> None:
    """It went on recording for as long as it lived: 180 MB in 200 000 operations."""
    x = torch.ones(8)
    with glass.profiler.profile(tmp_path / "parent") as taken:
        x.sum()
        child = os.fork()
        if child == 0:
            before, wrong = memory(), 0
            for _ in range(60_000):
                x.sum()
            wrong |= memory() - before > 25_000_000
            wrong |= 2 * spans.is_recording()
            taken.stop()
            wrong |= 4 * (taken.directory / "profile.json").exists()
            with glass.profiler.profile(tmp_path / "child") as own:  # one of its own is its own
                x.sum()
            wrong |= 8 * ("aten::sum" not in glass.profiler.read(own.directory)[0].data["flame"])
            os._exit(wrong)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert summary_of(taken)["flame"]["aten::sum"]["count"] == 1


def test_s13_a_profile_is_what_was_written(tmp_path: Path) -> None:
    with glass.profiler.profile(tmp_path) as taken:
        torch.ones(2).sum()
    found = summary_of(taken)
    assert glass.profiler.read(tmp_path)[0].data == {key: found[key] for key in found if key != "checksum"}
    # Another layout says the same; another number does not.
    path = taken.directory / "profile.json"
    path.write_text(json.dumps(found, indent=3, sort_keys=True))
    glass.profiler.read(tmp_path)
    path.write_text(json.dumps({**found, "wall_us": found["wall_us"] + 1}))
    with pytest.raises(CorruptError, match="not what was written"):
        glass.profiler.read(tmp_path)
    # Profiles of the first version have no checksum.
    del found["checksum"]
    path.write_text(json.dumps(found))
    with pytest.raises(CorruptError, match="not what was written"):
        glass.profiler.read(tmp_path)
    path.write_text(json.dumps({**found, "schema_version": 1}))
    assert glass.profiler.read(tmp_path)[0].data["wall_us"] == found["wall_us"]


@pytest.mark.parametrize("jump_s", [-7200.0, 0.2, 1e7])
def test_a_clock_that_is_set_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    real = time.time
    with pytest.raises(UsageError, match="clock of this machine was set"), glass.profiler.profile(tmp_path):
        torch.ones(2).sum()
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("text", [None, '{"traceEvents": [', ""])
def test_s10_a_trace_that_torch_could_not_write_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    def cut(self: object, path: str) -> None:
        if text is not None:
            Path(path).write_text(text)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    with pytest.raises(UsageError, match="cannot write its trace"), glass.profiler.profile(tmp_path):
        torch.ones(2).sum()
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def test_scalars_that_cannot_be_written_do_not_end_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("glassengine.executable.profiling.write_scalars", full)
    with glass.profiler.profile(tmp_path):
        torch.ones(2).sum()
    assert glass.profiler.read(tmp_path)[0].data["wall_us"] > 0
    assert "no scalars for TensorBoard: No space left" in caplog.text
