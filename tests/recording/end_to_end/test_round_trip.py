"""What is written comes back bit for bit, whatever its dtype, shape, strides or name."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from glassengine.errors import UsageError
from glassengine.recording.layout.description import PAD_PREFIX
from glassengine.recording.layout.layout import HEADER_BYTES, STORED
from glassengine.recording.reader import Recording
from glassengine.recording.write import shard as shards
from glassengine.recording.write.writer import RecordingWriter

DTYPES = [getattr(torch, name) for name in STORED]


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes: every value, NaN payloads included."""
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tensor_and_any_name(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "recording"
    names = data.draw(st.lists(st.text(max_size=30), min_size=1, max_size=6, unique=True))
    written = {}
    with RecordingWriter(path, metadata={"seed": 3}) as w:
        for seed, name in enumerate(names):
            shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
            tensor = filled(data.draw(st.sampled_from(DTYPES)), shape, seed)
            if data.draw(st.booleans()) and tensor.ndim:
                tensor = tensor.transpose(0, -1)
            written[name] = tensor
            w.write(name, seed % 2, tensor)
        w.commit(0)
        w.commit(1)
    recording = Recording.open(path)
    assert recording.complete
    assert recording.metadata == {"seed": 3}
    assert set(recording.sites()) == set(names)
    for name, tensor in written.items():
        got = recording.tensor(name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert bits(got) == bits(tensor)
    for file in path.glob("shard-*"):
        with safe_open(file, "pt") as sealed:
            assert len([key for key in sealed.keys() if not key.startswith(PAD_PREFIX)]) == len(names)  # noqa: SIM118


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(4, 3),
        torch.arange(20)[::3],
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(True),
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["expanded", "strided", "conjugate", "negative", "scalar", "empty", "grad", "parameter"],
)
def test_views_and_flags(tmp_path: Path, tensor: torch.Tensor) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("x", 0, tensor)
        w.commit(0)
    assert torch.equal(Recording.open(tmp_path / "r").tensor("x"), tensor.detach())


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b/c", "", "\u202eevil", "x" * 4096, "nul\0", "\ud800"])
def test_names_never_become_paths(tmp_path: Path, name: str) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write(name, 0, torch.ones(1))
        w.commit(0)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "index.log",
        "recording.json",
        "shard-00000.safetensors",
    ]
    assert Recording.open(tmp_path / "r").sites() == [name]


def test_sealed_shard_opens_with_safetensors(tmp_path: Path) -> None:
    x, z = torch.randn(3, 5), torch.randn(2, dtype=torch.complex128)
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("x", 0, x)
        w.write("alias", 0, x)
        w.write("z", 0, z)
        w.commit(0)
    with safe_open(tmp_path / "r" / "shard-00000.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("step0/rank0/x"), x)
        assert torch.equal(torch.view_as_complex(f.get_tensor("step0/rank0/z")), z)
        assert json.loads(f.metadata()["aliases"])["step0/rank0/alias"]["of"] == "step0/rank0/x"


def test_entries_axes_ranks_and_order(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("b", 1, torch.zeros(2, 3))
        w.write("a", 1, torch.ones(2, 3), rank=0, axes={"batch": 0, "sequence": 1}, node="add_1")
        w.write("a", 1, torch.full((1,), 7), rank=1)
        w.commit(1)
        w.write("a", 0, torch.full((1,), 5))
        w.commit(0)
    r = Recording.open(tmp_path / "r")
    assert r.steps == [0, 1]
    assert [(e.site, e.step, e.rank) for e in r.entries] == [("a", 0, 0), ("b", 1, 0), ("a", 1, 0), ("a", 1, 1)]
    entry = r.entry("a", 1)
    assert (entry.axes, entry.node, entry.dtype, entry.shape, entry.nbytes) == (
        {"batch": 0, "sequence": 1}, "add_1", "float32", (2, 3), 24,
    )  # fmt: skip
    assert r.tensor("a", 1, 1).item() == 7
    assert r.sites(0) == ["a"]
    with pytest.raises(UsageError, match="several steps"):
        r.tensor("a")
    with pytest.raises(UsageError, match=r"unknown site 'bb'"):
        r.entry("bb", 1)


def test_two_steps_may_be_open_at_once(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for value, (site, step) in enumerate([("a", 0), ("b", 1), ("c", 0), ("d", 1)]):
            w.write(site, step, torch.full((40,), value))
        w.commit(0)
        w.commit(1)
    r = Recording.open(tmp_path / "r")
    assert [int(r.tensor(e)[0]) for e in r.entries] == [0, 2, 1, 3]


def test_a_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for i in range(50):
            w.write(f"s{i}", 0, x if i % 2 else x.view(10, 100))
        w.commit(0)
    r = Recording.open(tmp_path / "r")
    assert len({entry.location for entry in r.entries}) == 1
    assert (r.tensor("s1").shape, r.tensor("s2").shape) == ((1000,), (10, 100))
    assert torch.equal(r.tensor("s2").flatten(), x)


@pytest.mark.parametrize("inference", [False, True])
def test_a_refilled_buffer_is_another_tensor(tmp_path: Path, inference: bool) -> None:
    with torch.inference_mode(inference), RecordingWriter(tmp_path / "r", metadata={}) as w:
        x = torch.zeros(8)
        w.write("before", 0, x)
        x.numpy()[:] = 1  # as a compiled kernel does: the version counter does not move
        w.write("after", 0, x)
        w.commit(0)
    r = Recording.open(tmp_path / "r")
    assert (r.tensor("before").sum(), r.tensor("after").sum()) == (0, 8)


def test_freed_memory_is_not_taken_for_the_same_tensor(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for i in range(30):
            w.write(f"s{i}", 0, torch.full((256,), i))
        w.commit(0)
    r = Recording.open(tmp_path / "r")
    assert [int(r.tensor(f"s{i}")[0]) for i in range(30)] == list(range(30))


def test_shards_rotate_by_size_and_by_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    x = torch.arange(100.0)
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for i in range(10):
            w.write(f"x{i}", 0, x + i)
            w.write(f"alias{i}", 0, x)
        w.write("escaped\n" * 1500, 0, torch.ones(1))
        for i in range(30):
            w.write("\u202e" * 4000 + str(i), 0, x)
        w.commit(0)
    assert len(list((tmp_path / "r").glob("shard-*.safetensors"))) >= 4
    for file in (tmp_path / "r").glob("shard-*.safetensors"):
        # Each shard reserves twice the header of the one before.
        number = int(file.stem.removeprefix("shard-"))
        assert int.from_bytes(file.read_bytes()[:8], "little") == (HEADER_BYTES << number) - 8
        with safe_open(file, "pt") as f:
            f.keys()
    r = Recording.open(tmp_path / "r")
    assert all(float(r.tensor(f"x{i}")[1]) == i + 1 for i in range(10))
    assert torch.equal(r.tensor("\u202e" * 4000 + "29"), x)


@pytest.mark.parametrize("count", [100, 1 << 20])
def test_writing_into_what_was_read_leaves_the_file_alone(count: int, tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("x", 0, torch.zeros(count))
        w.commit(0)
    first = Recording.open(tmp_path / "r")
    first.tensor("x").fill_(1)
    assert first.tensor("x").sum() == Recording.open(tmp_path / "r").tensor("x").sum() == 0


def test_select_and_summary(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for name in ("model.layers.0.mlp", "model.layers.1.mlp", "model.norm"):
            w.write(name, 0, torch.tensor([1.0, 2.0, float("nan")]))
        w.commit(0)
    r = Recording.open(tmp_path / "r")
    assert [e.site for e in r.select("layers.*.mlp")] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    found = r.summary(r.entries[0])
    assert (found.mean, found.num_nan, found.std) == (1.5, 1, pytest.approx(0.5**0.5))
    with pytest.raises(UsageError, match="unknown site 'nothing'"):
        r.select("nothing")
