"""The kinds of input that are fuzzed beside what `recording` opens: files as they should be, and what reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import glassengine as glass
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint

X = torch.arange(8, dtype=torch.float32).reshape(2, 4) / 8
TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
EVIL = "import pathlib\npathlib.Path(__file__).parent.parent.joinpath('ran').touch()\nfactory = dict\n"


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        make: Writes the files into an empty folder; the second folder has what `Shared` made.
        lines: Command lines that read it. {here} is the folder, {shared} what is not changed; a line that begins with a
            name in brackets is a function of `readers`.
        changed: Globs of the files that are changed.
        proven: Globs of files that a checksum covers: other bytes never give another answer.
        owned: Whether the directory is the format's own, so that no link leads out of it.
        code: Whether it may run code or other programs.
        slow: Whether it is left out of the tests.
        places: Whether something else than a file is put in the place of files.
        share: Of a campaign's time, beside those of other kinds.
    """

    make: Callable[[Path, Path], None]
    lines: tuple[str, ...]
    changed: tuple[str, ...] = ("**/*",)
    proven: tuple[str, ...] = ()
    owned: bool = True
    code: bool = False
    slow: bool = False
    places: bool = True
    share: float = 1.0

    def files(self, folder: Path) -> list[str]:
        """Return the files that are changed, relative to `folder`."""
        found = {path for pattern in self.changed for path in folder.glob(pattern) if path.is_file()}
        return sorted(path.relative_to(folder).as_posix() for path in found)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(torch.relu(self.fc(x))))


def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return models.llama(vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1)


def make_shared(folder: Path) -> None:
    """Write what kinds need beside their own files, and what they copy."""
    torch.save({"x": X}, folder / "x.pt")
    glass.build(small(), folder / "small", backend="eager", inputs={"x": X}, artifacts=folder / "artifacts")
    make_checkpoint(folder)
    glass.build(folder / "model", folder / "language", backend="eager", max_seq_len=64)
    for name in ("a", "b"):
        with glass.record(module := small(), folder / f"record-{name}"):
            module(X)


def make_checkpoint(folder: Path) -> None:
    save_checkpoint(language_model(), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)


def built(backend: str, **options: Any) -> Callable[[Path, Path], None]:
    return lambda here, shared: void(
        glass.build(small(), here / "it", backend=backend, inputs={"x": X}, **options), evil(here / "it")
    )


def void(*values: object) -> None:
    """Take what was worked out along the way."""


def evil(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)


def copied(name: str) -> Callable[[Path, Path], None]:
    return lambda here, shared: void(shutil.copytree(shared / name, here / "it"), evil(here / "it"))


def snapshot(here: Path, shared: Path) -> None:
    with glass.snapshots.take(here / "all", contents="inputs outputs") as taken:
        glass.load(str(shared / "small")).forward(inputs={"x": X})
    taken.written[0].rename(here / "it")
    shutil.rmtree(here / "all")


def packed(here: Path, shared: Path) -> None:
    from glassengine.cli.main import main

    snapshot(here, shared)
    assert main(["snapshot", "pack", str(here / "it"), "-o", str(here / "it.safetensors"), "-q"]) == 0
    shutil.rmtree(here / "it")


def profile(here: Path, shared: Path) -> None:
    from glassengine import spans

    engine = glass.load(str(shared / "small"))
    with glass.profiler.profile(here / "it"):
        for _ in range(2):
            engine.forward(inputs={"x": X})
            spans.step_ended()


def adapter(here: Path, shared: Path) -> None:
    folder = here / "it"
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    config = {"peft_type": "LORA", "base_model_name_or_path": str(shared / "model"), "r": 2, "lora_alpha": 6}
    config |= {"target_modules": ["q_proj"], "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    size = language_model().get_parameter("model.layers.0.self_attn.q_proj.weight").shape
    tensors = {f"{module}.lora_A.weight": torch.ones(2, size[1]), f"{module}.lora_B.weight": torch.ones(size[0], 2)}
    save_file(tensors, folder / "adapter_model.safetensors")


def sharded(here: Path, shared: Path) -> None:
    folder = shutil.copytree(shared / "model", here / "it")
    (folder / "model.safetensors").unlink()
    tensors = {name: value.contiguous() for name, value in language_model().state_dict().items()}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / file, {"format": "pt"})
    table = {key: file for file, keys in parts.items() for key in keys}
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoint_bin(here: Path, shared: Path) -> None:
    folder = shutil.copytree(shared / "model", here / "it")
    (folder / "model.safetensors").unlink()
    torch.save(language_model().state_dict(), folder / "pytorch_model.bin")


def onnx(here: Path, shared: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    node = helper.make_node
    weight = numpy_helper.from_array(torch.ones(4, 4).numpy(), "w")
    shape = numpy_helper.from_array(torch.tensor([-1, 4]).numpy(), "shape")
    branches = [
        helper.make_graph([node(op, ["h"], [op])], op, [], [_value(op, TensorProto.FLOAT, ["n", 4])])
        for op in ("Identity", "Neg")
    ]
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="product"),
        node("Reshape", ["h", "shape"], ["r"]),
        node("ReduceSum", ["r"], ["summed"], keepdims=0),
        node("Reshape", ["summed", "one"], ["total"]),
        node("Greater", ["total", "zero"], ["some"]),
        node("If", ["some"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    zero = numpy_helper.from_array(torch.zeros(1).numpy(), "zero")
    graph = helper.make_graph(
        nodes,
        "g",
        [_value("x", TensorProto.FLOAT, ["n", 4])],
        [_value("y", TensorProto.FLOAT, ["n", 4])],
        [weight, shape, zero, numpy_helper.from_array(torch.tensor([1]).numpy(), "one")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (here / "it").mkdir()
    save(model, here / "it" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=64)


def _value(name: str, dtype: int, shape: Any) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, dtype, shape)


def exported(here: Path, shared: Path) -> None:
    torch.export.save(torch.export.export(small(), (X,)), here / "m.pt2")


def tensor_files(here: Path, shared: Path) -> None:
    import numpy as np

    torch.save({"x": X}, here / "x.pt")
    np.savez(here / "x.npz", x=X.numpy())
    save_file({"x": X}, here / "x.safetensors")
    (here / "x.json").write_text(json.dumps({"x": X.tolist()}))


def token_files(here: Path, shared: Path) -> None:
    import numpy as np

    ids = torch.tensor([[1, 5, 6], [1, 7, 8]])
    torch.save({"input_ids": ids}, here / "ids.pt")
    np.savez(here / "ids.npz", input_ids=ids.numpy())
    save_file({"input_ids": ids}, here / "ids.safetensors")
    (here / "ids.json").write_text(json.dumps(ids.tolist()))


def prompt_files(here: Path, shared: Path) -> None:
    (here / "p.txt").write_text("hello\nanother prompt\n")
    (here / "p.json").write_text(json.dumps(["hello", "you"]))
    (here / "p.jsonl").write_text('"hello"\n"you"\n')
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    (here / "c.json").write_text(json.dumps(talk))
    (here / "c.jsonl").write_text(f"{json.dumps(talk)}\n{json.dumps(talk)}\n")


def map_file(here: Path, shared: Path) -> None:
    rules = [
        {"baseline": "fc", "candidate": "fc", "baseline_ops": [{"op": "reshape", "shape": [2, 4]}]},
        {"baseline": "out", "candidate": "out"},
    ]
    (here / "map.json").write_text(json.dumps({"rules": rules}))
    (here / "names.json").write_text(json.dumps({"fc": "fc", "out": "out"}))


def cache(here: Path, shared: Path) -> None:
    import readers

    readers.fill_cache(here / "it")


def server(here: Path, shared: Path) -> None:
    (here / "request").write_bytes(b'{"steps": 1, "timeout_s": 0.01}')


def command_lines(here: Path, shared: Path) -> None:
    lines = (
        "compare {shared}/record-a {shared}/record-b --rtol 0.1 --show-only fc --json -",
        "show {shared}/record-a fc* --step 0 --rank 0 --values",
        "run {shared}/small --inputs {shared}/x.pt --debug fc --seed 3 --top-p 0.5",
        "run {shared}/language --input-text a --max-new-tokens 2 --temperature 0.5 --top-k 3",
        "sites {shared}/small re:fc.* --json",
        "record {shared}/model --inputs hello -o r",
        "build {shared}/model out --backend eager --max-batch-size 2 --max-seq-len 8 --dry-run",
        "profile --capture localhost:1 --steps 2",
        "replay {shared}/small --bisect --backend eager",
        "snapshot show {shared}/small --statistics",
        "doctor --json",
    )
    for number, line in enumerate(lines):
        (here / f"line{number}.json").write_text(json.dumps(line.split()))


_TENSOR_ENDS = ("pt", "npz", "safetensors", "json")
_RUN = "run {here}/it --inputs {shared}/x.pt --json"
_SAY = "run {here}/it --input-text hello --max-new-tokens 1 --json"

KINDS: dict[str, Kind] = {
    "engine": Kind(
        built("eager"),
        (_RUN, "sites {here}/it --json", "run {here}/it --inputs {shared}/x.pt --snapshot {here}/snap"),
        changed=("it/**/*[!y]",),
        proven=("it/*.safetensors", "it/**/program.pt2", "it/main/*"),
    ),
    "engine_onnxruntime": Kind(built("onnxruntime"), (_RUN, "sites {here}/it --json"), proven=("it/main/*",)),
    "engine_openvino": Kind(built("openvino"), (_RUN,), proven=("it/main/*",), slow=True),
    "engine_inductor": Kind(built("inductor"), (_RUN,), proven=("it/main/*",), code=True, slow=True),
    "engine_that_generates": Kind(
        copied("language"),
        (_SAY, "compare {shared}/language {here}/it --input-text a --max-new-tokens 1 --json -"),
        changed=("it/*.json", "it/*.jinja", "it/main/*"),
    ),
    "tokenizer": Kind(
        copied("language"),
        (_SAY, "run {here}/it --chat {shared}/chat.json --max-new-tokens 1"),
        changed=("it/tokenizer*.json", "it/*.jinja", "it/generation_config.json", "it/config.json"),
    ),
    "snapshot": Kind(
        snapshot,
        (
            "snapshot show {here}/it --json --statistics",
            "replay {here}/it --json -",
            "replay {here}/it --compare",
            "snapshot show {here}/it",
        ),
        proven=("it/*",),
    ),
    "snapshot_packed": Kind(
        packed, ("snapshot show {here}/it.safetensors --json", "replay {here}/it.safetensors"), owned=False
    ),
    "profile": Kind(
        profile, ("profile {here}/it --json", "profile {here}/it", "profile {here}/it --against {here}/it")
    ),
    "artifacts": Kind(
        copied("artifacts"),
        ("compare {shared}/artifacts {here}/it", "compare {here}/it {shared}/artifacts --json -"),
    ),
    "adapter": Kind(adapter, ("[load_adapter]",), owned=False),
    "checkpoint": Kind(copied("model"), ("[load_model]",), owned=False),
    "checkpoint_sharded": Kind(sharded, ("[load_model]",), changed=("it/*model*",), owned=False),
    "checkpoint_bin": Kind(checkpoint_bin, ("[load_model]",), changed=("it/*.bin",), owned=False),
    "model_listed": Kind(copied("model"), ("sites {here}/it --json",), owned=False, slow=True),
    "onnx": Kind(onnx, ("sites {here}/it/m.onnx --json", "record {here}/it/m.onnx -o {here}/r"), owned=False),
    "exported": Kind(exported, ("sites {here}/m.pt2 --json",), owned=False),
    "tensor_files": Kind(
        tensor_files,
        tuple(f"run {{shared}}/small --inputs {{here}}/x.{end} --json" for end in _TENSOR_ENDS),
        owned=False,
    ),
    "token_files": Kind(
        token_files,
        tuple(f"run {{shared}}/language --input-ids {{here}}/ids.{end} --max-new-tokens 1" for end in _TENSOR_ENDS),
        owned=False,
    ),
    "prompt_files": Kind(
        prompt_files,
        (
            *(
                f"run {{shared}}/language --input-file {{here}}/p.{end} --max-new-tokens 1 --json"
                for end in ("txt", "json", "jsonl")
            ),
            *(
                f"run {{shared}}/language --chat {{here}}/c.{end} --max-new-tokens 1 --json"
                for end in ("json", "jsonl")
            ),
        ),
        owned=False,
    ),
    "map": Kind(
        map_file,
        (
            "compare {shared}/record-a {shared}/record-b --map {here}/map.json --json -",
            "compare {shared}/record-a {shared}/record-b --map {here}/names.json",
        ),
        owned=False,
    ),
    "recording": Kind(
        copied("record-a"),
        (
            "show {here}/it --json",
            "show {here}/it",
            "compare {shared}/record-b {here}/it --json -",
            "show {here}/it --output {here}/out",
            "show {here}/it fc --values",
            "sites {here}/it --json",
        ),
        proven=("it/**/*.shard", "it/**/shard*"),
    ),
    "cache": Kind(cache, ("[use_cache]", "[examine_cache]"), proven=("it/**/*",)),
    "server": Kind(server, ("[ask_server]",), owned=False, places=False),
    "command_lines": Kind(command_lines, ("[command_line]",), owned=False, code=True, places=False),
}
