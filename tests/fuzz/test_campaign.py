"""A campaign: inputs by number, counted by the code that they were tried on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import children

sys.path.insert(0, str(Path(__file__).parent))

import campaign
import kinds


def test_inputs_follow_from_seed_kind_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "make_shared", lambda folder: None)
    bench = campaign.Bench(tmp_path / "bench", ["map_names", "aliases"], ready=False, start=children.Popen)
    exits = []
    for keep in (tmp_path / "one", tmp_path / "two", tmp_path / "one"):
        tried = campaign.Campaign(bench, 7, keep)
        for name in bench.kinds:
            tried.one_batch(name, 12)
        assert not tried.findings
        exits.append({name: dict(row["exits"]) for name, row in tried.state.now.items()})
    bench.close()
    assert exits[0] == exits[1]
    assert all(sum(row.values()) == 12 and len(row) > 1 for row in exits[0].values())
    # The third one went on where the first one ended.
    assert all(sum(row.values()) == 24 for row in exits[2].values())
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    assert state["next"] == {"map_names": 24, "aliases": 24} and state["seed"] == 7
    assert "all, on this code              48" in campaign.State(tmp_path / "one" / "state.json", 7).table()
