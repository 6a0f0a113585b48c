"""`glass replay`: what it prints and how it ends, without the code that made the snapshot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glassengine.cli.main import main
from glassengine.executable.snapshot.layout import sealed
from tests import children

TRAINING = """
import sys
import torch
from torch import nn
import glassengine as glass
import glassengine.frontends.torch_compile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x, shift):
        return self.down(torch.log(self.drop(self.up(x)).relu() + shift))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = torch.compile(model, backend="glass", options={"backend": sys.argv[2]})
with glass.snapshots.take(sys.argv[1], on="nonfinite"):
    for step in range(10):
        shift = torch.tensor(-1e9 if step == 7 else 1.0)  # the mistake: the logarithm of a negative number
        loss = compiled(torch.randn(4, 8), shift).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def glass(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command elsewhere, with a cleared path and without the variables of this process."""
    kept = ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHINDUCTOR_CACHE_DIR")
    return children.run(
        [sys.executable, "-m", "glassengine.cli", *arguments],
        imports=children.COMPILING,
        cwd=cwd,
        env={name: os.environ[name] for name in kept if name in os.environ},
        timeout=300,
    )


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 7 of a training run, in which a NaN was made; the code of the run is gone."""
    folder: Path = tmp_path_factory.mktemp("training")
    script = folder / "train.py"
    script.write_text(TRAINING)
    done = children.run(
        [sys.executable, str(script), str(folder / "snapshots"), "eager"],
        imports=children.COMPILING,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 1 and "NonFiniteError" in done.stderr, done.stderr
    script.unlink()
    (found,) = (folder / "snapshots").iterdir()
    return found


def test_a_nan_in_step_7_of_a_training_run_is_replayed_bit_by_bit(snapshot: Path, tmp_path: Path) -> None:
    assert snapshot.name.endswith("execution000007")
    done = glass("replay", str(snapshot), "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["recorded_backend"] == told["backend"] == "eager" and told["reason"] == "nonfinite"
    assert all(output["same_bits"] for output in told["outputs"])
    assert [output["nonfinite"] for output in told["outputs"] if output["name"] == "output[0]"] == ["NaN"]


@pytest.mark.slow
def test_so_is_one_on_inductor(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "snapshots"), "inductor"]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 1
    (tmp_path / "train.py").unlink()
    (found,) = (tmp_path / "snapshots").iterdir()
    done = glass("replay", str(found), "--json", "-", cwd=Path("/"))
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["backend"] == "inductor"
    assert len(told["outputs"]) > 3 and all(output["same_bits"] for output in told["outputs"])


def test_the_first_nan_is_named(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(snapshot), "--first-nonfinite"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("NOT OK: Replay: aten.log.default made the first NaN")
    assert "train.py:14: return self.down(torch.log(" in text


def test_a_changed_graph_has_other_bits(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: the recorded outputs are those of another execution."""
    changed = tmp_path / snapshot.name
    shutil.copytree(snapshot, changed)
    meta = json.loads((changed / "meta.json").read_text())
    alike = [e for e in meta["outputs"] if e["dtype"] == "float32" and e.get("shape") == [4, 16]]
    one, other = alike[0], next(e for e in alike if e["crc32"] != alike[0]["crc32"])
    one |= {key: other[key] for key in ("file", "key", "crc32")}
    (changed / "meta.json").write_text(sealed(meta))
    status = main(["replay", str(changed)])
    shown = capsys.readouterr()
    assert status == 1, shown.err
    assert "NOT OK" in shown.out and "differ" in shown.out


def test_every_op_is_judged(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # NaN is NaN on both sides: what a back-end makes of the same inputs is right.
    assert main(["replay", str(snapshot), "--compare"]) == 0
    text = capsys.readouterr().out
    assert "in float64 (baseline) with eager (candidate)" in text and "op by op" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "--bisect"], "a replay does one thing at a time"),
        (["--reproduction", "somewhere"], "only a bisection has something to reproduce"),
        (["--backend", "indctor"], "unknown back-end 'indctor'"),
    ],
)
def test_flags_that_mean_nothing(
    snapshot: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(snapshot), *flags]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_replay(tmp_path: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["replay", str(snapshot.parent)]) == main(["replay", str(snapshot)])  # the only one there
    for name in ("one", "two"):
        shutil.copytree(snapshot, tmp_path / "several" / name)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "several")]) == 2
    assert "one of its 2 snapshots" in capsys.readouterr().err


def truncated(directory: Path) -> None:
    path = directory / "graph.pt2"
    path.write_bytes(path.read_bytes()[:500])


def other_bytes(directory: Path) -> None:
    path = directory / "inputs.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def elsewhere(directory: Path) -> None:
    path = directory / "meta.json"
    path.write_text(sealed(json.loads(path.read_text().replace('"inputs.safetensors"', '"../inputs.safetensors"'))))


def random_state(directory: Path) -> None:
    path = directory / "meta.json"
    meta = json.loads(path.read_text())
    meta["rng"]["cpu"] = next(e for e in meta["inputs"] if e["kind"] == "input")
    path.write_text(sealed(meta))


def no_object(directory: Path) -> None:
    (directory / "meta.json").write_text("[]")


def odd_settings(directory: Path) -> None:
    path = directory / "meta.json"
    meta = json.loads(path.read_text())
    meta["settings"] = {"num_threads": -5, "float32_matmul_precision": "x", "deterministic_algorithms": [1]}
    meta["environment"] = [{"versions": 1}]
    path.write_text(sealed(meta))


@pytest.mark.parametrize("damage", [truncated, other_bytes, elsewhere, random_state, no_object])
def test_a_damaged_snapshot_is_refused(
    snapshot: Path, tmp_path: Path, damage: object, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / snapshot.name
    shutil.copytree(snapshot, copy)
    assert callable(damage)
    damage(copy)
    assert main(["replay", str(copy)]) == 4
    assert capsys.readouterr().err.count("error:") == 1


def test_settings_that_are_none_are_passed_over(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / snapshot.name
    shutil.copytree(snapshot, copy)
    odd_settings(copy)
    assert main(["replay", str(copy)]) == 0
    assert "ok" in capsys.readouterr().out
