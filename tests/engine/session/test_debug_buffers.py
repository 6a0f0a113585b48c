"""A step's tensors by every name they have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine.manifest import AddedOutput
from glassengine.engine.prompts import pad_left
from glassengine.engine.run import generate as generate_module
from glassengine.engine.run.engine import Engine
from glassengine.engine.session.debug_buffers import (
    MAX_LOGITS_BYTES,
    MIN_TOKENS,
    DebugBuffers,
    PieceOutputs,
    automatic_chunk,
)
from glassengine.errors import UsageError
from glassengine.program.representation.outputs import PREFIX
from glassengine.sites import Site, SiteTable
from glassengine.testing import models


def added(name: str, site: str, node: str) -> AddedOutput:
    return AddedOutput(name, site, node, None, "float32", (1,), {}, None)


@pytest.fixture
def buffers() -> DebugBuffers:
    entries = [
        added("model.layers.5.mlp_output", "model.layers.5.mlp_output", "linear_5"),
        added("model.layers.6.mlp_output", "model.layers.6.mlp_output", "linear_6"),
        added("head", "lm_head/linear.0", "linear_9"),
    ]
    names = ["input_ids", *(entry.name for entry in entries)]
    values = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    return DebugBuffers(values, {entry.name: entry for entry in entries})


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("input_ids", 0),
        ("model.layers.6.mlp_output", 2),
        ("layers.6.mlp_output", 2),
        ("6.mlp_output", 2),
        ("layers.?.mlp_output", None),
        ("layers.[6].mlp_output", None),
        ("linear_5", 1),
        ("lm_head/linear.0", 3),
        ("head", 3),
        ("re:layers.5", 1),
        ("mlp_output", None),
        ("layers.7.mlp_output", None),
    ],
)
def test_names(buffers: DebugBuffers, wanted: str, index: int | None) -> None:
    if index is not None:
        assert buffers[wanted].item() == index
        return
    with pytest.raises(KeyError) as caught:
        buffers[wanted]
    assert isinstance(caught.value, UsageError) and "model.layers.6.mlp_output" in str(caught.value)


def test_debug_buffers_are_a_dict_of_the_requested_names(buffers: DebugBuffers) -> None:
    assert "layers.6.mlp_output" not in buffers and buffers.get("layers.6.mlp_output") is None
    assert next(iter(buffers)) == "input_ids" and len(buffers) == 4


def test_saved_debug_buffers_are_a_plain_dict(buffers: DebugBuffers, tmp_path: Path) -> None:
    torch.save(buffers, tmp_path / "step0.pt")
    found = torch.load(tmp_path / "step0.pt", weights_only=True)
    assert list(found) == list(buffers) and all(torch.equal(found[name], buffers[name]) for name in found)
    assert list(copy.deepcopy(buffers)) == list(buffers)
    assert glass.compare(tmp_path / "step0.pt", tmp_path / "step0.pt").ok


def test_the_line_of_the_document(engine: Engine) -> None:
    """`debug_buffer['layers.6.mlp_output']`, on an engine whose sites begin with `model.`."""
    session = engine.session(1, 4, debug=True)
    session.prefill(torch.tensor([[5, 6, 7]]))
    debug_buffer = session.debug_buffers
    for layer in range(2):
        assert debug_buffer[f"layers.{layer}.mlp"] is debug_buffer[f"model.layers.{layer}.mlp"]
    assert debug_buffer["lm_head/linear.0"] is debug_buffer["head"]


ROWS = [list(range(5, 18)), [20, 21, 22]]


@pytest.fixture(scope="module", params=[pytest.param("gpt2", marks=pytest.mark.slow), "mixtral"])
def all_outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine with every tensor of its program; its products have one axis for batch and tokens."""
    directory = tmp_path_factory.mktemp("all") / "engine"
    return glass.build(models.CAUSAL_LMS[request.param](), directory, backend="eager", add_output=["*"])


def test_every_site_reads_as_in_one_piece(all_outputs: Engine) -> None:
    ids, mask = pad_left(ROWS, 0)
    names = all_outputs.debug_names
    whole, pieces = all_outputs.session(2, 16), all_outputs.session(2, 16)
    whole.prefill(ids, mask)
    pieces.prefill(ids, mask, chunk=4)
    compared = refused = 0
    for name in names:
        if name.startswith("past_"):
            continue
        expected = whole.read([name])[name]
        try:
            actual = pieces.read([name])[name]
        except UsageError:
            refused += 1
            continue
        assert actual.shape == expected.shape, name
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
        compared += 1
    # What cannot be said of a whole prefill (experts' rows sorted by expert) is refused, never guessed.
    assert compared > 100 and refused < 0.2 * compared


def table(**shapes: tuple[int | str, ...]) -> SiteTable:
    return SiteTable(
        Site(
            name=f"m/{node}.0", kind="op", node=node, shape=shape, op="x", dtype="float32", source=None, fingerprint="",
            axes={size: i for i, size in enumerate(shape) if size in ("batch", "sequence", "cache")},
        )
        for node, shape in shapes.items()
    )  # fmt: skip


def joined(sites: SiteTable, node: str, *values: torch.Tensor) -> torch.Tensor:
    return PieceOutputs([{PREFIX + node: value} for value in values], 2, sites, {})[PREFIX + node]


def test_axes() -> None:
    whole = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    a, b = whole[:, :3], whole[:, 3:]
    sites = table(plain=("batch", "sequence", 3), flat=("batch*sequence", 3), cached=("batch", "cache"), const=(3,))
    assert torch.equal(joined(sites, "plain", a, b), whole)
    assert torch.equal(joined(sites, "flat", a.flatten(0, 1), b.flatten(0, 1)), whole.flatten(0, 1))
    assert torch.equal(joined(sites, "cached", torch.zeros(2, 8), torch.ones(2, 8)), torch.ones(2, 8))
    assert torch.equal(joined(sites, "const", torch.ones(3), torch.ones(3)), torch.ones(3))
    # rows of a model that puts tokens first come in another order
    first = table(flat=("batch*sequence", 3), first=("sequence", "batch", 3))
    with pytest.raises(UsageError, match="cannot be put together"):
        joined(first, "flat", a.flatten(0, 1), b.flatten(0, 1))


@pytest.mark.parametrize("shape", [(3,), ("2*batch*sequence",), ("batch", "sequence//2")])
def test_what_has_no_value_for_the_whole(shape: Any) -> None:
    with pytest.raises(UsageError, match=r"'m/x\.0' cannot be put together") as caught:
        joined(table(x=shape), "x", torch.zeros(3), torch.ones(3))
    assert "--prefill-chunk" in str(caught.value.hint)


def test_pieces_that_were_not_kept(engine: Engine) -> None:
    session = engine.session(2, 16)
    ids, mask = pad_left(ROWS, 0)
    last = session.prefill(ids, mask, chunk=4, keep=False)
    assert last.shape == (2, 1, 259)
    with pytest.raises(UsageError, match=r"ran in pieces[\s\S]*keep=True"):
        session.read(["logits"])
    assert session.read(["input_ids", "present_key_0"])["input_ids"].shape == (2, 13)


@pytest.mark.parametrize("chunk", [0, -2])
def test_size_of_a_piece(engine: Engine, chunk: int) -> None:
    with pytest.raises(UsageError, match="at least 1 token"):
        engine.generate(input_ids=ROWS, max_new_tokens=2, prefill_chunk=chunk)


def test_automatic_size() -> None:
    assert automatic_chunk(1, 32000, 4) * 32000 * 4 <= MAX_LOGITS_BYTES < (automatic_chunk(1, 32000, 4) + 1) * 128000
    assert automatic_chunk(8, 128256, 4) == automatic_chunk(1, 128256, 4) // 8
    assert automatic_chunk(4096, 1 << 20, 4) == MIN_TOKENS


def test_long_prompts_run_in_pieces_by_themselves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(input_ids=ROWS, max_new_tokens=4).token_ids
    sizes: list[int] = []
    run = engine.executable.function
    monkeypatch.setattr(
        engine.executable, "function", lambda inputs: sizes.append(inputs["input_ids"].shape[1]) or run(inputs)
    )
    monkeypatch.setattr(generate_module, "automatic_chunk", lambda *_: 6)
    made = engine.generate(input_ids=ROWS, max_new_tokens=4)
    assert made.token_ids == expected and sizes == [6, 6, 1, 1, 1, 1] and made.num_steps == 4


def test_recording_of_a_prefill_in_pieces(engine: Engine, tmp_path: Path) -> None:
    for name, chunk in (("whole", None), ("pieces", 4)):
        engine.generate(input_ids=ROWS, max_new_tokens=3, prefill_chunk=chunk, record=tmp_path / name)
    whole, pieces = (glass.Recording.open(tmp_path / name) for name in ("whole", "pieces"))
    assert whole.steps == pieces.steps == [0, 1, 2] and whole.sites() == pieces.sites()
    for site in whole.sites():
        for step in whole.steps:
            torch.testing.assert_close(pieces.tensor(site, step), whole.tensor(site, step), rtol=1e-4, atol=1e-4)
