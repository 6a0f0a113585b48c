"""The child process that runs llama.cpp and writes down every node of its graph.

    python -m glassengine.plugins.serving.ggml.capture < REQUEST.json

The request names the library, the file, the prompt, the tokens that follow (or how many), and a folder. Two files are
written there: `values.bin`, and `nodes.jsonl` with a line for each node (step, name, op, type, sizes, parameters,
sources, place of its values); the last line holds what was generated. Of a mistake the process makes one line on
stderr; a crash of the library ends this process alone.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.plugins.serving.ggml.library import CALLBACK, GgufModel, Library

_DTYPES = {
    "f32": "<f4",
    "f16": "<f2",
    "bf16": "<u2",
    "f64": "<f8",
    "i8": "<i1",
    "i16": "<i2",
    "i32": "<i4",
    "i64": "<i8",
}
_VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
_MOST_PARAMS = 16
_MOST_VALUE = 1 << 30


class _Nodes:
    """Takes the nodes of a step as they are computed."""

    def __init__(self, library: Library, folder: Path, most: int) -> None:
        self._library = library
        self._values = (folder / "values.bin").open("wb")
        self.lines = (folder / "nodes.jsonl").open("w", encoding="utf-8")
        self._left = most
        self._seen: dict[int, int] = {}
        self._ops: dict[int, str] = {}
        self.step = -1
        self.failure: str | None = None
        self.num_called = 0

    def begin(self) -> None:
        """Start a step."""
        self.step += 1
        self._seen = {}

    def callback(self, tensor: int | None, ask: bool, _: object) -> bool:
        """Answer the library: every node is wanted."""
        if ask or tensor is None or self.failure is not None:
            return True
        try:
            self.num_called += 1
            self._note(tensor, computed=True)
        except Exception as error:  # an exception must not cross the frames of C
            self.failure = f"{type(error).__name__}: {error}"
        return True

    def _note(self, tensor: int, *, computed: bool) -> int:
        if not computed and tensor in self._seen:
            return self._seen[tensor]
        layout = self._library.tensor
        op = self._library.ggml_op_desc(tensor).decode("ascii", "replace")
        pointers = [_word(tensor, layout.sources + 8 * index) for index in range(layout.num_sources)]
        sources = [self._note(one, computed=False) for one in pointers if one and one != tensor]
        view = _word(tensor, layout.view_source)
        if view and view != tensor:
            self._note(view, computed=False)
        kind = c.c_int32.from_address(tensor + layout.kind).value
        line: dict[str, Any] = {
            "step": self.step,
            "name": self._library.ggml_get_name(tensor).decode("utf-8", "replace"),
            "op": op,
            "type": self._library.ggml_type_name(kind).decode("ascii", "replace"),
            "sizes": list((c.c_int64 * 4).from_address(tensor + layout.sizes)),
            "params": list((c.c_int32 * _MOST_PARAMS).from_address(tensor + layout.op_params)),
            "sources": sources,
            "computed": computed,
        }
        if self._is_kept(line):
            line["place"] = self._write(tensor, line)
        self._seen[tensor] = number = len(self._seen) if tensor not in self._seen else self._seen[tensor]
        line["number"] = number
        self.lines.write(json.dumps(line) + "\n")
        return number

    def _is_kept(self, line: dict[str, Any]) -> bool:
        # What goes in is a leaf of integers; weights are in the file, and what only looks at others is not stored.
        if line["type"] not in _DTYPES:
            return False
        if line["op"] == "NONE":
            return line["type"] in ("i32", "i64")
        return bool(line["computed"]) and (line["op"] not in _VIEWS or line["name"].startswith("kqv_out"))

    def _write(self, tensor: int, line: dict[str, Any]) -> list[int]:
        layout = self._library.tensor
        number = int(self._library.ggml_nbytes(tensor))
        if number > min(_MOST_VALUE, self._left):
            raise ValueError(f"{line['name']} has {number:,} bytes: more than there is room for")
        raw = np.empty(number, np.uint8)
        source = _word(tensor, layout.view_source)
        if not _word(tensor, layout.buffer) and not (source and _word(source, layout.buffer)):
            c.memmove(raw.ctypes.data, _word(tensor, layout.data), number)
        else:
            self._library.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, number)
        dtype = np.dtype(_DTYPES[line["type"]])
        shape = tuple(line["sizes"][::-1])
        strides = tuple((c.c_size_t * 4).from_address(tensor + layout.strides))[::-1]
        values = np.ndarray(shape, dtype, raw.data, strides=strides)
        at = self._values.tell()
        self._values.write(np.ascontiguousarray(values).data)
        self._left -= values.nbytes
        return [at, values.nbytes]

    def close(self) -> None:
        """Write what is left."""
        self._values.close()
        self.lines.close()


def _word(tensor: int, offset: int) -> int:
    return c.c_uint64.from_address(tensor + offset).value


def capture(request: dict[str, Any]) -> None:
    """Run the model of a request."""
    opened = GgufModel(request["library"], request["file"], verbose=bool(request.get("verbose")))
    folder = Path(request["folder"])
    library, vocabulary = opened.library, opened.vocabulary
    prompt, forced, steps = request["prompt"], request.get("following"), request["steps"]
    if any(not 0 <= token < vocabulary for token in [*prompt, *(forced or [])]):
        raise ValueError(f"a token is outside of the vocabulary of {vocabulary}")
    nodes = _Nodes(library, folder, request["most_bytes"])
    callback = CALLBACK(nodes.callback)
    parameters, alive = library.context_parameters(len(prompt) + steps, callback, deployed=request["deployed"])
    context = opened.context(parameters, alive, len(prompt) + steps, request["threads"])
    if request["encodes"]:  # it has no scores of a next token
        library.llama_set_embeddings(context, True)
    made, tokens, past = [], list(prompt), 0
    for step in range(steps + 1):
        nodes.begin()
        opened.decode(context, [(0, past, tokens)])
        if nodes.failure:
            raise RuntimeError(nodes.failure)
        if not nodes.num_called:
            raise RuntimeError("llama.cpp takes another field for cb_eval")
        if request["encodes"]:
            continue
        logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, len(tokens) - 1), (vocabulary,))
        past += len(tokens)
        made.append(int(logits.argmax()))
        tokens = [forced[step] if forced is not None and step < len(forced) else made[-1]]
    answer = {"made": made, "vocabulary": vocabulary, "rope_type": library.llama_model_rope_type(opened.model)}
    nodes.lines.write(json.dumps({"answer": answer}) + "\n")
    nodes.close()


def main() -> int:
    """Read a request from stdin; 0 where all of it was written."""
    try:
        capture(json.load(sys.stdin))
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
