"""Writes what the gallery needs beside the sources: `twice/`, `permuted.gguf` and `detector.onnx`."""

import json
import shutil
import warnings
from pathlib import Path

import queries
import torch
from transformers import AutoModelForCausalLM

from glassengine.serving.ggml.write import write_gguf

MODEL = "examples/tiny-llama"


def begin_twice():
    """A tokenizer that writes the begin token, for a template that writes it as well."""
    shutil.copytree(MODEL, "twice", dirs_exist_ok=True)
    path = Path("twice/tokenizer.json")
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    path.write_text(json.dumps(tokenizer))


def permuted_gguf():
    """A converter that permutes queries and keys for another rotation than the engine's."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    for layer in model.model.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            halves = weight.unflatten(0, (-1, 2, model.config.head_dim // 2))
            weight.data = halves.transpose(1, 2).flatten(0, 2).contiguous()
    write_gguf(model, Path("permuted.gguf"), kind="F16")


def detector_onnx():
    """An export whose top-k chooses other places among equal ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            queries.detector(), (), kwargs=queries.inputs(), f="detector.onnx", dynamo=True, verbose=False
        )


if __name__ == "__main__":
    begin_twice()
    permuted_gguf()
    detector_onnx()
