"""The child process that runs the steps of a session of llama.cpp.

    python -m glassengine.plugins.serving.ggml.steps < LINES

The first line names library, file, sequences, their length and whether to compute as exactly as llama.cpp can. Each
other line is a step: rows of a sequence's number, the position of its first token and its tokens; position 0 begins the
sequence again. What answers is a line with the number of tokens and of logits of each, then the logits in float32.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, BinaryIO

import numpy as np

from glassengine.plugins.serving.ggml.library import GgufModel, Library


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Open what the first line names, and run a step for each other line."""
    request = json.loads(lines.readline())
    opened = GgufModel(request["library"], request["file"])
    library, length, sequences = opened.library, request["length"], request["sequences"]
    parameters, alive = library.context_parameters(length, None, deployed=not request["exact"], sequences=sequences)
    context = opened.context(parameters, alive, length, request["threads"])
    _answer(answers, {"vocabulary": opened.vocabulary})
    for line in iter(lines.readline, b""):
        rows = json.loads(line)
        for sequence, past, _ in rows:
            if past == 0:
                _forget(library, context, sequence)
        total = opened.decode(context, rows)
        _answer(answers, {"tokens": total, "vocabulary": opened.vocabulary})
        for index in range(total):
            logits = library.llama_get_logits_ith(context, index)
            answers.write(np.ctypeslib.as_array(logits, (opened.vocabulary,)).data)
        answers.flush()


def _forget(library: Library, context: Any, sequence: int) -> None:
    for name, holder in (("llama_memory_seq_rm", "llama_get_memory"), ("llama_kv_self_seq_rm", None)):
        if library.has(name):
            held = context if holder is None else getattr(library, holder)(context)
            getattr(library, name)(held, sequence, -1, -1)
            return
    raise RuntimeError("the library has no function that forgets a sequence")


def _answer(answers: BinaryIO, line: dict[str, Any]) -> None:
    answers.write(json.dumps(line).encode() + b"\n")
    answers.flush()


def main() -> int:
    """Serve stdin; what the library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
