"""`glass show ... --export`: a recording, or a dump, in a format that others read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from glassengine.cli.main import main
from glassengine.recording.write.writer import RecordingWriter


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with RecordingWriter(tmp_path / "r", metadata={"class": "Net"}) as writer:
        for step in range(2):
            writer.write("a", step, torch.full((2,), float(step)))
            if step == 0:
                writer.write("layers.0", step, torch.ones(3))
            writer.commit(step)
    return tmp_path / "r"


def test_files_and_directories(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["show", str(recording), "--export", str(out / "x.npz"), "--step", "1"]) == 0
    assert np.load(out / "x.npz")["a"].tolist() == [1, 1]
    assert capsys.readouterr().out.split() == ["wrote", str(out / "x.npz")]
    assert main(["show", str(recording), "--export", str(out / "tree")]) == 0
    assert (out / "tree" / "Net_debug_tree_step1_SUMMARY.json").is_file()
    assert main(["show", str(recording), "--export", str(out / "steps"), "--export-format", "pt"]) == 0
    assert sorted(path.name for path in (out / "steps").iterdir()) == ["step0.pt", "step1.pt"]
    # A dump is a source as well.
    assert main(["show", str(out / "tree"), "--export", str(out / "again"), "--export-format", "npz"]) == 0
    assert np.load(out / "again" / "step1.npz")["a"].tolist() == [1, 1]


def test_refusals(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", str(recording), "--export", str(tmp_path / "x.pt")]
    assert main(arguments) == 2
    assert "one step of one rank" in capsys.readouterr().err
    assert main([*arguments, "layers.*"]) == 0
    assert set(torch.load(tmp_path / "x.pt", weights_only=True)) == {"layers.0"}
    assert main([*arguments, "--step", "1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--step", "1", "--overwrite"]) == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True)["a"].tolist() == [1, 1]
    assert main([*arguments, "--step", "0", "--step", "1"]) == 2
    assert main([*arguments, "b"]) == 2
    assert "unknown site 'b'" in capsys.readouterr().err
    assert main([*arguments, "--export-format", "xlsx"]) == 2
    assert main(["show", str(recording), "--overwrite"]) == 2
