"""Files of a hostile hand: every kind that is read, with code, libraries, pickles and links wherever they could be."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

import glassengine as glass
from glassengine.engine.manifest import FILE
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.writing import document_checksum
from tests.fuzz import kinds
from tests.trust.test_stored_names import arguments, called, changed, factory, keyed

Line = list[str]
MARK = "glass-evil-mark"


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / MARK}"

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


class Hand:
    """Makes hostile copies of good files, and lists the command lines that read them.

    Args:
        good: Where `kinds.make_shared` wrote.
        folder: Where hostile files lie.
        own: Where commands may write.
    """

    def __init__(self, good: Path, folder: Path, own: Path) -> None:
        self.good, self.folder, self.own = good, folder, own
        self.lines: list[Line] = []
        self.code = f"__import__('pathlib').Path({str(folder / MARK)!r}).touch()"
        (folder / "secret").write_bytes(bytes(1 << 16))
        self.plant(folder)
        self.library = folder / "evil.so"
        source = folder / "evil.c"
        source.write_text(
            f'#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{folder / MARK}", 0600); }}'
        )
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(self.library), str(source)], check=True)

    def plant(self, folder: Path) -> None:
        """Put Python beside, under the names of what is imported."""
        text = f"MARK = {MARK!r}\n{self.code}\ndef factory():\n    {self.code}\n"
        for name in (
            "evil_module",
            "evil",
            "sitecustomize",
            "torch",
            "transformers",
            "onnx",
            "configuration_evil",
            "setup",
        ):
            (folder / f"{name}.py").write_text(text)

    def engine(self, name: str, source: str, change: Callable[[Path], None], **manifest: Any) -> Path:
        """Copy an engine, change its files, and make its checksums right."""
        target = Path(shutil.copytree(self.good / source, self.folder / name))
        self.plant(target)
        change(target)
        data = json.loads((target / FILE).read_text())
        for key, value in manifest.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value
        files = [entry["path"] for entry in data["files"] if not entry["path"].startswith("main/")]
        files += [path.relative_to(target).as_posix() for path in target.glob("main/**/*") if path.is_file()]
        contents = {path: (target / path).read_bytes() for path in files}
        data["files"] = [
            {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, content in contents.items()
        ]
        del data["checksum"], data["seal"]
        (target / FILE).write_text(json.dumps(data | {"checksum": document_checksum(data), "seal": "0" * 64}))
        self.lines += [["sites", str(target)], ["run", str(target), "--inputs", str(self.good / "x.pt")]]
        return target

    def programs(self) -> None:
        """Engines of `eager` and `.pt2` files that name what is not theirs."""
        touch = ("", "as_string", f"touch {self.folder / MARK}")
        file = [("filename", "as_string", str(self.folder / MARK)), ("shared", "as_bool", True), ("size", "as_int", 8)]
        changes = {
            "library": keyed("ctypes:cdll", str(self.library)),
            "factory": factory("evil_module", "factory"),
            "argument": arguments("x", f"y={self.code}"),
            "callable": called("torch.ops.higher_order.wrap", ("", "as_operator", "torch.os.system"), touch),
            "target": called("torch.os.system", touch),
            "file": called("torch.ops.aten.from_file.default", *file),
        }
        good = self.folder / "good.pt2"
        torch.export.save(torch.export.export(kinds.small(), (kinds.X,)), good)
        for name, change in changes.items():
            self.lines.append(["sites", str(changed(good, self.folder / f"{name}.pt2", change))])

            def program(engine: Path, change: Any = change) -> None:
                for path in (engine / "program.pt2", engine / "main" / "program.pt2"):
                    changed(path, path.with_suffix(".new"), change)
                    path.with_suffix(".new").rename(path)

            self.engine(f"eager-{name}", "small", program)
        pickled = self.folder / "pickled.pt2"
        with zipfile.ZipFile(good) as old, zipfile.ZipFile(pickled, "w") as new:
            for info in old.infolist():
                is_inputs = info.filename.endswith("sample_inputs/model.pt")
                new.writestr(info.filename, self.torch_pickle() if is_inputs else old.read(info))
        self.lines.append(["sites", str(pickled)])

    def torch_pickle(self) -> bytes:
        path = self.folder / "pickle.pt"
        torch.save({"x": Runs(self.folder)}, path)
        return path.read_bytes()

    def manifests(self) -> None:
        """Engines that name factories, modules, back-ends and libraries."""

        def nothing(engine: Path) -> None:
            pass

        def weights(engine: Path) -> None:
            (engine / "weights.safetensors").write_bytes(pickle.dumps(Runs(self.folder)))

        def native(engine: Path) -> None:
            shutil.copy(self.library, engine / "main" / "model.so")
            shutil.copy(self.library, engine / "main" / "model.pt2")

        def linked(engine: Path) -> None:
            (engine / "weights.safetensors").unlink()
            (engine / "weights.safetensors").symlink_to(self.folder / "secret")

        self.engine("factory", "small", nothing, model={"directory": "evil.py:factory"}, weights="constants")
        self.engine("module", "small", nothing, model={"directory": "evil_module:factory"}, weights="constants")
        for number, backend in enumerate(("evil_module", "evil_module:factory", "inductor", "../evil", "tensorrt_rtx")):
            self.engine(f"backend{number}", "small", native, backend=backend, requires={})
        self.engine("pickled-weights", "small", weights)
        self.engine("linked-weights", "small", linked)

    def texts(self) -> None:
        """Engines that generate: templates, tokenizers and configurations that name code."""
        templates = {
            "globals": "{{ cycler.__init__.__globals__.os.system('touch " + str(self.folder / MARK) + "') }}",
            "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "include": "{% include '" + str(self.folder / "secret") + "' %}",
            "file": "{{ self._TemplateReference__context.environment.loader.get_source(none, 'secret') }}",
        }
        chat = self.own / "chat.json"
        chat.write_text(json.dumps([{"role": "user", "content": "hello"}]))
        said = ["--max-new-tokens", "1"]
        for name, text in templates.items():

            def template(engine: Path, text: str = text) -> None:
                (engine / "chat_template.jinja").write_text(text)

            target = self.engine(f"template-{name}", "language", template)
            del self.lines[-2:]
            self.lines.append(["run", str(target), "--chat", str(chat), *said])

        def remote(engine: Path) -> None:
            for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
                settings = json.loads((engine / file).read_text())
                code = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", "evil.T"]}
                settings |= {"auto_map": code, "tokenizer_class": "EvilTokenizer", "custom_generate": "evil.py"}
                (engine / file).write_text(json.dumps(settings))

        target = self.engine("remote-tokenizer", "language", remote)
        self.lines[-1] = ["run", str(target), "--input-text", "a", *said]
        self.lines.append(["compare", str(self.good / "language"), str(target), "--input-text", "a", *said])

    def checkpoints(self) -> None:
        remote = Path(shutil.copytree(self.good / "model", self.folder / "remote"))
        config = json.loads((remote / "config.json").read_text())
        code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (remote / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": code}))
        self.plant(remote)
        pickled = self.folder / "pickled"
        save_checkpoint(kinds.language_model(), pickled)
        (pickled / "model.safetensors").unlink()
        torch.save({"x": Runs(self.folder)}, pickled / "pytorch_model.bin")
        for path in (remote, pickled):
            self.lines.append(["sites", str(path)])

    def values(self) -> None:
        """Tensors: pickles, object arrays; what is beside engines and recordings of others."""
        (self.folder / "x.pt").write_bytes(self.torch_pickle())
        np.savez(self.folder / "x.npz", x=np.array([Runs(self.folder)], dtype=object))
        (self.folder / "x.pkl").write_bytes(pickle.dumps(Runs(self.folder)))
        shutil.copy(self.folder / "x.pkl", self.folder / "x.npy")
        for end in ("pt", "npz", "npy", "pkl"):
            file = str(self.folder / f"x.{end}")
            self.lines += [["run", str(self.good / "small"), "--inputs", file], ["show", file]]
        recording = Path(shutil.copytree(self.good / "record-a", self.folder / "recording"))
        self.plant(recording)
        shutil.copy(self.folder / "x.pkl", recording / "step0.pt")
        self.lines += [["show", str(recording)], ["compare", str(self.good / "record-b"), str(recording)]]
        dump = self.folder / "dump"
        (dump / "step0" / "rank0" / "dump_tensor_data").mkdir(parents=True)
        shutil.copy(self.folder / "x.pt", dump / "step0" / "rank0" / "dump_tensor_data" / "a.pt")
        one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "data_name": "a.pt"}
        data = {"task": "tensor", "data": {"Module.m.M.forward.0": {"input_args": [one]}}}
        (dump / "step0" / "rank0" / "dump.json").write_text(json.dumps(data))
        self.lines += [["show", str(dump), "--values"], ["compare", str(dump), str(dump)]]
        artifacts = Path(shutil.copytree(self.good / "artifacts", self.folder / "artifacts"))
        self.plant(artifacts)
        for path in artifacts.rglob("*.py"):
            path.write_text(self.code)
        self.lines += [["compare", str(self.good / "artifacts"), str(artifacts)]]

    def snapshots(self) -> None:
        made = self.own / "made"
        made.mkdir()
        kinds.snapshot(made, self.good)
        target = Path(shutil.copytree(made / "it", self.folder / "snapshot"))
        self.plant(target)
        for path in target.rglob("*.py"):
            path.write_text(self.code)
        line = str(target)
        self.lines += [["snapshot", "show", line], ["replay", line], ["show", line], ["doctor", "--json"]]

    def onnx(self) -> None:
        """ONNX files, alone and in engines of runtimes that are installed."""
        changes = {"memory": self._memory, "absolute": self._absolute, "linked": self._linked, "custom": self._custom}
        weights = torch.ones(4, 4).numpy()

        def value(name: str) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4])

        for name, change in changes.items():
            tensor = onnx.numpy_helper.from_array(weights, "w")
            node = helper.make_node("MatMul", ["x", "w"], ["y"], name=f'"), {self.code}, ("')
            graph = helper.make_graph([node], self.code, [value("x")], [value("y")], [tensor])
            opset = [helper.make_opsetid("", 18)]
            model = helper.make_model(graph, opset_imports=opset, ir_version=10)
            folder = self.folder / f"onnx-{name}"
            folder.mkdir()
            change(model, folder)
            (folder / "m.onnx").write_bytes(model.SerializeToString())
            self.lines += [["sites", str(folder / "m.onnx")]]
        for backend in ("onnxruntime", "openvino"):
            if not next(info for info in glass.list_backends() if info.name == backend).available:
                continue
            module = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).eval()
            glass.build(module, self.good / backend, backend=backend, inputs={"input": kinds.X})
            torch.save({"input": kinds.X}, self.own / "input.pt")
            for name, change in changes.items():

                def graph_of(engine: Path, change: Any = change) -> None:
                    path = engine / "main" / "model.onnx"
                    model = onnx.load(path, load_external_data=False)
                    change(model, engine / "main")
                    path.write_bytes(model.SerializeToString())

                target = self.engine(f"{backend}-{name}", backend, graph_of)
                self.lines[-1] = ["run", str(target), "--inputs", str(self.own / "input.pt")]

    def _outside(self, model: Any, location: str) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        size = tensor.dims[0] * tensor.dims[1] * 4
        for key, text in (("location", location), ("offset", "4096"), ("length", str(size))):
            tensor.external_data.add(key=key, value=text)

    def _memory(self, model: Any, folder: Path) -> None:
        """To runtimes this is a place in memory."""
        self._outside(model, "*/_ORT_MEM_ADDR_/*")
        (folder / "*" / "_ORT_MEM_ADDR_").mkdir(parents=True)
        (folder / "*" / "_ORT_MEM_ADDR_" / "*").write_bytes(bytes(1 << 14))

    def _absolute(self, model: Any, folder: Path) -> None:
        self._outside(model, str(self.folder / "secret"))

    def _linked(self, model: Any, folder: Path) -> None:
        (self.folder / "hidden").mkdir(exist_ok=True)
        (self.folder / "hidden" / "secret").write_bytes(bytes(1 << 16))
        (folder / "w.bin").symlink_to(self.folder / "hidden" / "secret")
        self._outside(model, "w.bin")

    def _custom(self, model: Any, folder: Path) -> None:
        node = model.graph.node.add(op_type="Evil", domain="evil.ops", name="evil")
        node.input.append(model.graph.input[0].name)
        node.output.append("evil")
        node.attribute.add(name="library", type=onnx.AttributeProto.STRING, s=str(self.library).encode())
        model.opset_import.add(domain="evil.ops", version=1)
        model.metadata_props.add(key="custom_op_library", value=str(self.library))
        model.metadata_props.add(key="ort_config", value=json.dumps({"session_options": {"enable_profiling": 1}}))

    def candidates(self) -> None:
        """What `glass check` judges: programs of TorchScript, archives of libraries, modules, and all of the above."""
        module = kinds.small()
        torch.jit.trace(module, kinds.X).save(str(self.folder / "script.pt"))
        torch.save(module, self.folder / "module.pt")
        with zipfile.ZipFile(self.folder / "compiled.pt2", "w") as archive:
            archive.writestr("model/archive_format", "pt2")
            archive.write(self.library, "model/data/aotinductor/model/model.wrapper.so")
        for name in ("script.pt2", "script.onnx", "script.bin"):
            shutil.copy(self.folder / "script.pt", self.folder / name)
        (self.folder / "x.yaml").write_text(f"!!python/object/apply:os.system ['touch {self.folder / MARK}']")
        net = self.own / "net.py"
        net.write_text("import torch\ndef net():\n    torch.manual_seed(0)\n    return torch.nn.Linear(4, 4).eval()\n")
        torch.save({"input": kinds.X}, self.own / "input.pt")
        inputs = ["--inputs", str(self.own / "input.pt")]
        for name in ("script.pt", "script.pt2", "script.onnx", "script.bin", "module.pt", "compiled.pt2", "x.yaml"):
            self.lines += [["sites", str(self.folder / name)], ["show", str(self.folder / name)]]
        skipped = (MARK, "secret", "hidden")
        for path in sorted(path for path in self.folder.iterdir() if path.suffix not in (".py", ".c")):
            if not path.name.startswith(skipped):
                self.lines.append(["check", f"{net}:net", "--candidate", str(path), *inputs])

    def everything(self) -> list[Line]:
        for make in (
            self.programs,
            self.manifests,
            self.values,
            self.checkpoints,
            self.snapshots,
            self.texts,
            self.onnx,
            self.candidates,
        ):
            make()
        return self.lines
