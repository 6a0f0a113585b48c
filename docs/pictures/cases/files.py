"""Writes what other cases read: ONNX files, a checkpoint in four bits, records of one rank and of two, a snapshot."""

import json
from pathlib import Path

import numpy as np
import onnx
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import glassengine as glass
from glassengine.recording.write.writer import RecordingWriter

PORT = "examples/tiny-llama"


def write_onnx(path, activation):
    """Write a multilayer perceptron."""
    draw = np.random.default_rng(0).standard_normal
    model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["" : 20]>
    mlp (float[N, 16] x) => (float[N, 8] y) {{
        normal = LayerNormalization (x, gain)
        wide = MatMul (normal, first)
        "/mlp/act" = {activation} (wide)
        scores = MatMul ("/mlp/act", second)
        y = Softmax (scores)
    }}""")
    for name, value in {"gain": np.ones(16), "first": draw((16, 32)), "second": draw((32, 8))}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(model, path)


def write_four_bits(directory, offset):
    """Write the example model as GPTQ does, with zero points that lie beside the right ones by `offset`."""
    tensors = {}
    for name, weight in load_file(f"{PORT}/model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        low, high = weight.float().aminmax(dim=1, keepdim=True)
        scale = ((high - low) / 15).half()
        zero = (-low / scale).round().clamp(1, 15) + offset
        module = name.removesuffix(".weight")
        tensors[f"{module}.qweight"] = _packed((weight / scale + zero).round().clamp(0, 15)).T.contiguous()
        tensors[f"{module}.qzeros"] = _packed(zero.T - 1 - offset)
        tensors[f"{module}.scales"] = scale.T.contiguous()
    Path(directory).mkdir()
    save_file(tensors, f"{directory}/model.safetensors")
    config = json.loads(Path(PORT, "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    Path(directory, "config.json").write_text(json.dumps(config))


def _packed(rows):
    words = (rows.long().reshape(len(rows), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def write_ranks(one, two):
    """Write a perceptron on one rank, and on two that forget to add what they have."""

    def draw(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    x, up, down, bias = draw(2, 5, 8, seed=0), draw(12, 8, seed=1), draw(8, 12, seed=2), draw(8, seed=3)

    def record(path, up, down, rank=0):
        hidden = x @ up.T
        tensors = {
            "mlp:in[0]": x,
            "mlp.fc": hidden,
            "mlp.act": hidden.relu(),
            "mlp.proj": hidden.relu() @ down.T + bias,
        }
        with RecordingWriter(Path(path), metadata={}) as writer:
            for site, tensor in tensors.items():
                writer.write(site, 0, tensor, rank=rank)
            writer.commit(0)

    record(one, up, down)
    for rank, (part, other) in enumerate(zip(up.chunk(2), down.chunk(2, 1), strict=True)):
        record(f"{two}/rank{rank}", part, other, rank)


class Relu(nn.Module):
    """What the compiler breaks when it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down((self.up(x) * 2).sin().relu())


def replay_broken(snapshots):
    """Take a snapshot of one execution, and run it again with a compiler that breaks one op."""
    with glass.snapshots.take(snapshots, contents="inputs outputs"), torch.no_grad():
        compiled = torch.compile(Relu(), backend="glass", options={"backend": "eager"})
        compiled(torch.linspace(-2, 2, 24).reshape(3, 8))
    (snapshot,) = Path(snapshots).iterdir()
    with torch._inductor.config.patch("cpp.inject_relu_bug_TESTING_ONLY", "accuracy"):
        return glass.replay(snapshot, backend="inductor", bisect=True)
