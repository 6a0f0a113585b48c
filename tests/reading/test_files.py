"""Files are opened without hanging, without leaving their directory, without taking more than was allowed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.files import is_regular, open_regular, read_bytes, read_text, shown


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "owned"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    (folder / "deep" / "b.bin").write_bytes(b"12345")
    (tmp_path / "secret").write_text("secret")
    return folder


def test_a_plain_file_is_read(directory: Path) -> None:
    assert read_bytes(directory / "a.json", most=2) == b"{}"
    assert read_bytes(directory / "deep" / "b.bin", most=5, inside=directory) == b"12345"
    with open_regular(str(directory / "a.json"), inside=str(directory)) as file:
        assert file.read() == b"{}"
        assert file.seek(0) == 0


def test_a_link_that_the_user_names_is_followed_and_the_directory_itself_may_be_one(directory: Path) -> None:
    (directory.parent / "link").symlink_to(directory)
    (directory.parent / "file").symlink_to(directory / "a.json")
    assert read_text(directory.parent / "file", most=9) == "{}"
    owned = directory.parent / "link"
    assert read_bytes(owned / "deep" / "b.bin", most=5, inside=owned) == b"12345"


def test_s7_no_way_leads_out_of_a_directory(directory: Path) -> None:
    (directory / "link").symlink_to(directory.parent / "secret")
    (directory / "here").symlink_to(directory / "a.json")
    (directory / "folder").symlink_to(directory.parent)
    for name in ("link", "here", "folder/secret", "../secret", "deep/../../secret", "/etc/hostname", ".", "a\0b"):
        with pytest.raises(CorruptError):
            read_bytes(directory / name, most=100, inside=directory)


def test_s6_what_is_no_plain_file_is_refused_at_once(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(directory / "socket"))
        for name in ("pipe", "zero", "socket", "deep"):
            with pytest.raises(CorruptError, match="not a plain file"):
                open_regular(directory / name, inside=directory)
            with pytest.raises(UsageError, match="not a plain file"):
                open_regular(directory / name)
            assert not is_regular(directory / name)
    assert is_regular(directory / "a.json")


def test_a_missing_file_is_the_users_or_the_directorys_mistake(directory: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        open_regular(directory / "none")
    with pytest.raises(CorruptError, match="No such file"):
        open_regular(directory / "none", inside=directory)
    with pytest.raises(CorruptError, match="Not a directory"):
        open_regular(directory / "a.json" / "none", inside=directory)


def test_s4_a_large_file_is_refused_before_it_is_read(directory: Path) -> None:
    with (directory / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="at most 1,000 bytes"):
        read_bytes(directory / "large", most=1000)
    with pytest.raises(CorruptError, match="too large"):
        read_bytes(directory / "deep" / "b.bin", most=4, inside=directory)


def test_what_says_that_it_is_empty_is_bounded_too() -> None:
    # The kernel's files have no size.
    assert read_text("/proc/self/status", most=1 << 16)
    with pytest.raises(CorruptError, match="too large"):
        read_bytes("/proc/self/status", most=10)


def test_what_the_shell_opened_is_read_within_the_same_bounds() -> None:
    for content, fits in ((b"[1]", True), (b"12345", False)):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        try:
            if fits:
                assert read_bytes(f"/dev/fd/{reader}", most=4) == content
            else:
                with pytest.raises(CorruptError, match="too large"):
                    read_bytes(f"/dev/fd/{reader}", most=4)
        finally:
            os.close(reader)


def test_text_is_text(directory: Path) -> None:
    (directory / "lines").write_bytes(b"a\r\nb\rc\n")
    assert read_text(directory / "lines", most=100) == "a\nb\nc\n"
    (directory / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptError, match="text in utf-8"):
        read_text(directory / "bytes", most=100)


def test_a_path_is_printable() -> None:
    assert shown("a/\x1b[31m\u202e\udcff\nb") == r"a/\x1b[31m\u202e\udcff\nb"
    assert shown("Größe 表") == "Größe 表"
    assert len(shown("x" * 9000)) < 1000


def test_no_descriptor_is_left_open(directory: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("deep", "none", "../secret"):
        for inside in (directory, None):
            with pytest.raises((CorruptError, UsageError)):
                read_bytes(directory / name, most=1, inside=inside)
    read_bytes(directory / "deep" / "b.bin", most=5, inside=directory)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
