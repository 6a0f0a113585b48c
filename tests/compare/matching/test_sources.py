"""Rows of padding and unused slots of caches are not compared; everything else is."""

from pathlib import Path

import pytest
import torch

from glassengine.compare import compare
from glassengine.recording.write.writer import RecordingWriter

IDS = torch.tensor([[0, 0, 7], [4, 5, 6]])
MASK = (IDS > 0).long()


def recording(path: Path, site: str, value: torch.Tensor, *, lengths: list[int] | None = None) -> Path:
    metadata = {} if lengths is None else {"prompt_lengths": lengths, "padding": "left"}
    with RecordingWriter(path, metadata=metadata) as writer:
        if lengths is None:
            writer.write(".:in.input_ids", 0, IDS)
            writer.write(".:in.attention_mask", 0, MASK)
        writer.write(site, 0, value)
        writer.commit(0)
    return path


# Where the padding of the first row lies in tensors of several layouts, and a place that counts.
LAYOUTS = [
    ("hidden", (2, 3, 5), (0, 1, 2), (0, 2, 2)),
    ("flattened", (6, 5), (1, 2), (2, 2)),
    ("heads", (2, 4, 3, 5), (0, 3, 0, 1), (0, 3, 2, 1)),
    ("layer:kv.key", (2, 4, 3, 5), (0, 0, 1, 4), (0, 0, 2, 4)),
]


@pytest.mark.parametrize(("site", "shape", "padding", "token"), LAYOUTS)
@pytest.mark.parametrize("lengths", [None, [1, 3]], ids=["mask", "lengths"])
def test_padding_does_not_count_and_tokens_do(
    tmp_path: Path,
    site: str,
    shape: tuple[int, ...],
    padding: tuple[int, ...],
    token: tuple[int, ...],
    lengths: list[int] | None,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    baseline = recording(tmp_path / "x", site, x, lengths=lengths)
    for place, verdict in ((padding, "identical"), (token, "wrong")):
        y = x.clone()
        y[place] = 9.0
        path = recording(tmp_path / verdict, site, y, lengths=lengths)
        assert compare(baseline, path).verdict == verdict


def test_where_the_tokens_could_be_elsewhere_everything_counts(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 3, 5)  # three heads or three tokens
    y = x.clone()
    y[0, 1, 1, 0] += 1
    assert compare(recording(tmp_path / "x", "a", x), recording(tmp_path / "y", "a", y)).verdict == "wrong"


def test_a_static_cache_is_compared_with_a_growing_one_as_far_as_both_are_filled(tmp_path: Path) -> None:
    grown = torch.randn(2, 4, 3, 5)
    static = torch.cat([grown, torch.zeros(2, 4, 6, 5)], 2)
    x = recording(tmp_path / "x", "layer:kv.value", grown)
    assert compare(x, recording(tmp_path / "y", "layer:kv.value", static)).verdict == "identical"
    static[1, 2, 0, 3] += 0.5
    assert compare(x, recording(tmp_path / "z", "layer:kv.value", static)).verdict == "wrong"


def test_two_static_caches_differ_only_where_something_was_written(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 5)
    y = x.clone()
    y[:, :, 3:] = 77.0  # left from an earlier session
    a, b = (recording(tmp_path / n, "layer:kv.key", v, lengths=[1, 3]) for n, v in (("a", x), ("b", y)))
    assert compare(a, b).verdict == "identical"


def test_a_mask_of_bools_is_a_mask_to_be_added(tmp_path: Path) -> None:
    seen = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    x = recording(tmp_path / "x", "mask", seen)
    assert compare(x, recording(tmp_path / "y", "mask", added)).verdict == "identical"
    added[1, 0, 3, 3] = torch.finfo(torch.float32).min
    assert compare(x, recording(tmp_path / "z", "mask", added)).verdict == "wrong"
