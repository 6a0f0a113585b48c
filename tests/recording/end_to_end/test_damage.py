"""Killed writers, full disks and hostile files: what is committed is read, everything else is refused politely."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.recording.layout import layout
from glassengine.recording.layout import records as frames
from glassengine.recording.layout.records import frame
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter
from tests import children


def make(path: Path, steps: int = 3) -> Path:
    with RecordingWriter(path, metadata={}) as w:
        for step in range(steps):
            w.write("a", step, torch.full((100,), float(step)))
            w.write("b", step, torch.arange(7) + step)
            w.commit(step)
    return path


def set_manifest(path: Path, **changes: object) -> None:
    file = path / layout.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    source = "import sys, torch\nfrom glassengine.recording.write.writer import RecordingWriter\n" + textwrap.dedent(
        code
    )
    root = Path(__file__).parents[3] / "src"
    return children.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_kill_in_the_middle_keeps_the_committed_steps(tmp_path: Path) -> None:
    child = run(
        """
        w = RecordingWriter(sys.argv[1], metadata={"seed": 1})
        for step in range(10 ** 6):
            for site in range(20):
                w.write(f"s{site}", step, torch.full((1000,), step * 100 + site))
            w.commit(step)
            print(step, flush=True)
        """,
        tmp_path / "r",
    )
    with child:
        assert child.stdout is not None
        committed = [int(child.stdout.readline()) for _ in range(20)][-1]
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
    committed = int(rest[-1]) if rest else committed
    r = Recording.open(tmp_path / "r")
    assert not r.complete
    assert r.metadata == {"seed": 1}
    assert r.steps[: committed + 1] == list(range(committed + 1))
    for entry in r.entries:
        assert torch.equal(r.tensor(entry), torch.full((1000,), entry.step * 100 + int(entry.site[1:])))


def test_an_exception_leaves_a_sealed_recording_marked_incomplete(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(3))
        w.commit(0)
        w.write("a", 1, torch.ones(3))
        raise ZeroDivisionError
    r = Recording.open(tmp_path / "r")
    assert (r.complete, r.steps, r.incomplete_because) == (False, [0], "stopped by ZeroDivisionError")
    assert (tmp_path / "r" / "shard-00000.safetensors").exists()


def test_an_uncommitted_step_makes_it_incomplete(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(3))
    r = Recording.open(tmp_path / "r")
    assert (r.complete, r.entries, r.incomplete_because) == (False, (), "written but not committed: step 0")


def test_an_open_recording_can_be_read(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(3))
        w.commit(0, token_ids=[[1, 2], [5]])
        w.write("a", 1, torch.ones(3))
        r = Recording.open(tmp_path / "r")
        assert (r.steps, r.incomplete_because) == ([0], "it was never closed")
        assert r.metadata == {"token_ids": [[1, 2], [5]]}
        assert r.tensor("a").sum() == 3
        w.commit(1, token_ids=[[3], [6]])
        r = Recording.open(tmp_path / "r")
    assert not (tmp_path / "r" / "shard-00000.part").exists()
    assert r.tensor("a", 1).sum() == 3
    assert Recording.open(tmp_path / "r").metadata == {"token_ids": [[1, 2, 3], [5, 6]]}
    assert json.loads((tmp_path / "r" / layout.MANIFEST).read_text())["metadata"] == r.metadata


def test_a_full_disk_says_what_is_safe(tmp_path: Path) -> None:
    child = run(
        """
        import resource, signal
        from glassengine.errors import GlassError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, 2 ** 20))
        try:
            with RecordingWriter(sys.argv[1], metadata={}) as w:
                for step in range(100):
                    w.write("a", step, torch.full((50_000,), float(step)))
                    w.commit(step)
        except GlassError as error:
            print(error)
        """,
        tmp_path / "r",
    )
    said, _ = child.communicate()
    assert "cannot be written" in said
    assert "3 completed steps are safe" in said
    r = Recording.open(tmp_path / "r")
    assert (r.complete, r.steps) == (False, [0, 1, 2])
    assert [float(r.tensor("a", step)[0]) for step in r.steps] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("cut", [1, 7, 8, 60, 119])
def test_recovery_cuts_a_truncated_index(tmp_path: Path, cut: int) -> None:
    path = make(tmp_path / "r")
    index = path / layout.INDEX
    index.write_bytes(index.read_bytes()[:-cut])
    with pytest.raises(CorruptError, match="the recording is damaged"):
        Recording.open(path)
    set_manifest(path, state="writing")
    r = Recording.open(path)
    assert (r.complete, r.steps) == (False, [0, 1])
    assert torch.equal(r.tensor("a", 1), torch.full((100,), 1.0))


def test_an_index_cut_at_a_record_is_noticed(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    (path / layout.INDEX).write_bytes(b"")
    with pytest.raises(CorruptError, match="intact: 0 steps"):
        Recording.open(path)


def test_every_flipped_index_byte_is_noticed(tmp_path: Path) -> None:
    path = make(tmp_path / "r", steps=1)
    index = path / layout.INDEX
    good = index.read_bytes()
    for position in range(0, len(good), 7):
        index.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        with pytest.raises(CorruptError):
            Recording.open(path)


def test_flipped_values_are_noticed(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    file = path / "shard-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[layout.HEADER_BYTES + 5] ^= 1
    file.write_bytes(data)
    r = Recording.open(path)
    with pytest.raises(CorruptError, match="checksum does not match"):
        r.tensor("a", 0)
    assert r.tensor("a", 1).sum() == 100


def test_a_truncated_shard_loses_only_its_steps(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    file = path / "shard-00000.safetensors"
    os.truncate(file, file.stat().st_size - 500)
    with pytest.raises(CorruptError, match="not on file"):
        Recording.open(path)
    set_manifest(path, state="writing")
    assert Recording.open(path).steps == [0, 1]


TENSOR = {
    "kind": "tensor", "site": "a", "step": 0, "rank": 0, "dtype": "float32", "shape": [25], "axes": {}, "node": None,
    "nbytes": 100, "shard": 0, "offset": 0, "checksum": 0,
}  # fmt: skip
HOSTILE = {
    "absurd shape": [{**TENSOR, "shape": [1 << 62], "nbytes": 1 << 64}],
    "absurd product": [{**TENSOR, "shape": [1 << 40, 1 << 40], "nbytes": 1 << 62}],
    "absurd offset": [{**TENSOR, "offset": (1 << 62)}],
    "negative offset": [{**TENSOR, "offset": -64}],
    "unaligned": [{**TENSOR, "offset": 3}],
    "wrong size": [{**TENSOR, "nbytes": 64}],
    "unknown dtype": [{**TENSOR, "dtype": "__class__"}],
    "bool as number": [{**TENSOR, "step": True}],
    "shape of text": [{**TENSOR, "shape": ["9"]}],
    "missing": [{"kind": "tensor"}],
    "missing shard": [{**TENSOR, "shard": 7}],
    "path as shard": [{**TENSOR, "shard": "../../x"}],
    "axes out of range": [{**TENSOR, "axes": {"batch": 1}}],
    "overlap": [TENSOR, {**TENSOR, "site": "b", "offset": 64}],
    "overlap before": [{**TENSOR, "offset": 64}, {**TENSOR, "site": "b"}],
    "twice": [TENSOR, TENSOR],
    "unknown kind": [{"kind": "code"}],
    "other step": [{**TENSOR, "step": 5}],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_records_are_refused(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "r", steps=1)
    records = [*HOSTILE[name], {"kind": "commit", "step": 0, "num_tensors": len(HOSTILE[name])}]
    (path / layout.INDEX).write_bytes(b"".join(map(frame, records)))
    set_manifest(path, num_tensors=len(HOSTILE[name]))
    with pytest.raises(CorruptError):
        Recording.open(path)


PART = {key: value for key, value in TENSOR.items() if key in ("site", "dtype", "shape", "axes", "node", "nbytes")}
GROUP = {"kind": "group", "group": 0, "rank": 0, "tensors": [PART, {**PART, "site": "b"}]}
BLOCK = {"kind": "block", "group": 0, "step": 0, "shard": 0, "offset": 0, "checksum": 0}
LEFT_OUT = {"kind": "left_out", "site": "a", "step": 0, "rank": 0, "reason": "", "dtype": None, "shape": None}
STATISTICS = {"min": 1.0, "max": 2.0, "norm": 3.0, "num_nonfinite": 0}
HOSTILE_BLOCKS = {
    "not described": [BLOCK],
    "no tensors": [{**GROUP, "tensors": []}, BLOCK],
    "not a list": [{**GROUP, "tensors": 5}, BLOCK],
    "not objects": [{**GROUP, "tensors": [1]}, BLOCK],
    "too many": [{**GROUP, "tensors": [{**PART, "site": str(i)} for i in range(513)]}, BLOCK],
    "empty tensors": [{**GROUP, "tensors": [{**PART, "shape": [0], "nbytes": 0}]}, BLOCK],
    "wrong size": [{**GROUP, "tensors": [{**PART, "nbytes": 8}]}, BLOCK],
    "twice in a block": [{**GROUP, "tensors": [PART, PART]}, BLOCK],
    "beyond the shard": [GROUP, {**BLOCK, "offset": 1 << 20}],
    "other shard": [GROUP, {**BLOCK, "shard": 7}],
    "overlap": [GROUP, BLOCK, {**BLOCK, "offset": 64}],
    "same site in two blocks": [GROUP, BLOCK, BLOCK],
    "unaligned": [GROUP, {**BLOCK, "offset": 8}],
    "other step": [GROUP, {**BLOCK, "step": 3}],
    "number of a group": [{**GROUP, "group": -1}, BLOCK],
    "bytes of itself": [{**GROUP, "tensors": [PART, {**PART, "site": "b", "same_as": 1}]}, BLOCK],
    "bytes of a later one": [{**GROUP, "tensors": [{**PART, "same_as": 1}, {**PART, "site": "b"}]}, BLOCK],
    "bytes of no number": [{**GROUP, "tensors": [PART, {**PART, "site": "b", "same_as": [0]}]}, BLOCK],
    "bytes of another size": [
        {**GROUP, "tensors": [PART, {**PART, "site": "b", "shape": [1], "nbytes": 4, "same_as": 0}]},
        BLOCK,
    ],
    "bytes of one without": [
        {**GROUP, "tensors": [PART, *({**PART, "site": s, "same_as": i} for i, s in enumerate("bc"))]},
        BLOCK,
    ],
    "left out, no reason": [{**LEFT_OUT, "reason": None}],
    "left out, shape": [{**LEFT_OUT, "shape": [-1]}],
    "left out, step": [{**LEFT_OUT, "step": 9}],
    "left out, statistics": [{**LEFT_OUT, "statistics": [1]}],
    "left out, numbers": [{**LEFT_OUT, "statistics": {**STATISTICS, "min": "1"}}],
    "left out, norm": [{**LEFT_OUT, "statistics": {**STATISTICS, "norm": None}}],
}


@pytest.mark.parametrize("name", HOSTILE_BLOCKS)
def test_hostile_blocks_are_refused(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "r", steps=1)
    records = HOSTILE_BLOCKS[name]
    counts = {"num_tensors": 2 * sum(r["kind"] == "block" for r in records)}
    counts["num_left_out"] = sum(r["kind"] == "left_out" for r in records)
    commit = {"kind": "commit", "step": 0, **counts}
    (path / layout.INDEX).write_bytes(b"".join(map(frame, [*records, commit])))
    set_manifest(path, num_tensors=counts["num_tensors"])
    with pytest.raises(CorruptError):
        Recording.open(path)


def test_blocks_that_are_in_order_are_read(tmp_path: Path) -> None:
    # The counterpart: what the hostile records are made from is accepted.
    path = make(tmp_path / "r", steps=1)
    records = [GROUP, BLOCK, {**LEFT_OUT, "statistics": STATISTICS}]
    commit = {"kind": "commit", "step": 0, "num_tensors": 2, "num_left_out": 1}
    (path / layout.INDEX).write_bytes(b"".join(map(frame, [*records, commit])))
    assert [entry.site for entry in Recording.open(path).entries] == ["a", "b"]
    group = {**GROUP, "tensors": [PART, {**PART, "site": "b", "same_as": 0}]}
    (path / layout.INDEX).write_bytes(b"".join(map(frame, [group, *records[1:], commit])))
    first, second = Recording.open(path).entries
    assert first.location == second.location


def test_a_small_index_that_claims_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.recording.layout.index.MAX_ENTRIES", 5)
    path = make(tmp_path / "r", steps=1)
    # The shard grows without taking any room on the disk.
    os.truncate(path / "shard-00000.safetensors", 1 << 24)
    blocks = [{**BLOCK, "step": step, "offset": 256 * step} for step in range(4)]
    commits = [{"kind": "commit", "step": step, "num_tensors": 2, "num_left_out": 0} for step in range(4)]
    pairs = [record for pair in zip(blocks, commits, strict=True) for record in pair]
    (path / layout.INDEX).write_bytes(b"".join(map(frame, [GROUP, *pairs])))
    set_manifest(path, state="writing")
    opened = Recording.open(path)
    assert opened.steps == [0, 1] and opened.incomplete_because == "more than 5 tensors"


@pytest.mark.parametrize("head", [b"\xff\xff\xff\xff\0\0\0\0", b"\0", b"\x02\0\0\0\0\0\0\0[]"])
def test_hostile_frames_are_refused(tmp_path: Path, head: bytes) -> None:
    path = make(tmp_path / "r", steps=1)
    index = path / layout.INDEX
    index.write_bytes(head + index.read_bytes())
    with pytest.raises(CorruptError):
        Recording.open(path)


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    import struct
    import zlib

    path = make(tmp_path / "r", steps=1)
    text = b"[" * 100_000
    (path / layout.INDEX).write_bytes(struct.pack("<II", len(text), zlib.crc32(text)) + text)
    with pytest.raises(CorruptError):
        Recording.open(path)
    (path / layout.MANIFEST).write_bytes(text)
    with pytest.raises(CorruptError, match="manifest"):
        Recording.open(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": "1"}', "\xff"])
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    path = make(tmp_path / "r")
    (path / layout.MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CorruptError, match="manifest of a recording is damaged"):
        Recording.open(path)


def test_newer_schema_is_refused_politely(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    set_manifest(path, schema_version=99)
    with pytest.raises(CorruptError, match=r"newer version(.|\n)*schema version 99(.|\n)*update"):
        Recording.open(path)


@pytest.mark.parametrize("name", [layout.INDEX, layout.MANIFEST, "shard-00000.safetensors"])
def test_links_out_of_the_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "r")
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError):
        Recording.open(path)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    (path / layout.INDEX).unlink()
    os.mkfifo(path / layout.INDEX)
    with pytest.raises(CorruptError, match="not a plain file"):
        Recording.open(path)


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recording found"):
        Recording.open(tmp_path)


def test_existing_output(tmp_path: Path) -> None:
    path = make(tmp_path / "r")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="--overwrite"):
        RecordingWriter(path, metadata={})
    with RecordingWriter(path, metadata={}, overwrite=True) as w:
        w.write("c", 0, torch.ones(1))
        w.commit(0)
    assert Recording.open(path).sites() == ["c"]
    assert (path / "notes.txt").read_text() == "mine"


def test_a_directory_of_other_files_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        RecordingWriter(tmp_path, metadata={}, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot write the recording"):
        RecordingWriter(tmp_path / "file", metadata={}, overwrite=True)
    with pytest.raises(UsageError, match="cannot write the recording"):
        RecordingWriter(tmp_path / "file" / "below", metadata={})


def test_misuse_of_the_writer(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(1))
        with pytest.raises(UsageError, match="the same site twice"):
            w.write("a", 0, torch.ones(1))
        w.commit(0)
        for call, message in (
            (lambda: w.write("b", 0, torch.ones(1)), "which is committed"),
            (lambda: w.commit(0), "committed twice"),
            (lambda: w.write("b", -1, torch.ones(1)), "numbers from 0 on"),
            (lambda: w.write("b" * 20_000, 1, torch.ones(1)), "a longer name"),
            (lambda: w.write("b", 1, torch.ones(2).to_sparse()), r"sparse_coo(.|\n)*a dense tensor"),
            (lambda: w.write("b", 1, torch.ones(2, device="meta")), "meta"),
            (lambda: w.write("b", 1, torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)), "float4"),
        ):
            with pytest.raises(UsageError, match=message):
                call()
    assert Recording.open(tmp_path / "r").complete
    with pytest.raises(UsageError, match="closed"):
        w.write("a", 3, torch.ones(1))
    with pytest.raises(UsageError, match="not JSON"):
        RecordingWriter(tmp_path / "x", metadata={"a": float("nan")})
    assert not (tmp_path / "x").exists()
    w = RecordingWriter(tmp_path / "y", metadata={})
    w.metadata["bad"] = torch.ones(1)
    with pytest.raises(UsageError, match=r"metadata is not JSON(.|\n)*'bad'"):
        w.close()
    assert Recording.open(tmp_path / "y").incomplete_because == "it was never closed"


def test_long_prompts_and_many_rows(tmp_path: Path) -> None:
    rows = [list(range(200_000)), [], *([i] for i in range(5000))]
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.commit(0, token_ids=rows)
        w.commit(1, token_ids=[[-1]] * len(rows))
    r = Recording.open(tmp_path / "r")
    assert r.metadata["token_ids"] == [[*row, -1] for row in rows]


def test_s9_tokens_of_decoding_are_columns_between_all_others(tmp_path: Path) -> None:
    steps: list[list[list[int]]] = [
        [[5, 6, 7], [8]],  # prompts
        *([[step], [1 << 61]] for step in range(20)),
        [[1], [2], [3]],  # another row comes
        [[1, 2], [], [4]],
        [[-1], [1 << 80], [True]],  # what no model gives
        *([[step]] for step in range(5)),
    ]
    rows: list[list[int]] = [[], [], []]
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for number, step in enumerate(steps):
            w.commit(number, token_ids=step)
            for row, ids in zip(rows, step, strict=False):
                row.extend(ids)
        assert Recording.open(tmp_path / "r").metadata["token_ids"] == rows
        index = (tmp_path / "r" / layout.INDEX).read_bytes()
    assert index.count(b"tokens") == 3
    # The tokens of a step that was not committed are not there.
    manifest = tmp_path / "r" / layout.MANIFEST
    manifest.write_text(manifest.read_text().replace('"complete"', '"writing"'))
    (tmp_path / "r" / layout.INDEX).write_bytes(index + frames.token_frame(0, len(steps), 9))
    assert Recording.open(tmp_path / "r").metadata["token_ids"] == rows


ODD_TOKENS = [
    (layout.MAX_ROWS, 0, 7, 0, 0),
    (0, 0, 1 << 62, 0, 0),
    (0, 1 << 63, 7, 0, 0),
    (0, 0, 7, 1, 0),
    (0, 0, 7, 0, 1),
]


@pytest.mark.parametrize("fields", ODD_TOKENS)
def test_hostile_tokens_of_a_fixed_size_are_refused(tmp_path: Path, fields: tuple[int, ...]) -> None:
    path = make(tmp_path / "r", steps=1)
    index = path / layout.INDEX
    index.write_bytes(frames._fixed(frames.TOKEN, *fields) + index.read_bytes())
    with pytest.raises(CorruptError, match="too large"):
        Recording.open(path)


TOKENS = [{}, {"rows": 1}, {"rows": [[1]]}, {"rows": [[-1, []]]}, {"rows": [[1 << 40, []]]}, {"rows": [[0, ["1"]]]}]


@pytest.mark.parametrize("payload", TOKENS)
def test_hostile_token_ids_are_refused(tmp_path: Path, payload: dict[str, object]) -> None:
    path = make(tmp_path / "r", steps=1)
    index = path / layout.INDEX
    index.write_bytes(frame({"kind": "tokens", **payload}) + index.read_bytes())
    with pytest.raises(CorruptError, match="token id"):
        Recording.open(path)


def test_nothing_can_be_written_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    w = RecordingWriter(tmp_path / "r", metadata={})
    w.write("a", 0, torch.ones(1))
    w.commit(0)
    monkeypatch.setattr("glassengine.recording.write.shard.write_all", full)
    with pytest.raises(GlassError, match=r"No space left(.|\n)*1 completed steps are safe"):
        w.write("a", 1, torch.ones(1))
    with pytest.raises(GlassError, match="cannot continue"):
        w.commit(1)
    w.close()
    assert Recording.open(tmp_path / "r").steps == [0]
