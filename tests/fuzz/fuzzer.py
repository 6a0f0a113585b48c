"""A small coverage-guided fuzzer for everything that can be opened.

    python tests/fuzz/fuzzer.py SECONDS SEED [KIND...]

A file of a seed is changed, written to a directory, opened, and what it claims to hold is read. That ends well or with
a `GlassError`; any other exception, a hang, a crash, memory without bound, or a file outside of the directory is a
finding: it is printed with the bytes that show it, and the exit status is 1. Changes that reach new lines of the
readers are kept and changed further.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import seeds
import torch

import glassengine.recording
from glassengine.errors import GlassError
from glassengine.recording.read.reader import Recording
from glassengine.recording.read.source import open_source

READERS = str(Path(glassengine.recording.__file__).parent)
MAX_BYTES = 3 << 30  # of address space beyond what is in use when it begins
MAX_SECONDS = 20  # of its own processor's: the machine may do other things
PATIENCE = 8
"""Times as many of the clock's, where it waits."""
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    -1,
]
WORDS = [
    b'"../../x"', b'"/etc/passwd"', b'"\\u0000"', b'"\\u202e"', b"null", b"true", b"[]", b"{}", b"1e999", b"-1", b"NaN",
    b'"float32"', b'"torch.float64"', b'"torch.Size([2, 3])"', b"[[[[[[[[", b'"' + b"A" * 70_000 + b'"',
    b"99999999999999",
    b'"value"', b'"shape"', b'"data_name"', b'"polygraphy_class"', b"<f8", b"|O", b"(4294967296,)", b"True", b"inf",
]  # fmt: skip
OPCODES = [
    b"cbuiltins\nbytearray\n", b"cbuiltins\neval\n", b"cos\nsystem\n", b"ctorch._utils\n_rebuild_sparse_tensor\n",
    b"ctorch._utils\n_rebuild_qtensor\n", b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n", b"ctorch\nSize\n",
    b"ccollections\nCounter\n", b"ctorch\nDoubleStorage\n", b"R", b"b", b"0", b"2", b")", b"]", b"}", b"(", b"t",
    b"\x85", b"\x86", b"\x87",
    b"N", b"\x88", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 7 + b"\x3f", b"K\x00", b"K\xff",
    b"\x8a\x06\0\0\0\0\0\x01", b"Q", b"a", b"e", b"u", b"h\x00", b"q\x00", b".", b"X\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f",
]  # fmt: skip


def exercise(path: Path) -> str:
    """Open `path`, read what it claims to hold, and return how it ended."""
    try:
        source = open_source(path)
        for entry in source.entries[:50]:
            entry.describe()
            if entry.nbytes < 1 << 20:
                tensor = source.tensor(entry)
                assert tuple(tensor.shape) == entry.shape, "another shape than was said"
                tensor.flatten()[:8].tolist()
                if isinstance(source, Recording):
                    source.summary(entry)
                    source.sketch(entry)
        for item in source.skipped:
            assert item.reason, "skipped without a reason"
        return f"{len(source.entries)} tensors"
    except GlassError as error:
        assert str(error), "an error without a reason"
        return type(error).__name__


class Coverage:
    """Lines of the readers and the order they are reached in."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, int, int]] = set()
        self._new = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._new = 0
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    @property
    def found_new(self) -> bool:
        return self._new > 0

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(READERS):
            return None
        code, last = frame.f_code, 0

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            edge = (code, last, frame.f_lineno)
            last = frame.f_lineno
            if edge not in self.seen:
                self.seen.add(edge)
                self._new += 1
            return line

        return line


class Mutator:
    """Changes bytes: anywhere, in numbers, in JSON, and in the frames of an index, whose checksums it makes right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def change(self, name: str, data: bytes, others: list[bytes]) -> bytes:
        ways = [self._bytes, self._number, self._cut, self._splice, self._word]
        if name.endswith(".json"):
            ways += [self._json] * 6
        if name.endswith("index.log"):
            ways += [self._frames] * 10
        if name.endswith((".pt", ".npz")):
            ways += [self._member] * 10
        if name.endswith(".safetensors"):
            ways += [self._header] * 6
        for _ in range(self._chance.choice([1, 1, 1, 2, 4])):
            way = self._chance.choice(ways)
            data = way(data, others) if data else self._chance.choice(WORDS)
        return data[: 1 << 22]

    def _bytes(self, data: bytes, others: list[bytes]) -> bytes:
        changed = bytearray(data)
        for _ in range(self._chance.choice([1, 2, 8])):
            changed[self._chance.randrange(len(changed))] = self._chance.randrange(256)
        return bytes(changed)

    def _number(self, data: bytes, others: list[bytes]) -> bytes:
        form = self._chance.choice(["<B", "<H", "<I", "<Q"])
        size = struct.calcsize(form)
        place = self._chance.randrange(len(data))
        number = self._chance.choice(NUMBERS) & (2 ** (8 * size) - 1)
        return data[:place] + struct.pack(form, number) + data[place + size :]

    def _cut(self, data: bytes, others: list[bytes]) -> bytes:
        first, last = sorted(self._chance.randrange(len(data) + 1) for _ in range(2))
        return self._chance.choice([data[:first], data[first:], data[:first] + data[last:], data[:last] + data[first:]])

    def _splice(self, data: bytes, others: list[bytes]) -> bytes:
        other = self._chance.choice(others)
        here, there = self._chance.randrange(len(data)), self._chance.randrange(len(other) or 1)
        return data[:here] + other[there:]

    def _word(self, data: bytes, others: list[bytes]) -> bytes:
        place = self._chance.randrange(len(data))
        word = self._chance.choice(WORDS)
        return data[:place] + word + data[place + self._chance.choice([0, len(word)]) :]

    def _json(self, data: bytes, others: list[bytes]) -> bytes:
        try:
            return json.dumps(self._value(json.loads(data))).encode()
        except (ValueError, RecursionError):
            return self._bytes(data, others)

    def _header(self, data: bytes, others: list[bytes]) -> bytes:
        """A safetensors file with another header, whose length is right."""
        length = int.from_bytes(data[:8], "little")
        try:
            header = json.dumps(self._value(json.loads(data[8 : 8 + length]))).encode()
        except (ValueError, RecursionError):
            return self._bytes(data, others)
        return len(header).to_bytes(8, "little") + header + data[8 + length :]

    def _member(self, data: bytes, others: list[bytes]) -> bytes:
        """An archive with one member changed, whose checksum is right."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {item.filename: archive.read(item) for item in archive.infolist()}
        except Exception:  # it is damaged already
            return self._bytes(data, others)
        names = list(members)
        which = next((name for name in names if name.endswith(".pkl")), names[0]) if names else "a.npy"
        if self._chance.random() < 0.3 and names:
            which = self._chance.choice(names)
        old = members.get(which, b"") or b"\0"
        way = self._chance.choice([self._bytes, self._number, self._cut, self._word, self._opcode, self._opcode])
        members[which] = way(old, others)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings(action="ignore"):
            for name, content in members.items():
                archive.writestr(name, content)
        return file.getvalue()

    def _opcode(self, data: bytes, others: list[bytes]) -> bytes:
        """A pickle with one more or another operation."""
        place = self._chance.randrange(len(data))
        code = self._chance.choice(OPCODES)
        return data[:place] + code + data[place + self._chance.choice([0, 0, 1, len(code)]) :]

    def _frames(self, data: bytes, others: list[bytes]) -> bytes:
        """An index with one record changed, removed, moved or repeated."""
        frames = []
        place = 0
        while place + 8 <= len(data):
            length = int.from_bytes(data[place : place + 4], "little")
            if length > len(data):
                break
            frames.append(data[place + 8 : place + 8 + length])
            place += 8 + length
        if not frames:
            return self._bytes(data, others)
        which = self._chance.randrange(len(frames))
        way = self._chance.randrange(5)
        if way == 0:
            del frames[which]
        elif way == 1:
            frames.insert(self._chance.randrange(len(frames)), frames[which])
        elif way == 2:
            frames[which], frames[0] = frames[0], frames[which]
        else:
            with contextlib.suppress(ValueError, RecursionError):
                text = frames[which]
                is_text = text.startswith(b"{")
                changed = self._value(json.loads(text)) if is_text else None
                frames[which] = json.dumps(changed).encode() if is_text else self._number(text, others)
        return b"".join(struct.pack("<II", len(text), zlib.crc32(text)) + text for text in frames)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """Return `value` with one thing in it changed."""
        if isinstance(value, dict) and value and self._chance.random() < 0.9:
            key = self._chance.choice(list(value))
            way = self._chance.random()
            if way < 0.1:
                return {other: child for other, child in value.items() if other != key}
            if way < 0.15:
                return {**value, str(self._scalar()): value[key]}
            return {**value, key: self._value(value[key], depth + 1)}
        if isinstance(value, list) and value and self._chance.random() < 0.9:
            index = self._chance.randrange(len(value))
            way = self._chance.random()
            if way < 0.1:
                return value[:index] + value[index + 1 :]
            if way < 0.2:
                return value * 2
            return [*value[:index], self._value(value[index], depth + 1), *value[index + 1 :]]
        if isinstance(value, int) and self._chance.random() < 0.7:
            return self._chance.choice([value + 1, value - 1, value * 64, -value, *NUMBERS])
        if isinstance(value, str) and value and self._chance.random() < 0.5:
            place = self._chance.randrange(len(value))
            return (
                value[:place]
                + self._chance.choice(["\0", "/", "..", "\u202e", "9", "x" * 5000, "]", ")"])
                + value[place:]
            )
        return self._scalar()

    def _scalar(self) -> Any:
        return self._chance.choice(
            [None, True, "", "../x", "/etc/passwd", [], {}, [[]], "x" * 40_000, 1e308, float("nan"), *NUMBERS]
        )


class Fuzzer:
    """Changes, opens, and keeps what reaches new lines."""

    def __init__(self, seed: int, kinds: list[str]) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._coverage = Coverage()
        found = seeds.seeds()
        self.corpus: dict[str, list[seeds.Files]] = {kind: [found[kind]] for kind in kinds or found}
        self.ends: dict[str, int] = {}
        self.num_runs = 0

    def run(self, seconds: float) -> str | None:
        """Run for so long; return the first finding."""
        end = time.monotonic() + seconds
        kinds = list(self.corpus)
        for kind in kinds:
            if (finding := self._try(kind, self.corpus[kind][0])) is not None:
                return finding
        others = [data for files in self.corpus.values() for data in files[0].values()]
        while time.monotonic() < end:
            kind = kinds[self.num_runs % len(kinds)]
            files = dict(self._chance.choice(self.corpus[kind]))
            name = self._chance.choice(list(files))
            files[name] = self._mutator.change(name, files[name], others)
            if (finding := self._try(kind, files)) is not None:
                return finding
            if self._coverage.found_new:
                self.corpus[kind].append(files)
        return None

    def _try(self, kind: str, files: seeds.Files) -> str | None:
        self.num_runs += 1
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        inside = folder / "inside"
        try:
            for name, data in files.items():
                (inside / name).parent.mkdir(parents=True, exist_ok=True)
                (inside / name).write_bytes(data)
            path = inside / next(iter(files)) if len(files) == 1 else inside
            begin_clock(MAX_SECONDS)
            with self._coverage.watching():
                ended = exercise(path)
            begin_clock(0)
            self.ends[ended] = self.ends.get(ended, 0) + 1
            assert [item.name for item in folder.iterdir()] == ["inside"], "a file outside of the directory"
            return None
        except Exception:
            begin_clock(0)
            changed = {name: data for name, data in files.items() if data != self.corpus[kind][0].get(name)}
            return f"{kind}: {traceback.format_exc()}\n{ {name: data[:3000] for name, data in changed.items()} }"
        finally:
            shutil.rmtree(folder)


def begin_clock(seconds: float) -> None:
    """Interrupt this process after so many seconds; 0 ends the clock."""
    signal.signal(signal.SIGPROF, too_slow)
    signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    # A loop of C never comes to a handler of Python; this ends the process, and its input stays where it was written.
    if seconds:
        faulthandler.dump_traceback_later((PATIENCE + 1) * seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {MAX_SECONDS} seconds")


def main() -> int:
    seconds, seed, kinds = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    # A damaged pickle makes torch warn about its version.
    warnings.simplefilter("ignore")
    fuzzer = Fuzzer(seed, kinds)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES, in_use + MAX_BYTES))
    finding = fuzzer.run(seconds)
    kept = sum(len(corpus) for corpus in fuzzer.corpus.values())
    sys.stdout.write(f"{fuzzer.num_runs} runs, {kept} kept, ends: {dict(sorted(fuzzer.ends.items()))}\n")
    sys.stdout.write(finding or "")
    return int(finding is not None)


if __name__ == "__main__":
    sys.exit(main())
