"""Key/value caches: a step stores the rows that it adds, and every step can be read whole."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.capture.intake import GrowingTensors, Intake
from glassengine.capture.record import record
from glassengine.compare.compare import compare
from glassengine.errors import CorruptError
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout.layout import Entry
from glassengine.recording.reader import Recording
from glassengine.recording.write.policy import RecordingPolicy
from glassengine.recording.write.writer import RecordingWriter
from glassengine.testing.models import llama

SITE = "0:kv.key"


class DynamicLayer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


class Cache:
    def __init__(self, keys: torch.Tensor) -> None:
        self.layers = [DynamicLayer(keys)]


class Attention(nn.Module):
    layer_idx = 0

    def forward(self, past_key_values: Cache) -> torch.Tensor:
        return past_key_values.layers[0].keys.double().sum()


def record_caches(path: Path, caches: list[torch.Tensor], **options: object) -> Recording:
    """Record a call for each of `caches`, and return the recording."""
    model = nn.Sequential(Attention())
    with record(model, path, **options):  # type: ignore[arg-type]
        for keys in caches:
            model(Cache(keys))
    return Recording.open(path)


def entries_of(opened: Recording) -> list[Entry]:
    return [entry for entry in opened.entries if entry.site == SITE]


def grown(count: int, **options: object) -> list[torch.Tensor]:
    whole = torch.randn(2, 3, count + 4, 5, generator=torch.Generator().manual_seed(0)).to(**options)  # type: ignore[call-overload]
    return [whole[:, :, : 4 + number].clone() for number in range(count)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


EDITS = {
    "adds a row": lambda keys: torch.cat([keys, torch.randn(*keys.shape[:2], 1, keys.shape[3])], dim=2),
    "adds three rows": lambda keys: torch.cat([keys, torch.randn(*keys.shape[:2], 3, keys.shape[3])], dim=2),
    "adds nothing": lambda keys: keys.clone(),
    "changes an old row": lambda keys: torch.cat([-keys[:, :, :1], keys[:, :, 1:], keys[:, :, :1]], dim=2),
    "flips the sign of a zero": lambda keys: torch.cat([keys * torch.tensor(0.0), keys[:, :, :1]], dim=2),
    "exchanges the rows of the batch": lambda keys: torch.cat([keys, keys[:, :, :1]], dim=2).flip(0),
    "drops rows": lambda keys: keys[:, :, : max(1, keys.shape[2] // 2)].clone(),
    "drops a sequence": lambda keys: torch.cat([keys, keys[:, :, :1]], dim=2)[:1],
    "takes another dtype": lambda keys: torch.cat([keys, keys[:, :, :1]], dim=2).bfloat16().float(),
    "holds NaN": lambda keys: torch.cat([keys, torch.full_like(keys[:, :, :1], torch.nan)], dim=2),
}


@pytest.mark.parametrize("seed", range(8))
def test_every_step_is_read_bit_for_bit_whatever_happens_to_the_cache(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    chooser = random.Random(seed)
    caches = [torch.randn(2, 3, 4, 5)]
    for _ in range(24):
        edit = "adds a row" if chooser.random() < 0.6 else chooser.choice(list(EDITS))
        caches.append(EDITS[edit](caches[-1]))
    opened = record_caches(tmp_path / "r", caches)
    found = entries_of(opened)
    assert opened.complete
    assert [entry.step for entry in found] == list(range(25))
    assert any(entry.added for entry in found)
    order = chooser.sample(range(25), 25)
    for step in [*range(25), *order]:
        assert found[step].shape == caches[step].shape
        assert found[step].nbytes == caches[step].nbytes
        assert torch.equal(bits(opened.tensor(found[step])), bits(caches[step]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_step_stores_the_rows_that_it_adds(tmp_path: Path, dtype: torch.dtype) -> None:
    caches = grown(6, dtype=dtype)
    found = entries_of(opened := record_caches(tmp_path / "r", caches))
    assert [entry.added.shape if entry.added else None for entry in found] == [None, *[(2, 3, 1, 5)] * 5]
    assert all(torch.equal(bits(opened.tensor(entry)), bits(caches[entry.step])) for entry in found)


def test_a_cache_that_stays_as_it_is_is_stored_once(tmp_path: Path) -> None:
    keys = torch.randn(1, 2, 50, 8)
    found = entries_of(opened := record_caches(tmp_path / "r", [keys] * 4))
    assert [entry.added.shape if entry.added else None for entry in found] == [None, *[(1, 2, 0, 8)] * 3]
    assert all(torch.equal(opened.tensor(entry), keys) for entry in found)


def test_a_long_generation_takes_a_tenth_of_what_its_caches_have_together(tmp_path: Path) -> None:
    opened = record_caches(tmp_path / "r", grown(400))
    size = sum(file.stat().st_size for file in (tmp_path / "r").iterdir())
    assert size < sum(entry.nbytes for entry in entries_of(opened)) / 10


def test_writing_into_a_tensor_that_was_read_changes_no_other_step(tmp_path: Path) -> None:
    caches = grown(4)
    found = entries_of(opened := record_caches(tmp_path / "r", caches))
    opened.tensor(found[2]).zero_()
    assert torch.equal(opened.tensor(found[3]), caches[3])


@pytest.mark.parametrize("steps", [[0, 2, 4], range(1, 4)])
def test_steps_that_are_not_recorded_are_no_base(tmp_path: Path, steps: Sequence[int]) -> None:
    caches = grown(6)
    opened = record_caches(tmp_path / "r", caches, steps=steps)
    assert all(torch.equal(opened.tensor(entry), caches[entry.step]) for entry in entries_of(opened))


def test_a_budget_of_bytes_counts_whole_caches(tmp_path: Path) -> None:
    opened = record_caches(tmp_path / "r", caches := grown(6), byte_budget=2000)
    assert {item.site for item in opened.left_out if "kv" in item.site} == {SITE}
    assert all(torch.equal(opened.tensor(entry), caches[entry.step]) for entry in entries_of(opened))


def test_caches_of_two_threads_are_not_mixed(tmp_path: Path) -> None:
    model = nn.Sequential(Attention())
    given: dict[float, torch.Tensor] = {}

    def run(first: int) -> None:
        for keys in grown(30):
            mine = keys + first
            given[float(mine.double().sum())] = mine
            model(Cache(mine))

    with record(model, tmp_path / "r"):
        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    opened = Recording.open(tmp_path / "r")
    for entry in entries_of(opened):
        said = float(opened.tensor("0", entry.step))
        assert torch.equal(opened.tensor(entry), given[said])


def test_steps_that_only_the_ring_of_a_killed_process_has_continue_those_on_disk(tmp_path: Path) -> None:
    caches = grown(40)
    child = os.fork()
    if not child:
        model = nn.Sequential(Attention())
        with record(model, tmp_path / "r"):
            for keys in caches:
                model(Cache(keys))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    opened = Recording.open(tmp_path / "r")
    found = entries_of(opened)
    assert len(found) >= 39
    assert all(torch.equal(opened.tensor(entry), caches[entry.step]) for entry in found)


def test_rows_without_the_step_before_are_damage_and_no_values(tmp_path: Path) -> None:
    opened = record_caches(tmp_path / "r", grown(3))
    last = entries_of(opened)[-1]
    alone = opened.entries.filtered(lambda site: site != SITE)
    opened.entries = alone
    with pytest.raises(CorruptError, match="the step before has its first rows"):
        opened.tensor(last)


@pytest.mark.parametrize(
    "base", [torch.zeros(4), torch.zeros(()), torch.zeros(1, 2, 3, 9), torch.zeros(1, 2, 3, 4).half()]
)
def test_rows_that_fit_no_base_are_damage(tmp_path: Path, base: torch.Tensor) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as writer:
        writer.write(SITE, 0, base)
        writer.commit(0)
        writer.write(f"{SITE}+", 1, torch.zeros(1, 2, 1, 4), axes={"added": 2})
        writer.commit(1)
    opened = Recording.open(tmp_path / "r")
    with pytest.raises(CorruptError):
        opened.tensor(SITE, 1)


def test_a_comparison_finds_the_step_in_which_an_old_row_changes(tmp_path: Path) -> None:
    caches = grown(6)
    changed = [keys.clone() for keys in caches]
    for keys in changed[3:]:
        keys[1, 2, 0] += 1
    record_caches(tmp_path / "baseline", caches)
    record_caches(tmp_path / "candidate", changed)
    found = compare(tmp_path / "baseline", tmp_path / "candidate")
    assert not found.ok
    assert [pair.step for pair in found.pairs if pair.site == SITE and pair.verdict == "wrong"] == [3, 4, 5]


def test_a_generation_records_what_the_model_caches(tmp_path: Path) -> None:
    model = llama().eval()
    with record(model, tmp_path / "r", sites=["*:kv.*"]), torch.no_grad():
        cache = model.generate(
            torch.tensor([[3, 5, 7]]), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
        ).past_key_values
    opened = glass.open(tmp_path / "r")
    for index, layer in enumerate(cache.layers):
        entry = opened.entry(f"model.layers.{index}.self_attn:kv.value", 7)
        assert entry.added
        assert torch.equal(opened.tensor(entry), layer.values)


def test_what_a_step_does_not_store_is_no_base_of_the_next(tmp_path: Path) -> None:
    caches = grown(4)
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0, keeps_every_step=True)
    intake.take_cache(SITE, 0, caches[0])
    intake.commit(0)
    intake.take_cache(SITE, 1, caches[1])
    intake.take_cache(SITE, 1, caches[3])  # the same name again
    intake.commit(1)
    intake.take_cache(SITE, 1, caches[2])  # too late
    intake.take_cache(SITE, 2, caches[2])
    intake.commit(2)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert [item.reason for item in opened.left_out] == ["the step has another tensor of that name"]
    assert all(torch.equal(opened.tensor(SITE, step), caches[step]) for step in range(3))


def test_caches_of_torch_func_and_without_memory_are_no_error(tmp_path: Path) -> None:
    model, freed = nn.Sequential(Attention()), torch.zeros(1, 2, 3, 4)
    with record(model, tmp_path / "r"):
        torch.func.vmap(lambda keys: model(Cache(keys)))(torch.randn(3, 1, 2, 3, 4))
        cache = Cache(freed)
        model[0].register_forward_hook(lambda *_: freed.untyped_storage().resize_(0))
        model(cache)
    opened = Recording.open(tmp_path / "r")
    assert opened.complete
    assert any("memory" in item.reason for item in opened.left_out)


def test_complex_caches_are_stored_whole() -> None:
    growing = GrowingTensors()
    assert growing.added("x", 0, torch.zeros(1, 1, 1, 1, dtype=torch.complex64)) is None
