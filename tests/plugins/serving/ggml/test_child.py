import ctypes.util
import sys
from pathlib import Path

import pytest
import torch

from glassengine.errors import BackendError, UsageError
from glassengine.plugins.serving.ggml import child
from glassengine.plugins.serving.ggml.candidate import open_gguf
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.recording.source import open_source
from glassengine.serving.protocol import ServingOptions, ServingRun
from glassengine.testing.models import CAUSAL_LMS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(CAUSAL_LMS["llama"](), path)
    return path


def test_every_node_of_every_step_is_recorded(file: Path, tmp_path: Path) -> None:
    open_gguf(str(file), ServingOptions()).record(ServingRun([3, 4, 5], steps=2), tmp_path / "r")
    source = open_source(tmp_path / "r")
    shapes = {(e.site, e.step): e.shape for e in source.entries}
    assert shapes["Qcur-0/rope.0", 0][1] == 3 and shapes["Qcur-0/rope.0", 2][1] == 1
    assert source.metadata["layout"] == "ggml" and source.metadata["architecture"] == "llama"
    assert source.metadata["graph"]["attn_norm-0/mul.0"]["sources"] == ["norm-0/rms_norm.0", "blk.0.attn_norm.weight"]
    assert source.metadata["prompt_lengths"] == [3] and len(source.metadata["token_ids"][0]) == 5
    cache = next(e for e in source.entries if e.site == "cache_k_l0.view/set_rows.0")
    assert cache.dtype == "float32"
    open_gguf(str(file), ServingOptions()).record(ServingRun([3, 4, 5], 0, as_deployed=True), tmp_path / "d")
    deployed = open_source(tmp_path / "d")
    assert next(e for e in deployed.entries if e.site == "cache_k_l0.view/set_rows.0").dtype == "float16"


def test_a_library_that_is_another(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such library"):
        open_gguf(str(file), ServingOptions(library="nowhere.so")).record(ServingRun([3], 0), tmp_path / "r")
    libm = next(path for path in Path("/").glob("lib*/**/libm.so.6")) if sys.platform == "linux" else None
    if libm is None or ctypes.util.find_library("m") is None:
        pytest.skip("no other library is known here")
    with pytest.raises(BackendError, match="does not export"):
        open_gguf(str(file), ServingOptions(library=libm)).record(ServingRun([3], 0), tmp_path / "r")


def test_a_token_outside_of_the_vocabulary(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="outside of the vocabulary"):
        open_gguf(str(file), ServingOptions()).record(ServingRun([10**6], 0), tmp_path / "r")


def test_a_crash_is_an_error_with_words(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Planted: a child that dies as a library does that follows a null pointer.
    (tmp_path / "dies.py").write_text("import ctypes\nctypes.string_at(0)\n")
    monkeypatch.setattr(child, "_MODULE", "dies")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"llama\.cpp crashed") as found:
        open_gguf(str(file), ServingOptions()).record(ServingRun([3], 0), tmp_path / "r")
    assert "SIGSEGV" in str(found.value)
