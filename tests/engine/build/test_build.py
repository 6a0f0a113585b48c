"""Building: what is refused before work begins, what the directory holds, and that failures leave nothing behind."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import environment
from glassengine.backends.eager import EagerBackend
from glassengine.engine import Engine, files
from glassengine.engine.build import build as build_module
from glassengine.engine.build.build import build_program, default_directory
from glassengine.engine.build.plan import BuildPlan, BuildSettings, plan_build
from glassengine.engine.build.requests import parse_request
from glassengine.engine.build.write import BuiltParts
from glassengine.errors import BackendError, CorruptError, UnknownNameError, UsageError
from glassengine.program import Program, export_program, load_model
from glassengine.testing import models
from glassengine.workers import Died
from glassengine.workers.protocol import InProcess
from tests import children


def eager(program: Program, directory: Path, **options: Any) -> Engine:
    return build_program(program, directory, backend="eager", **options)


def planned(program: Program, *requests: str, **options: Any) -> BuildPlan:
    settings = BuildSettings(backend="eager", add_output=requests, implicit_outputs=True, **options)
    return plan_build(program, Path("e"), settings)


def test_directory_holds_everything(engine: Engine) -> None:
    names = {path.name for path in engine.directory.iterdir()}
    assert names >= {
        "engine.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "program.pt2", "program.json", "weights.safetensors", "main",
    }  # fmt: skip
    assert [p.name for p in engine.directory.parent.iterdir()] == [engine.directory.name], "nothing is left beside it"


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert glass.build(str(checkpoint), backend="eager").directory == Path("engines/tiny")
    assert (tmp_path / "engines" / "tiny" / "engine.json").is_file()


def test_default_directory_of_a_factory_and_a_hub_id() -> None:
    assert default_directory("models.py:tiny") == Path("engines/models-tiny")
    assert default_directory("org/name") == Path("engines/org/name")
    assert default_directory("../../x.py:f") == Path("engines/x-f")


def test_existing_engine_needs_overwrite(program: Program, tmp_path: Path) -> None:
    first = eager(program, tmp_path / "e")
    with pytest.raises(UsageError, match="exists already") as caught:
        eager(program, tmp_path / "e")
    assert "--overwrite" in str(caught.value.hint)
    second = eager(program, tmp_path / "e", overwrite=True, max_seq_len=32)
    assert (first.manifest.max_seq_len, second.manifest.max_seq_len) == (128, 32)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_existing_engine_is_refused_before_any_work(program: Program, tmp_path: Path) -> None:
    eager(program, tmp_path / "e")
    with pytest.raises(UsageError, match="exists already"):
        glass.build("a model that does not exist", tmp_path / "e", backend="eager")


def test_other_files_are_never_replaced(program: Program, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        eager(program, tmp_path / "e", overwrite=True)
    assert (tmp_path / "e" / "thesis.txt").exists()


def test_empty_directory_is_taken(program: Program, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    assert eager(program, tmp_path / "e").directory.is_dir()


def test_directory_that_cannot_be_made(program: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the engine") as caught:
        eager(program, tmp_path / "file" / "e")
    assert "is not a directory" in str(caught.value.got) and "-o DIRECTORY" in str(caught.value.hint)


def test_read_only_directory(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The suite may run as root, who may write everywhere: the refusal of the system is planted.
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match=r"cannot write the engine\n.*Permission denied"):
        eager(program, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_full_disk(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.safetensors")

    monkeypatch.setattr(files, "save_weights", full)
    with pytest.raises(UsageError, match="No space left on device"):
        eager(program, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("ptxas said no"), KeyboardInterrupt()])
def test_failed_build_leaves_the_old_engine(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    eager(program, tmp_path / "e")

    def fail(self: EagerBackend, program: Any, directory: Path) -> None:
        (directory / "half").write_text("done")
        raise error

    monkeypatch.setattr(EagerBackend, "build", fail)
    expected = BackendError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected):
        eager(program, tmp_path / "e", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    assert glass.load(tmp_path / "e").manifest.backend == "eager"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_failed_rename_brings_the_old_engine_back(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    eager(program, tmp_path / "e")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        # Where two steps are taken the first one is not undone unless a rename works again.
        if can_exchange or ".partial-" in self.name:
            raise OSError(errno.EIO, "I/O error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(files, "exchange", fail if can_exchange else lambda *_: False)
    with pytest.raises(UsageError, match="I/O error"):
        eager(program, tmp_path / "e", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_leftovers_of_a_killed_build_are_removed(program: Program, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".e.partial-{dead.pid}").mkdir()
    (tmp_path / f".e.old-{dead.pid}").mkdir()
    (tmp_path / f".e.partial-{os.getppid()}").mkdir()  # alive: somebody else builds
    eager(program, tmp_path / "e")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["e", f".e.partial-{os.getppid()}"])
    # Killed between the two renames that replace an engine.
    (tmp_path / "e").rename(tmp_path / f".e.old-{dead.pid}")
    with pytest.raises(UsageError, match="exists already"):
        eager(program, tmp_path / "e")
    assert (tmp_path / "e" / "engine.json").is_file()


def test_terminated_build_leaves_nothing(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(EagerBackend, "build", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        eager(program, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_build_in_a_thread(program: Program, tmp_path: Path) -> None:
    # Only the main thread may handle signals.
    thread = threading.Thread(target=eager, args=(program, tmp_path / "e"))
    thread.start()
    thread.join()
    assert glass.load(tmp_path / "e").manifest.name == "e"


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    script = (
        "import signal, sys, time\n"
        # A job in the background inherits "ignore", under which nobody could interrupt it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from glassengine.backends.eager import EagerBackend\n"
        "EagerBackend.build = lambda *a: time.sleep(120)\n"
        "from glassengine.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    made = "glassengine.testing.models:vision"
    arguments = ["build", made, str(out / "e"), "--inputs", f"{made}_inputs", "--backend", "eager"]
    command = [sys.executable, "-c", script, *arguments]
    process = children.Popen(command, imports=children.MODELS, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while not any(out.iterdir()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    assert list(out.iterdir()) == []


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown model"):
        glass.build(tmp_path / "nothing", tmp_path / "e", backend="eager")
    assert not (tmp_path / "e").exists()


def test_unknown_site_names_the_nearest(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"nearest: model\.layers\.0\.mlp"):
        eager(program, tmp_path / "e", outputs=["layers.7.mlp"])
    assert not (tmp_path / "e").exists()


def test_unknown_backend(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="nearest: inductor"):
        glass.build(checkpoint, tmp_path / "e", backend="inducto")


def hide_compiler(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CXX", raising=False)


def test_missing_compiler(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_compiler(monkeypatch, tmp_path / "empty")
    with pytest.raises(BackendError, match="no C\\+\\+ compiler"):
        glass.build(checkpoint, tmp_path / "e", backend="inductor")
    assert not (tmp_path / "e").exists()


def test_fallback_is_said_aloud(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_compiler(monkeypatch, tmp_path / "empty")
    with caplog.at_level(logging.WARNING, "glassengine"):
        plan = glass.build(checkpoint, tmp_path / "e", dry_run=True)
    assert plan.backend == "onnxruntime"
    assert "onnxruntime instead" in caplog.text and "onnxruntime instead" in plan.notes[0]


def test_dtype_that_a_backend_cannot_run(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot run bfloat16 models") as caught:
        glass.build(checkpoint, tmp_path / "e", backend="onnxruntime", dtype="bfloat16")
    assert caught.value.hint == "--dtype float32"


def test_dtype(checkpoint: Path, tmp_path: Path) -> None:
    engine = glass.build(checkpoint, tmp_path / "e", backend="eager", dtype="bfloat16")
    assert engine.manifest.dtype == "bfloat16"
    assert engine.session(1, 4).prefill(torch.tensor([[3, 4]])).dtype is torch.bfloat16


@pytest.mark.parametrize("length", [1, 129])
def test_sequence_length_that_the_model_does_not_allow(checkpoint: Path, tmp_path: Path, length: int) -> None:
    with pytest.raises(UsageError, match=f"--max-seq-len {length}"):
        glass.build(checkpoint, tmp_path / "e", backend="eager", max_seq_len=length)


@pytest.mark.parametrize("batch", [1 << 40, int("9" * 40), int("9" * 400)])
def test_a_batch_beyond_any_memory(checkpoint: Path, tmp_path: Path, batch: int) -> None:
    with pytest.raises(UsageError, match="no cache can be so large"):
        glass.build(checkpoint, tmp_path / "e", backend="eager", max_batch_size=batch)


def test_batch_of_none(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid --max-batch-size"):
        glass.build(checkpoint, tmp_path / "e", backend="eager", max_batch_size=0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("layers.0.mlp", ("layers.0.mlp", None, None)),
        ("layers.0.mlp=mine", ("layers.0.mlp", "mine", None)),
        ("re:(?=mlp)", ("re:(?=mlp)", None, None)),
        ("re:(?=mlp)=x.y", ("re:(?=mlp)", "x.y", None)),
        ("layers.0.mlp:float32", ("layers.0.mlp", None, "float32")),
        ("layers.0.mlp=mine:bfloat16", ("layers.0.mlp", "mine", "bfloat16")),
        ("layers.0.mlp:in[0]", ("layers.0.mlp:in[0]", None, None)),
        ("layers.0:kv.key=k", ("layers.0:kv.key", "k", None)),
        ("re:a=b:float64", ("re:a", "b", "float64")),
        ("mlp:int8", ("mlp:int8", None, None)),
    ],
)
def test_request_is_split(text: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_request(text) == parts


def test_alias_of_a_glob_is_numbered(program: Program) -> None:
    plan = planned(program, "layers.*.mlp=mlp", "layers.0.mlp=first")
    assert [(entry.name, entry.site) for entry in plan.added_outputs] == [
        ("mlp_0", "model.layers.0.mlp"), ("mlp_1", "model.layers.1.mlp"), ("first", "model.layers.0.mlp"),
    ]  # fmt: skip


def test_two_tensors_of_one_name(program: Program) -> None:
    with pytest.raises(UsageError, match="two outputs would be called 'x'"):
        planned(program, "layers.0.mlp=x", "layers.1.mlp=x")


def test_name_of_an_input(program: Program) -> None:
    with pytest.raises(UsageError, match="cannot be called 'input_ids'"):
        planned(program, "layers.0.mlp=input_ids")


def test_documented_variable(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", json.dumps({"mm_default": "q", "gpt_attention_plugin": "attention"}))
    plan = planned(program, "layers.0.mlp")
    assert [entry.name for entry in plan.added_outputs] == ["model.layers.0.mlp", "q", "attention"]
    assert plan.added_outputs[2].site.endswith("/scaled_dot_product_attention.0")


@pytest.mark.parametrize("text", ["mm_default", "[]", '{"mm_default": 1}'])
def test_documented_variable_that_is_no_object(program: Program, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", text)
    with pytest.raises(UsageError, match="TRTLLM_ADD_OUTPUT"):
        planned(program)


def test_documented_variable_that_matches_nothing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", '{"LLaMAForCausalLM/transformer/layers/0/CAST_0": "mm_default"}')
    with pytest.raises(UnknownNameError, match="CAST_0"):
        planned(program)


def test_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    plan = glass.build(checkpoint, tmp_path / "e", backend="eager", dry_run=True, add_output=["mm_default=q"])
    assert (plan.output_dir, plan.backend, plan.kind, plan.dtype) == (
        str(tmp_path / "e"),
        "eager",
        "causal_lm",
        "float32",
    )
    assert [entry.name for entry in plan.added_outputs] == ["q"]
    assert list(tmp_path.iterdir()) == []


def test_plan_counts_bytes(program: Program, model: Any) -> None:
    plan = planned(program, "layers.0.mlp", "layers.0.mlp.gate_proj", max_batch_size=2, max_seq_len=10)
    width = model.config.hidden_size + model.config.intermediate_size
    assert plan.decode_output_bytes == 2 * 1 * width * 4
    assert plan.prefill_output_bytes == 2 * 10 * width * 4
    assert plan.cache_bytes == 2 * 2 * (2 * 2 * 10 * 16) * 4
    assert plan.weights_bytes >= sum(p.nbytes for p in model.parameters())


def test_byte_budget(program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = ["layers.0.mlp", "layers.0.mlp.gate_proj"]
    engine = eager(program, tmp_path / "e", outputs=requests, max_batch_size=1, byte_budget=300)
    assert [entry.name for entry in engine.manifest.added_outputs] == ["model.layers.0.mlp"]
    assert "byte budget of 300" in engine.manifest.left_out["model.layers.0.mlp.gate_proj"]
    assert "gate_proj is left out" in caplog.text


def test_program_is_built_as_it_is(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The outputs of this form are those asked for: neither the variable nor taps add any.
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", '{"mm_default": "q"}')
    engine = eager(program, tmp_path / "e", outputs=["linear_3"], max_seq_len=16)
    assert [(entry.name, entry.node) for entry in engine.manifest.added_outputs] == [("linear_3", "linear_3")]
    assert engine.manifest.max_seq_len == 16 and engine.manifest.weights == "all"


def test_shared_weights_are_stored_once(tmp_path: Path) -> None:
    model = models.gemma3()
    engine = glass.build(model, tmp_path / "e", backend="eager")
    stored = files.load_weights(engine.directory / files.WEIGHTS)
    head, embedding = stored["user.lm_head.weight"], stored["user.model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    total = sum({t.data_ptr(): t.nbytes for t in stored.values()}.values())
    assert (engine.directory / files.WEIGHTS).stat().st_size < total * 1.1


def test_weights_survive(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    weights = {
        "a": base,
        "same": base,
        "column": base[:, 1],
        "row": base[1],
        "empty": torch.empty(0, 2),
        "n": torch.tensor(3),
    }
    files.save_weights(weights, tmp_path / "w.safetensors")
    loaded = files.load_weights(tmp_path / "w.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("links", [True, False])
def test_two_engines_of_one_program_share_the_file_of_weights_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    first, second = tmp_path / "first", tmp_path / "second"
    files.save_weights(weights, first)
    loaded = files.load_weights(first)
    files.save_weights(weights, second, same=first)
    again = files.load_weights(second)
    assert first.samefile(second) is links
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert all((again[name].data_ptr() == loaded[name].data_ptr()) is links for name in weights)


def test_pass_is_applied_and_recorded(checkpoint: Path, engine: Engine, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import torch\n"
        "def double(gm):\n"
        "    node = next(n for n in gm.graph.nodes if 'silu' in n.name)\n"
        "    with gm.graph.inserting_after(node):\n"
        "        new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))\n"
        "    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)\n"
    )
    changed = glass.build(checkpoint, tmp_path / "changed", backend="eager", passes=[f"{code}:double"])
    assert changed.manifest.passes == (f"{code}:double",)
    ids = torch.tensor([[5, 6, 7]])
    a, b = engine.session(1, 4).prefill(ids), changed.session(1, 4).prefill(ids)
    assert not torch.allclose(a, b)


GPT = """
import glassengine as glass
from glassengine.testing import models
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

class Layer(LlamaDecoderLayer, glass.compat.NetworkOutputs):
    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        attention_output, _ = self.self_attn(hidden_states, position_embeddings=position_embeddings, **kwargs)
        hidden_states = residual + attention_output

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)

        hidden_states = self.mlp(hidden_states)
        # register as model output
        # ------------------------------------------------------
        self.register_network_output('mlp_output', hidden_states)
        # ------------------------------------------------------

        hidden_states = residual + hidden_states
        return hidden_states

def model():
    model = models.llama()
    for layer in model.model.layers:
        layer.__class__ = Layer
    return model
"""


def test_documented_taps_of_all_layers(tmp_path: Path) -> None:
    # The model code is the user's: the document's four lines within a decoder layer.
    (tmp_path / "gpt.py").write_text(GPT)
    spec = f"{tmp_path / 'gpt.py'}:model"
    engine = glass.build(spec, tmp_path / "e", backend="eager", add_output=["layers.*.mlp_output", "layers.*.mlp"])
    names = ["model.layers.0.mlp_output", "model.layers.1.mlp_output"]
    assert list(engine.added_outputs)[:2] == names
    session = engine.session(1, 8, debug=True)
    session.prefill(torch.tensor([[5, 6, 7]]))
    for name in names:
        assert session.debug_buffers[name].shape == (1, 3, 64)
        assert torch.equal(session.debug_buffers[name], session.debug_buffers[name.removesuffix("_output")])
    # The release build of the same code has none of it.
    release = glass.build(spec, tmp_path / "r", backend="eager")
    assert list(release.added_outputs) == []
    targets = {str(node.target) for node in release.program.graph.nodes}
    assert targets and not any("mark" in target for target in targets)


def test_s15_builds_into_one_directory(tmp_path: Path) -> None:
    def made(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / files.FILE).write_text(name)
        return path

    target = tmp_path / "engine"
    files._replace(made("first"), target, overwrite=False)
    # Both saw no engine when they began.
    with pytest.raises(UsageError, match="the engine exists already"):
        files._replace(made("second"), target, overwrite=False)
    assert (target / files.FILE).read_text() == "first"
    files._replace(made("third"), target, overwrite=True)
    assert (target / files.FILE).read_text() == "third"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "second"]

    def damaged() -> None:
        raise CorruptError("planted")

    with pytest.raises(CorruptError):
        files.load_unless_replaced(target, target.stat().st_ino, damaged)
    with pytest.raises(UsageError, match="another build has replaced the engine"):
        files.load_unless_replaced(target, target.stat().st_ino + 1, damaged)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compilers be slow, processors two, and this process a command."""
    monkeypatch.setattr(EagerBackend, "capabilities", replace(EagerBackend.capabilities, compiles_slowly=True))
    monkeypatch.setattr(environment, "num_cpus", lambda: 2)
    monkeypatch.setattr(environment, "owns_process", lambda: True)


@pytest.fixture
def two_layers() -> Program:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    return export_program(load_model(module), inputs={"input": torch.randn(4, 8)})


def built(two_layers: Program, folder: Path, workers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build, and return the engine and what was compiled in this process."""
    monkeypatch.setattr(build_module, "Processes", workers)
    here: list[Path] = []
    build = EagerBackend.build
    monkeypatch.setattr(EagerBackend, "build", lambda *given: (here.append(given[-1]), build(*given))[1])
    compiler = build_module.compiler_beside("eager", "")
    with build_module.compiled_beside(two_layers, compiler, ["1/gelu.0"]) as compiled:
        assert compiled is not None
        options: Any = {"backend": "eager", "outputs": ["1/gelu.0"], "made": BuiltParts(compiled)}
        return build_program(two_layers, folder / "engine", **options), here


def in_process(function: Callable[[Any], Any], count: int) -> InProcess:
    return InProcess(function)


class _Dead(InProcess):
    def run(self, requests: Any, *, attempts: int = 1) -> Iterator[Any]:
        yield Died("killed by SIGKILL")


@pytest.mark.parametrize("workers", [in_process, pytest.param(build_module.Processes, marks=pytest.mark.slow)])
def test_the_engine_is_the_one_that_is_built_here(
    slow: None, two_layers: Program, workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, here = built(two_layers, tmp_path, workers, monkeypatch)
    assert all("glassengine-beside-" in str(path) for path in here)
    x = torch.randn(4, 8)
    alone = build_program(two_layers, tmp_path / "alone", backend="eager")
    ours, theirs = (next(iter(one.forward(inputs={"input": x}).outputs.values())) for one in (engine, alone))
    assert torch.equal(ours, theirs)
    assert [added.site for added in engine.manifest.added_outputs] == ["1/gelu.0"]


def test_where_the_other_process_dies_this_one_compiles(
    slow: None, two_layers: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, here = built(two_layers, tmp_path, lambda function, count: _Dead(function), monkeypatch)
    assert len(here) == 1 and engine.forward(inputs={"input": torch.randn(4, 8)}).outputs


def test_only_a_command_on_several_processors_starts_another_process(
    slow: None, two_layers: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts() -> bool:
        with build_module.compiled_beside(two_layers, build_module.compiler_beside("eager", ""), ()) as compiled:
            return compiled is not None

    monkeypatch.setattr(build_module, "Processes", lambda function, count: _Dead(function))
    assert starts()
    with monkeypatch.context() as one:
        one.setattr(environment, "num_cpus", lambda: 1)
        assert not starts()
    with monkeypatch.context() as one:
        one.setattr(environment, "owns_process", lambda: False)
        assert not starts()
    monkeypatch.setattr(build_module, "_MOST_BYTES", 8)
    assert not starts()
