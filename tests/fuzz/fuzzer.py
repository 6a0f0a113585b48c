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
from edits import Maker, changed

import glassengine.recording
from glassengine.errors import GlassError
from glassengine.recording.reader import Recording
from glassengine.recording.source import open_source

READERS = str(Path(glassengine.recording.__file__).parent)
MAX_BYTES = 3 << 30  # of address space beyond what is in use when it begins
MAX_SECONDS = 20  # of its own processor's: the machine may do other things
PATIENCE = 8
"""Times as many of the clock's, where it waits."""
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
    """Changes bytes: as a `Maker` does, and in pickles and frames of an index, whose checksums it makes right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._maker = Maker(chance)

    def change(self, name: str, data: bytes, others: list[bytes]) -> bytes:
        for _ in range(self._chance.choice([1, 1, 1, 2, 4])):
            way = self._chance.random()
            if not data or way < 0.1:
                data = self._inserted(data, WORDS)
            elif way < 0.15:
                other = self._chance.choice(others)
                data = data[: self._chance.randrange(len(data))] + other[self._chance.randrange(len(other) or 1) :]
            elif name.endswith("index.log") and way < 0.8:
                data = self._frames(data)
            elif name.endswith(".pt") and way < 0.4:
                data = self._pickle(data)
            else:
                data = changed(data, self._maker.edit(name, data))
        return data[: 1 << 22]

    def _inserted(self, data: bytes, words: list[bytes]) -> bytes:
        """Put one of `words` somewhere, or in place of as many bytes."""
        place, word = self._chance.randrange(len(data) or 1), self._chance.choice(words)
        return data[:place] + word + data[place + self._chance.choice([0, 1, len(word)]) :]

    def _pickle(self, data: bytes) -> bytes:
        """An archive whose pickle has one more or another operation, and whose checksum is right."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                name = next(item for item in archive.namelist() if item.endswith(".pkl"))
                code = self._inserted(archive.read(name), OPCODES)
                edit = {"op": "bytes", "at": 0, "delete": len(archive.read(name)), "insert": code.hex()}
        except Exception:  # it is damaged already
            return self._inserted(data, OPCODES)
        return changed(data, {"op": "member", "member": name, "edit": edit})

    def _frames(self, data: bytes) -> bytes:
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
            return self._inserted(data, WORDS)
        which = self._chance.randrange(len(frames))
        way = self._chance.randrange(5)
        if way == 0:
            del frames[which]
        elif way == 1:
            frames.insert(self._chance.randrange(len(frames)), frames[which])
        elif way == 2:
            frames[which], frames[0] = frames[0], frames[which]
        else:
            text = frames[which]
            name = "frame.json" if text.startswith(b"{") else "frame"
            frames[which] = changed(text, self._maker.edit(name, text))
        return b"".join(struct.pack("<II", len(text), zlib.crc32(text)) + text for text in frames)


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
