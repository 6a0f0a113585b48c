"""Recording an unmodified script: it runs as it would, whatever it does with processes, threads and models."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from glassengine.capture import script_recorder as script
from glassengine.capture.record import Recorder, record
from glassengine.capture.script_recorder import MAX_MODELS, ScriptRecorder, SpawnedRecordings, _start, finish
from glassengine.errors import GlassError
from glassengine.recording.reader import Recording
from tests import children

NET = """\
import sys, threading, time, torch, multiprocessing

class Net(torch.nn.Linear):
    pass

torch.manual_seed(0)
net = Net(2, 2).requires_grad_(False)

def work(i):
    return float((net if i % 2 else Net(2, 2).requires_grad_(False))(torch.ones(2)).sum())
"""


RECORD = ("-m", "glassengine.cli", "record", "-o", "out", "--")


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


def run_net(
    tmp_path: Path, *command: str, then: str, first: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "net.py").write_text(first + NET + textwrap.dedent(then))
    return children.run(
        [sys.executable, *command, "net.py"], cwd=tmp_path, timeout=120, env={**os.environ, **variables}
    )


def test_forked_processes_run_as_they_would_and_threads_are_waited_for(tmp_path: Path) -> None:
    then = """
        def serve():
            time.sleep(0.5)
            net(torch.ones(2))

        net(torch.ones(2))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert len(pool.map(work, range(8), chunksize=1)) == 8
        threading.Thread(target=serve).start()
        sys.exit()
    """
    done = run_net(tmp_path, *RECORD, then=then)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["Net"]
    opened = Recording.open(tmp_path / "out" / "Net")
    assert opened.complete and opened.steps == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_processes_that_import_the_script_again(tmp_path: Path, way: str) -> None:
    then = f"""
        if __name__ == "__main__":
            child = multiprocessing.get_context("{way}").Process(target=work, args=(1,), name="worker")
            child.start()
            child.join()
            net(torch.ones(2))
            sys.exit(child.exitcode)
    """
    done = run_net(tmp_path, then=then, first="import glassengine.auto\n", GLASS_RECORD_DIR="here")
    assert done.returncode == 0, done.stderr
    for path in ("here/Net", "here/worker/Net"):
        opened = Recording.open(tmp_path / path)
        assert opened.complete and opened.steps == [0], path


def test_a_script_knows_itself_by_what_python_would_tell_it(tmp_path: Path) -> None:
    then = """
        def save():
            time.sleep(0.2)
            pickle.loads(pickle.dumps(Net(1, 1)))  # finds the class in the main module

        import os, pickle
        net(torch.ones(2))
        threading.Thread(target=save).start()
        os.chdir("/")
        print(os.path.exists(__file__), sys.argv, sys.path[0] == os.path.dirname(__file__))
        for name in ("__name__", "__doc__", "__package__", "__spec__", "__cached__", "__annotations__"):
            print(name, globals()[name])
        print(type(__loader__).__name__, __builtins__, vars(sys.modules["__main__"]) is globals())
    """
    plain, recorded = run_net(tmp_path, then=then), run_net(tmp_path, *RECORD, then=then)
    assert recorded.returncode == plain.returncode == 0 and "Error" not in recorded.stderr, recorded.stderr
    assert recorded.stdout == plain.stdout


def test_a_directory_that_is_taken_away_from_a_script(tmp_path: Path) -> None:
    then = """
        net(torch.ones(2))
        import shutil
        shutil.rmtree("here")
        net(torch.ones(2))
        print("end")
    """
    done = run_net(tmp_path, then=then, first="import glassengine.auto\n", GLASS_RECORD_DIR="here")
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "not everything was recorded: the recording cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_processes_that_a_recorded_script_starts_afresh(tmp_path: Path, way: str) -> None:
    then = f"""
        def fail():
            work(0)
            raise ValueError("planted")

        if __name__ == "__main__":
            ways = multiprocessing.get_context("{way}")
            children = [ways.Process(target=work, args=(1,)), ways.Process(target=fail, name="a/b")]
            children.append(ways.Process(target=int))
            for child in children:
                child.start()
            for child in children:
                child.join()
            print([child.exitcode for child in children])
    """
    done = run_net(tmp_path, *RECORD, then=then)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 0]\n"), done.stderr
    (first,) = (item.name for item in (tmp_path / "out").iterdir() if item.name != "a_b")
    for name, reason in ((first, None), ("a_b", "stopped by ValueError: planted")):
        opened = Recording.open(tmp_path / "out" / name / "Net")
        assert opened.steps == [0] and opened.incomplete_because == reason
        assert f"recorded out/{name}/Net: glass show" in done.stderr


@pytest.mark.slow
def test_f43_processes_that_spawned_processes_spawn(tmp_path: Path) -> None:
    then = """
        def engine():
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(1,), name="Worker")
            worker.start()
            worker.join()

        if __name__ == "__main__":
            core = multiprocessing.get_context("spawn").Process(target=engine, name="EngineCore")
            core.start()
            core.join()
    """
    done = run_net(tmp_path, *RECORD, then=then)
    assert done.returncode == 0, done.stderr
    assert "recorded out/EngineCore/Worker/Net: glass show" in done.stderr
    assert Recording.open(tmp_path / "out" / "EngineCore" / "Worker" / "Net").steps == [0]


@pytest.mark.slow
def test_recordings_of_an_earlier_run_are_not_told_of(tmp_path: Path) -> None:
    then = """
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=int if False else work, args=(1,))
            child.start()
            child.join()
    """
    first = run_net(tmp_path, *RECORD, then=then)
    assert "recorded out/SpawnProcess-1/Net: " in first.stderr
    again = [*RECORD[:-1], "--overwrite", "--"]
    idle = run_net(tmp_path, *again, then=then.replace("False", "True"))
    assert idle.returncode == 4 and "recorded out/" not in idle.stderr


def test_another_python_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptRecorder(tmp_path / "out") as recorder, SpawnedRecordings(recorder) as spawned:
        assert "glassengine" in spawn.get_preparation_data("one")
        monkeypatch.setattr(spawn, "get_executable", lambda: "/another/python")
        assert "glassengine" not in spawn.get_preparation_data("two")
    assert "glassengine" not in spawn.get_preparation_data("three")
    assert spawned.recordings == []


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_spawned_process_that_cannot_be_recorded_runs_all_the_same(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").mkdir()
    directory = tmp_path / "out" / "SpawnProcess-1"
    if place == "before":
        directory.write_text("in the way")
        _start(directory, {})
        assert "a process is not recorded: " in caplog.text
        return
    recorder = ScriptRecorder(directory)
    recorder.__enter__()
    (directory / "Net").write_text("in the way")
    Net()(torch.ones(1, 4))
    finish(recorder, None)
    assert "not everything was recorded: " in caplog.text


def test_a_script_that_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ScriptRecorder("out"), record(Net(), "own", values=["."]) as recorder:
        monkeypatch.chdir(tmp_path / "elsewhere")
        Net()(torch.ones(1, 4))
        recorder.model(torch.ones(1, 4))
    assert not list((tmp_path / "elsewhere").iterdir())
    for path in ("out/Net", "own"):
        opened = Recording.open(tmp_path / path)
        assert opened.complete and opened.tensor(".", 0).shape == (1, 4)


def test_models_that_are_not_recorded_are_not_kept_alive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptRecorder(tmp_path / "out"):
        nets = [Net() for _ in range(MAX_MODELS + 2)]
        for net in nets:
            net(torch.ones(1, 4))
        last = weakref.ref(net)
        del nets, net
        gc.collect()
        assert last() is None
    assert "2 more models were not recorded" in caplog.text


def test_threads_that_begin_with_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*args: Any, **kwargs: Any) -> Recorder:
        time.sleep(0.2)
        return record(*args, **kwargs)

    monkeypatch.setattr(script, "record", slowly)
    net = Net()
    with ScriptRecorder(tmp_path / "out") as recorder:
        threads = [threading.Thread(target=net, args=(torch.ones(1, 4),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [path.name for path in recorder.recordings] == ["Net"]
    assert Recording.open(recorder.recordings[0]).steps == [0, 1, 2]


def test_a_directory_that_cannot_be_written_does_not_stop_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = ScriptRecorder(tmp_path / "out")
    with pytest.raises(GlassError), recorder:
        (tmp_path / "out" / "Net").write_text("in the way")
        net = Net()
        assert net(torch.ones(1, 4)).shape == net(torch.ones(1, 4)).shape
    assert not recorder.recordings and caplog.text.count("Net is not recorded: ") == 1


def test_every_way_to_run_a_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])],
        "double",
        [helper.make_tensor_value_info("x", kind, ["n"])],
        [helper.make_tensor_value_info("y", kind, ["n"]), helper.make_tensor_value_info("z", kind, ["n"])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    x = np.arange(3, dtype=np.float32)
    x.setflags(write=False)
    with ScriptRecorder(tmp_path / "out") as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        session.run(None, {"x": x})
        session.run(["z"], input_feed={"x": x[::-1]})
        session.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        later: queue.Queue[Any] = queue.Queue()
        session.run_async(["y"], {"x": x}, lambda results, data, error: later.put((results, data, error)), "mine")
        results, data, error = later.get(timeout=60)
        assert (results[0].tolist(), data, error) == ([0, 2, 4], "mine", "")
        with pytest.raises(Exception, match="Unexpected input data type"):
            session.run(None, {"x": np.ones(2)})
        with pytest.raises(TypeError, match="input_feed"):
            session.run(None)
    assert "1 runs of ONNX Runtime with bound tensors were not recorded" in caplog.text
    opened = Recording.open(recorder.recordings[0])
    assert str(opened.incomplete_because).startswith("step 4 was stopped by InvalidArgument") and not opened.left_out
    assert opened.sites(3) == [".:in.x", ".:out.y"] and opened.tensor(".:out.y", 3).tolist() == [0, 2, 4]
    assert opened.sites(4) == [".:in.x"] and "Unexpected input data type" in opened.stopped[4]
    assert [opened.sites(step) for step in range(3)] == [
        [".:in.x", ".:out.y", ".:out.z"],
        [".:in.x", ".:out.z"],
        [".:in.x", ".:out.y"],
    ]
    assert opened.tensor(".:in.x", 1).tolist() == [2, 1, 0] and opened.tensor(".:out.y", 2).tolist() == [0, 2, 4]


def test_caches_that_a_session_is_given_and_returns_are_stored_row_by_row(tmp_path: Path) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    past, row, present = (
        helper.make_tensor_value_info(name, kind, [1, 2, f"{name}_n", 4])
        for name in ("past_key_values.0.key", "x", "present.0.key")
    )
    node = helper.make_node("Concat", [past.name, row.name], [present.name], axis=2)
    made = helper.make_model(
        helper.make_graph([node], "decoder", [past, row], [present]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    session = onnxruntime.InferenceSession(made.SerializeToString())
    caches = [np.ones((1, 2, 3, 4), np.float32)]
    with ScriptRecorder(tmp_path / "out") as recorder:
        for step in range(4):
            new = np.full((1, 2, 1, 4), step, np.float32)
            caches += session.run(None, {past.name: caches[-1], row.name: new})
    opened = Recording.open(recorder.recordings[0])
    for site, first in ((f".:in.{past.name}", 0), (f".:out.{present.name}", 1)):
        found = [opened.entry(site, step) for step in range(4)]
        assert [entry.added and entry.added.shape for entry in found] == [None, *[(1, 2, 1, 4)] * 3]
        assert [entry.axes for entry in found] == [{}] * 4
        assert all(np.array_equal(opened.tensor(entry), caches[first + entry.step]) for entry in found)


def test_f19_a_pool_of_spawned_processes_that_is_left_open(tmp_path: Path) -> None:
    then = """
        if __name__ == "__main__":
            pool = multiprocessing.get_context("spawn").Pool(1)
            print(len(pool.map(work, [1, 1])))
    """
    done = run_net(tmp_path, *RECORD, then=then)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    opened = Recording.open(tmp_path / "out" / "SpawnPoolWorker-1" / "Net")
    assert opened.complete and opened.steps == [0, 1]


def save_double(path: Path) -> None:
    """Write an ONNX file that doubles two numbers."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", kind, [2])],
        [helper.make_tensor_value_info("y", kind, [2])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.mark.parametrize("how", ["record", "auto"])
def test_f20_a_session_after_something_looked_up_its_package(tmp_path: Path, how: str) -> None:
    save_double(tmp_path / "double.onnx")
    (tmp_path / "net.py").write_text(
        ("import glassengine.auto\n" if how == "auto" else "") + "import importlib.util\n"
        "assert importlib.util.find_spec('onnxruntime') is not None\n"
        "import numpy, onnxruntime\n"
        "onnxruntime.InferenceSession('double.onnx').run(None, {'x': numpy.ones(2, numpy.float32)})\n"
    )
    command = ["net.py"] if how == "auto" else [*RECORD, "net.py"]
    children.run([sys.executable, *command], cwd=tmp_path, timeout=120, check=True)
    opened = Recording.open(tmp_path / ("glass-recording" if how == "auto" else "out") / "double")
    assert opened.complete and opened.tensor(".:out.y").tolist() == [2, 2]


def test_gradients_and_updates_of_the_models_of_a_script(tmp_path: Path) -> None:
    first, second = nn.Sequential(nn.Linear(2, 3)), Net()
    with ScriptRecorder(tmp_path / "r", gradients=True, optimizer=True) as recorder:
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (first, second)]
        for _ in range(2):
            first(torch.ones(1, 2)).sum().backward()
            second(torch.ones(1, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    opened = [Recording.open(path) for path in recorder.recordings]
    assert [{entry.step for entry in one.entries} for one in opened] == [{0, 1}, {0, 1}]
    for one, path in zip(opened, ("0.weight", "weight"), strict=True):
        assert {f"{path}:grad", f"{path}:param", f"{path}:state.exp_avg", ".:grad_out"} <= set(one.sites())
    last = next(e for e in reversed(opened[1].entries) if e.site == "weight:param")
    assert torch.equal(opened[1].tensor(last), second.weight)
