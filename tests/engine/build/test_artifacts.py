"""Build artifacts: what is there, that it runs, that nothing is overwritten, and what a failed build leaves."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import glassengine as glass
from glassengine import commands
from glassengine.backends.eager import EagerBackend
from glassengine.capture.observers import run_program
from glassengine.engine import Engine
from glassengine.engine.build import artifacts
from glassengine.errors import BackendError, CorruptError, UsageError
from glassengine.program.representation.artifacts import read_manifest
from glassengine.program.representation.outputs import add_outputs
from glassengine.writing import held
from tests import children
from tests.engine.conftest import INPUTS, MLP

STAGES = ["00-exported", "01-functional", "02-pass-double", "03-outputs"]
PASS = """
import torch
def double(gm):
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.relu.default)
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
"""


@dataclass
class Built:
    engine: Engine
    directory: Path

    def text(self, name: str) -> str:
        return (self.directory / name).read_text()


def mlp(directory: Path, name: str = "e", **options: Any) -> Engine:
    torch.manual_seed(0)
    options = {"backend": "eager", "inputs": INPUTS, **options}
    return glass.build(MLP(), directory / name, **options)


@pytest.fixture(scope="module")
def language_model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a language model, built as the documents do it: with the variable."""
    where = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEBUG_ARTIFACTS_DIR", str(where / "a"))
        requests = ("mm_default", "gpt_attention_plugin")
        return Built(glass.build(checkpoint, where / "e", backend="eager", add_output=requests), where / "a")


@pytest.fixture(scope="module")
def with_pass(tmp_path_factory: pytest.TempPathFactory) -> Built:
    where = tmp_path_factory.mktemp("passes")
    (where / "mine.py").write_text(PASS)
    engine = mlp(where, passes=[f"{where / 'mine.py'}:double"], artifacts=where / "a", backend="onnxruntime")
    return Built(engine, where / "a")


def test_documented_files(language_model: Built) -> None:
    found = {path.name for path in language_model.directory.iterdir()}
    assert found == {
        "manifest.json", "index.html", "00-exported", "01-functional", "02-outputs", "graph_module.py", "graph.txt",
        "eager_network_def.py", "builder_config.json", "plugin.txt",
    }  # fmt: skip
    last = language_model.directory / "02-outputs"
    assert {path.name for path in last.iterdir()} == {
        "graph_module.py", "graph.txt", "graph.json", "diff-from-previous.txt"
    }  # fmt: skip
    assert language_model.text("graph.txt") == (last / "graph.txt").read_text()
    assert language_model.text("graph_module.py") == (last / "graph_module.py").read_text()


def test_names_of_the_listing_are_those_that_add_output_takes(language_model: Built) -> None:
    lines = language_model.text("graph.txt").splitlines()
    names = {line.partition(":")[0] for line in lines if " = call_function " in line}
    sites = language_model.engine.sites
    assert names >= {site.node for site in sites if site.kind == "op"}
    line = next(line for line in lines if line.startswith("linear: "))
    assert line.startswith("linear: float32[batch, sequence, 64] = call_function aten.linear.default(%")
    assert line.endswith("# model.layers.0.self_attn.q_proj/linear.0 = model.layers.0.self_attn.q_proj")
    code = language_model.text("graph_module.py")
    assert re.search(
        r"^        linear = torch\.ops\.aten\.linear\.default\(.*q_proj/linear\.0.*llama\.py:\d+", code, re.M
    )


RUNNER = """
import importlib.util, json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
weights_of, inputs, out = sys.argv[1:4]
for path in sys.argv[4:]:
    spec = importlib.util.spec_from_file_location("graph_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = module.run(module.load_weights(weights_of), load_file(inputs))
    results = {name: tensor.contiguous() for name, tensor in results.items()}
    save_file(results, Path(out) / (Path(path).parent.name + ".safetensors"))
"""


def test_graph_module_computes_what_the_program_computes(language_model: Built, tmp_path: Path) -> None:
    engine = language_model.engine
    assert engine.program.layout is not None
    inputs = engine.program.layout.allocate(2, 6, torch.float32)
    inputs = {name: torch.randn(tensor.shape) for name, tensor in inputs.items()}
    inputs["input_ids"] = torch.tensor([[3, 4], [5, 6]])
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]])
    inputs["position_ids"] = torch.tensor([[2, 3], [1, 2]])
    inputs["cache_position"] = torch.tensor([2, 3])
    save_file(inputs, tmp_path / "inputs.safetensors")
    stages = [language_model.directory / name / "graph_module.py" for name in ("00-exported", "02-outputs")]
    command = [sys.executable, "-c", RUNNER, engine.directory, tmp_path / "inputs.safetensors", tmp_path, *stages]
    children.run(list(map(str, command)), check=True, timeout=600)
    executed = add_outputs(engine.program, ["linear", "scaled_dot_product_attention"])
    expected = run_program(executed, inputs)
    found = load_file(tmp_path / "02-outputs.safetensors")
    assert found.keys() == expected.keys() and "dbg.linear" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    traced = load_file(tmp_path / "00-exported.safetensors")
    torch.testing.assert_close(traced["logits"], expected["logits"], rtol=1e-4, atol=1e-5)


def test_graph_module_runs_by_itself_with_random_weights(with_pass: Built, tmp_path: Path) -> None:
    # From an empty directory: the file needs nothing beside it.
    command = [sys.executable, str(with_pass.directory / "graph_module.py")]
    done = children.run(command, cwd=tmp_path, check=True, timeout=600)
    assert re.search(r"^output: torch\.float32 \[\d, 8\] min .* mean .* max ", done.stdout, re.M)
    assert "dbg.relu: torch.float32" in done.stdout
    wrong = children.run([*command, "nosuch.pt"], cwd=tmp_path, timeout=600)
    assert wrong.returncode == 1 and "got: nosuch.pt" in wrong.stderr and "Traceback" not in wrong.stderr


def test_no_weights_are_embedded(language_model: Built) -> None:
    embedding = language_model.engine.program.exported.state_dict["user.model.embed_tokens.weight"]
    value = f"{embedding[5, 5].item():.6f}"
    total = 0
    for path in language_model.directory.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":  # of a test that runs one of them
            assert value not in path.read_text()
            total += path.stat().st_size
    assert total < 3_000_000


def test_stages_and_their_differences(with_pass: Built) -> None:
    assert sorted(path.name for path in with_pass.directory.iterdir() if path.is_dir()) == STAGES
    assert not (with_pass.directory / "00-exported" / "diff-from-previous.txt").exists()
    lines = with_pass.text("02-pass-double/diff-from-previous.txt").splitlines()
    assert lines[0] == "# nodes: 1 added, 0 removed, 1 changed"
    assert [line[:9] for line in lines[1:]] == ["+ mul_tens", "- linear_1", "+ linear_1"] or lines[1].startswith(
        "+ mul"
    )
    assert "aten.mul.Tensor(%relu, 2.0)" in lines[1]
    assert with_pass.text("03-outputs/diff-from-previous.txt").startswith("# nodes: 0 added, 0 removed, 1 changed")


def test_manifest(with_pass: Built) -> None:
    manifest = read_manifest(with_pass.directory)
    assert manifest["complete"] and manifest["failure"] is None
    assert [entry["directory"] for entry in manifest["stages"]] == STAGES
    assert manifest["versions"]["torch"] == importlib.metadata.version("torch")
    assert manifest["backend"] == "onnxruntime" and manifest["passes"][0].endswith("mine.py:double")
    listed = set(manifest["files"]) | {"manifest.json"}
    assert listed == {str(p.relative_to(with_pass.directory)) for p in with_pass.directory.rglob("*") if p.is_file()}
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == artifacts.hash_file(with_pass.directory / name)


def test_secrets_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["glass", "build", "--hf-token", "hunter2"])
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    mlp(tmp_path, artifacts=tmp_path / "a")
    assert "hunter" not in (tmp_path / "a" / "manifest.json").read_text()
    assert "hunter" not in (tmp_path / "a" / "index.html").read_text()


def test_builder_config_has_the_options_in_effect(language_model: Built, with_pass: Built) -> None:
    assert json.loads(language_model.text("builder_config.json"))["add_output"] == [
        "mm_default",
        "gpt_attention_plugin",
    ]
    options = json.loads(with_pass.text("builder_config.json"))
    assert options["backend"] == "onnxruntime"
    assert options["backend_options"]["providers"] == ["CPUExecutionProvider"]
    assert options["backend_options"]["opset"] >= 18


def test_network_names_layer_and_site_above_each_tensor(with_pass: Built) -> None:
    text = with_pass.text("onnxruntime_network_def.py")
    compile(text, "network", "exec")  # readable as Python
    block = re.search(r"# layer relu  # \./relu\.0\n#   (.*)\n(.*) = network\.Relu\((\w+)\)", text)
    assert block is not None and block[1].startswith("dbg.relu: float32[")
    assert "network.output(output, name='output')" in text
    assert "what ONNX Runtime runs" in with_pass.text("onnxruntime_optimized_network_def.py")


def test_plugins(language_model: Built, with_pass: Built) -> None:
    text = language_model.text("plugin.txt")
    assert text.startswith("scaled_dot_product_attention: aten.scaled_dot_product_attention.default  # model.layers.0.")
    assert "  input   " in text and "  output  scaled_dot_product_attention: float32[batch, 4, sequence, 16]" in text
    fused = with_pass.text("plugin.txt")  # ONNX Runtime's own fusion
    assert re.match(r".*: com\.microsoft\.FusedGemm  # relu.*\n  input   hidden_states\n", fused)
    assert "  activation = 'Relu'" in fused


def test_no_plugins(tmp_path: Path) -> None:
    mlp(tmp_path, artifacts=tmp_path / "a")
    assert (tmp_path / "a" / "plugin.txt").read_text() == "none\n"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values["href"]] if tag == "a" and values.get("href") else []
        self.outside += [tag] if tag in ("link", "img", "iframe") or "src" in values else []


def test_index_links_to_everything_and_needs_nothing(with_pass: Built) -> None:
    page = Links()
    page.feed(with_pass.text("index.html"))
    assert page.outside == []
    targets = {link for link in page.found if not link.startswith("#")}
    assert all((with_pass.directory / target).is_file() for target in targets)
    ids = set(re.findall(r'id="([^"]+)"', with_pass.text("index.html")))
    assert {link[1:] for link in page.found if link.startswith("#")} <= ids
    listed = {name for name in read_manifest(with_pass.directory)["files"] if not name.endswith("graph.json")}
    assert listed - {"index.html"} <= targets
    assert "aten.mul.Tensor(%relu, 2.0)" in with_pass.text("index.html")


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEBUG_ARTIFACTS_DIR", raising=False)
    mlp(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_directory_within_the_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be inside of the engine"):
        mlp(tmp_path, artifacts=tmp_path / "e" / "artifacts")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_writes_none(tmp_path: Path) -> None:
    glass.build(MLP(), tmp_path / "e", backend="eager", inputs=INPUTS, artifacts=tmp_path / "a", dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_earlier_artifacts_are_put_away_and_other_files_left(tmp_path: Path) -> None:
    where = tmp_path / "a"
    where.mkdir()
    (where / "step0.pt").write_text("of a run")
    mlp(tmp_path, "one", artifacts=where)
    first = read_manifest(where)
    mlp(tmp_path, "two", artifacts=where)
    mlp(tmp_path, "three", artifacts=where)
    assert sorted(path.name for path in where.glob("earlier-*")) == ["earlier-001", "earlier-002"]
    assert read_manifest(where / "earlier-001") == first
    assert (where / "earlier-001" / "01-functional" / "graph.txt").is_file()
    assert (where / "step0.pt").read_text() == "of a run"
    assert "earlier-002/index.html" in (where / "index.html").read_text()


def test_ranks_write_to_their_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        mlp(tmp_path, f"e{rank}", artifacts=tmp_path / "a")
    assert (tmp_path / "a" / "graph.txt").is_file() and (tmp_path / "a" / "rank1" / "graph.txt").is_file()
    assert not list((tmp_path / "a").glob("earlier-*"))


@pytest.mark.parametrize("name", ["graph_module.py", "manifest.json"])
def test_files_of_somebody_else_are_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("{}")
    with pytest.raises((UsageError, CorruptError)):
        mlp(tmp_path, artifacts=tmp_path / "a")
    assert (tmp_path / "a" / name).read_text() == "{}"
    assert not (tmp_path / "e").exists()


def test_two_builds_at_once_in_one_directory(tmp_path: Path) -> None:
    mlp(tmp_path, artifacts=tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    going_on = {**json.loads(path.read_text()), "complete": False}
    path.write_text(json.dumps(going_on))
    with held(tmp_path / "a"), pytest.raises(UsageError, match="another process is writing"):
        mlp(tmp_path, "other", artifacts=tmp_path / "a")
    assert read_manifest(tmp_path / "a") == going_on
    # The same after that process was killed.
    mlp(tmp_path, "other", artifacts=tmp_path / "a")
    assert (tmp_path / "a" / "earlier-001").is_dir()


@pytest.mark.parametrize("error", [RuntimeError("ptxas <said> no"), KeyboardInterrupt()])
def test_failed_compilation_leaves_the_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(EagerBackend, "build", fail)
    with pytest.raises(BackendError if isinstance(error, Exception) else KeyboardInterrupt):
        mlp(tmp_path, artifacts=tmp_path / "a")
    manifest = read_manifest(tmp_path / "a")
    assert not manifest["complete"] and type(error).__name__ in manifest["failure"]
    assert (tmp_path / "a" / "02-outputs" / "graph_module.py").is_file()
    assert (tmp_path / "a" / "builder_config.json").is_file()
    page = (tmp_path / "a" / "index.html").read_text()
    assert "Incomplete" in page and "<said>" not in page
    assert not (tmp_path / "e").exists()


def test_failed_export_leaves_the_traced_graph(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(gm): raise ValueError('no')")
    with pytest.raises(UsageError, match="failed"):
        mlp(tmp_path, passes=[f"{tmp_path / 'bad.py'}:bad"], artifacts=tmp_path / "a")
    manifest = read_manifest(tmp_path / "a")
    assert [entry["name"] for entry in manifest["stages"]] == ["exported", "functional"] and not manifest["complete"]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp(tmp_path, "old", artifacts=tmp_path / "a")
    before = read_manifest(tmp_path / "a")
    write = Path.write_text

    def full(self: Path, text: str, *rest: Any, **options: Any) -> int:
        if "graph.txt" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write(self, text, *rest, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"cannot write the artifacts\n.*No space left") as caught:
        mlp(tmp_path, artifacts=tmp_path / "a")
    assert "--artifacts DIR" in str(caught.value.hint)
    assert not (tmp_path / "e").exists()
    assert read_manifest(tmp_path / "a" / "earlier-001") == before
    assert not read_manifest(tmp_path / "a")["complete"]
    assert not [path for path in (tmp_path / "a").iterdir() if path.name.startswith(".")]  # nothing half written


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the artifacts"):
        mlp(tmp_path, artifacts=tmp_path / "file" / "a")
    assert not (tmp_path / "e").exists()


def test_backend_that_cannot_be_listed_is_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no listing today")

    monkeypatch.setattr(EagerBackend, "network", fail)
    engine = mlp(tmp_path, artifacts=tmp_path / "a")
    assert engine(**INPUTS[0])["output"].shape == (2, 8)
    assert "no listing today" in (tmp_path / "a" / "eager_network_def.py").read_text()
    assert "no listing today" in caplog.text


SEEDED = """
import hashlib, sys
from pathlib import Path
import torch
import glassengine as glass
from glassengine.testing import models
torch.manual_seed(0)
where = Path(sys.argv[1])
inputs = [models.vision_inputs(n) for n in (2, 3)]
glass.build(models.vision(), where / "e", backend=sys.argv[2], inputs=inputs, artifacts=where / "a")
"""
SAME = (
    "*/graph.txt",
    "*/graph.json",
    "*/graph_module.py",
    "*/diff-from-previous.txt",
    "*_network_def.py",
    "plugin.txt",
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_listings_do_not_depend_on_the_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    sides = [tmp_path / side for side in ("here", "there")]
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-c", SEEDED, str(sides[1]), backend]
    there = subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": other})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", str(sides[0]), backend])
        exec(SEEDED, {})
    assert there.wait(timeout=600) == 0
    names = [path.relative_to(sides[0]) for pattern in SAME for path in (sides[0] / "a").glob(pattern)]
    assert len(names) >= 12
    assert [n for n in names if (sides[0] / n).read_bytes() != (sides[1] / n).read_bytes()] == []
    assert commands.compare_artifacts(sides[0] / "a", sides[1] / "a").ok


def test_kernels_are_listed_with_their_nodes(native_engine: Engine) -> None:
    compiled = Built(native_engine, native_engine.directory.with_name("artifacts"))
    text = compiled.text("inductor_network_def.py")
    compile(text, "network", "exec")
    assert re.search(r"# layer \S+:\d+  # .*relu \(\./relu\.0\)", text)
    assert "linear_1 (proj/linear.0)" in text
    assert "attributes to no kernel: linear." in text  # fused into the next one: said, not left out
    assert "cpp_fused" in compiled.text("inductor_kernel.cpp") or "run_impl" in compiled.text("inductor_wrapper.cpp")
    assert str(Path(torch.__file__).parent) not in compiled.text("inductor_wrapper.cpp")
    assert json.loads(compiled.text("builder_config.json"))["backend_options"]["freezing"] is True
