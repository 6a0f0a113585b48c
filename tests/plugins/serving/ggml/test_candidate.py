"""The tensors of a GGUF file by the parameters of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glassengine.errors import CorruptError
from glassengine.plugins.serving.ggml.candidate import open_gguf
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.serving.protocol import ServingOptions
from glassengine.testing.architectures import FAMILIES


@pytest.mark.parametrize("kind", ["short", "pipe", "gone"])
def test_a_file_that_changes_after_it_was_checked(kind: str, tmp_path: Path) -> None:
    module, path = FAMILIES["llama"]().eval(), tmp_path / "a.gguf"
    write_gguf(module, path, kind="F32")
    served = open_gguf(str(path), ServingOptions())
    if kind == "short":
        os.truncate(path, path.stat().st_size - 100)
    else:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
    with pytest.raises(CorruptError, match=r"changed while it was read|cannot be read any more"):
        list(served.weights(module, module.config).values())  # each is read as it is asked for
