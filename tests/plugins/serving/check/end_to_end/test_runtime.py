"""Mistakes of a runtime between two steps, in positions, slots and requests, are named at the op and the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.plugins.serving.onnx.decoder import Feeds
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai

pytestmark = pytest.mark.slow

LLAMA_CPP = {
    "a slot forgotten": "memory_rm(0, 3, 4)",
    "a prefix of another request": "again([9, 8, 7, 6, *self.prompt[4:]])",
    "rows of two requests exchanged": "again([token + 3 for token in self.prompt])",
    "positions moved on behind a chunk": "memory_add(0, 5, -1, 1); past += 1",
    "positions that begin at 1": "",
}
"""Mistake -> what the child does before its second step."""

CHILD = """
import ctypes as c

from glassengine.plugins.serving.ggml import capture, library

decode, note, quiet = library.GgufModel.decode, capture._Nodes.callback, False


def callback(self, tensor, ask, data):
    return not ask if quiet else note(self, tensor, ask, data)


def planted(self, context, rows):
    global quiet
    ((_, past, tokens),) = rows
    memory = self.library.llama_get_memory(context)
    self.library.llama_memory_seq_add.argtypes = [c.c_void_p, *[c.c_int32] * 4]

    def memory_rm(*places):
        self.library.llama_memory_seq_rm(memory, *places)

    def memory_add(*places):
        self.library.llama_memory_seq_add(memory, *places)

    def again(prompt):
        global quiet
        memory_rm(0, -1, -1)
        quiet = True
        decode(self, context, [(0, 0, prompt)])
        quiet = False

    if past == 0:
        self.prompt = list(tokens)
    else:
        BEFORE
    return decode(self, context, [(0, past + FIRST, tokens)])


library.GgufModel.decode, capture._Nodes.callback = planted, callback
raise SystemExit(capture.main())
"""


def checkpoint(folder: Path) -> Any:
    torch.manual_seed(0)
    module: Any = FAMILIES["llama"]().eval()
    save_checkpoint(module, folder)
    return module


@pytest.mark.parametrize("mistake", LLAMA_CPP)
def test_of_llama_cpp(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    first = int("begin" in mistake)
    text = CHILD.replace("BEFORE", LLAMA_CPP[mistake] or "pass").replace("FIRST", str(first))
    (tmp_path / "planted_capture.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("glassengine.plugins.serving.ggml.child._MODULE", "planted_capture")
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=1)
    named = found.first_divergence
    assert not found.ok and named is not None and named.level == "record" and named.step == 1 - first, named
    place = "model.rotary_emb|model.layers.0.self_attn/add." if "positions" in mistake else "model.layers.0.self_attn/"
    assert named.site.startswith(tuple(place.split("|"))), named


def stale(feeds: Any, tokens: Any, given: dict[str, Any]) -> dict[str, Any]:
    for cache in feeds._caches.values():
        cache[:, :, :3] = cache[:, :, 3:6]
    return given


def other_request(feeds: Any, tokens: Any, given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: cache[:, :, ::-1].copy() for name, cache in feeds._caches.items()}


def one_too_few(feeds: Any, tokens: Any, given: dict[str, Any]) -> dict[str, Any]:
    return given | {"attention_mask": given["attention_mask"][:, 1:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime_genai")
    target = tmp_path_factory.mktemp("genai")
    checkpoint(target / "checkpoint")
    build_genai(target / "checkpoint", target / "genai")
    return target


@pytest.mark.parametrize("plant", [stale, other_request, one_too_few])
def test_of_a_loop_around_onnx_runtime(
    plant: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Feeds.of

    def planted(self: Any, tokens: Any) -> dict[str, np.ndarray[Any, Any]]:
        given = of(self, tokens)
        return plant(self, tokens, given) if self._past else given

    monkeypatch.setattr(Feeds, "of", planted)
    found = glass.check(folder / "checkpoint", candidate=f"genai:{folder}/genai", steps=1)
    named = found.first_divergence
    assert not found.ok and named is not None and (named.level, named.step) == ("record", 1), named
    assert named.site.startswith("model.layers.0.self_attn"), named
