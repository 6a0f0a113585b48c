from pathlib import Path

import pytest

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.extensions import plugin
from glassengine.serving import protocol
from glassengine.serving.protocol import EngineSetting, kinds, open_served


def test_what_names_a_candidate() -> None:
    assert "gguf" in kinds()
    assert open_served("package.module:factory") is None and open_served("file.py:factory") is None
    assert open_served(Path("gguf:x")) is None and open_served(None) is None


@pytest.mark.parametrize("kind", protocol._BUILT_IN)
def test_each_kind_is_opened_by_a_function_of_the_plugin(kind: str) -> None:
    module, name = protocol._BUILT_IN[kind]
    assert callable(getattr(plugin(module), name))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match="no such GGUF file") as found:
        open_served(f"gguf:{tmp_path}/modle.gguf")
    assert "model.gguf" in str(found.value)


def test_options_for_engines_are_refused(root: Path, tmp_path: Path) -> None:
    # A file that is well formed and holds nothing.
    kind = b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama"
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + kind)
    with pytest.raises(UsageError, match="--backend is not for a serving engine"):
        glass.check(root / "examples/tiny-llama", candidate=f"gguf:{tmp_path}/a.gguf", backend="eager")


def test_settings_differ_beyond_float32() -> None:
    assert not EngineSetting("eps", 9.999999974752427e-07, 1e-6, "eps").differs
    assert EngineSetting("base", 500000.0, 10000.0, "position").differs
