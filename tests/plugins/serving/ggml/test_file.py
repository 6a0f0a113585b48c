import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.plugins.serving.ggml.file import GgufFile, Many


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


KIND = setting("general.architecture", 8, text("llama"))


def gguf(settings: tuple[bytes, ...] = (KIND,), tensors: tuple[bytes, ...] = (), data: int = 128, **more: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", more.get("version", 3), more.get("num_tensors", len(tensors)), more.get("num_settings", len(settings))
    )
    body = head + b"".join((*settings, *tensors))
    return body + bytes(-len(body) % 32 + data)


def test_settings_and_tensors(tmp_path: Path) -> None:
    many = setting("tokens", 9, struct.pack("<IQ", 8, 5000) + text("a") * 5000)
    few = setting("llama.attention.head_count", 9, struct.pack("<IQ", 4, 2) + struct.pack("<II", 4, 4))
    (tmp_path / "a.gguf").write_bytes(gguf((KIND, many, few), (tensor("x"), tensor("y", (32,), 8, 32))))
    file = GgufFile(tmp_path / "a.gguf")
    assert file.architecture == "llama" and file.settings["tokens"] == Many(5000)
    assert file.number("attention.head_count") == 4 and file.number("nothing") is None
    assert {name: (one.shape, one.type.name, one.num_bytes) for name, one in file.tensors.items()} == {
        "x": ((2, 4), "F32", 32),
        "y": ((32,), "Q8_0", 34),
    }


def number(name: str, value: int) -> bytes:
    return setting(f"llama.{name}", 4, struct.pack("<I", value))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: b"", "begins with"),
        (lambda: b"GGML" + bytes(60), "begins with"),
        (lambda: gguf()[:20], "ends in byte"),
        (lambda: gguf(version=1), "version 1"),
        (lambda: gguf(num_tensors=1 << 60), "tensors and"),
        (lambda: gguf(num_settings=1 << 40), "tensors and"),
        (lambda: gguf(()), "architecture None"),
        (lambda: gguf((KIND, KIND)), "appears twice"),
        (lambda: gguf((KIND, text("x") + struct.pack("<I", 77))), "unknown kind 77"),
        (lambda: gguf((KIND, setting("x", 8, struct.pack("<Q", 1 << 62)))), "a text of"),
        (lambda: gguf((KIND, setting("x", 9, struct.pack("<IQ", 8, 1 << 60)))), "array of"),
        (lambda: gguf((KIND, setting("x", 9, struct.pack("<IQ", 9, 1)))), "array of the kind 9"),
        (lambda: gguf((KIND, setting("x", 9, struct.pack("<IQ", 4, 1 << 60)))), "are announced"),
        (lambda: gguf((KIND, setting("general.alignment", 4, struct.pack("<I", 0)))), "alignment of 0"),
        (lambda: gguf((KIND, setting("general.alignment", 4, struct.pack("<I", 48)))), "alignment of 48"),
        (lambda: gguf((KIND, number("block_count", 1 << 31))), "block_count is"),
        (lambda: gguf((KIND, number("attention.head_count", 0))), "head_count is 0"),
        (lambda: gguf((KIND, number("attention.head_count", 4), number("attention.head_count_kv", 3))), "share 3"),
        (lambda: gguf((KIND, number("expert_count", 4), number("expert_used_count", 8))), "8 of 4 experts"),
        (lambda: gguf((KIND,), (tensor("x", ()),)), "0 dimensions"),
        (lambda: gguf((KIND,), (tensor("x", (1,) * 5),)), "5 dimensions"),
        (lambda: gguf((KIND,), (tensor("x", (0, 4)),)), "has the sizes"),
        (lambda: gguf((KIND,), (tensor("x", (1 << 39, 1 << 39)),)), "has the sizes"),
        (lambda: gguf((KIND,), (tensor("x", (4, 2), 99),)), "unknown type 99"),
        (lambda: gguf((KIND,), (tensor("x", (33, 2), 8),)), "no blocks of 32"),
        (lambda: gguf((KIND,), (tensor("x" * 64),)), "a text of 64 bytes"),
        (lambda: gguf((KIND,), (tensor("x"), tensor("x", offset=32))), "appears twice"),
        (lambda: gguf((KIND,), (tensor("x", offset=7),)), "not in the file"),
        (lambda: gguf((KIND,), (tensor("x", offset=1 << 60),)), "not in the file"),
        (lambda: gguf((KIND,), (tensor("x"), tensor("y"))), "share bytes"),
    ],
)
def test_impossible_files_are_refused(make: Callable[[], bytes], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(make())
    with pytest.raises(CorruptError, match=said):
        GgufFile(tmp_path / "a.gguf")


def test_parts_of_several_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf((KIND, setting("split.count", 2, struct.pack("<H", 3)))))
    with pytest.raises(UsageError, match="one of several"):
        GgufFile(tmp_path / "a.gguf")
