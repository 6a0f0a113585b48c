"""Dumps of SGLang beside the checkpoint; its own table has vLLM's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.recording.formats.folders import ServerFolder
from glassengine.testing.checkpoints import save_small
from tests.serving_engines.sglang_dumps import write_dumper, write_passes

RECORDED = Path(__file__).parents[4] / "serving_engines" / "recorded"
FIRST = {
    "llama-healthy": "",
    "llama-exchanged_rows": "model.layers.1.self_attn/",
    "llama-keys_for_values-bfloat16": "model.layers.1.self_attn.k_proj/linear.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_the_dumper_shows_what_the_plug_in_shows(name: str, tmp_path: Path) -> None:
    dump = write_dumper(ServerFolder(RECORDED / name), tmp_path / "dump")
    found = glass.check(save_small("llama", tmp_path / "checkpoint"), candidate=dump, layout="sglang")
    first = found.first_divergence
    assert found.ok == (not FIRST[name]), found.not_ok_because
    if first is None:
        assert found.coverage == 1.0 and not found.origins
    else:
        assert first.site.startswith(FIRST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-healthy", "llama-keys_for_values-bfloat16"])
def test_forwards_without_caches_are_judged_where_attention_ends(name: str, tmp_path: Path) -> None:
    dump = write_passes(ServerFolder(RECORDED / name), tmp_path / "dump")
    found = glass.check(save_small("llama", tmp_path / "checkpoint"), candidate=dump)
    assert found.ok == (not FIRST[name]) and found.coverage > 0.95, found.not_ok_because
    assert found.first_divergence is None or found.first_divergence.site == FIRST[name]


def test_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    dump = write_passes(ServerFolder(RECORDED / "llama-healthy"), tmp_path / "dump")
    with pytest.raises(UsageError, match="layout"):
        glass.check(save_small("llama", tmp_path / "checkpoint"), candidate=dump, layout="sgl")
