"""The noise floor of a recording: legal runs are within it, mistakes are beyond, and nothing pretends to know it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import glassengine as glass
from glassengine import commands
from glassengine.cli.main import main
from glassengine.diagnose.noise_floor import RoundedOtherwise
from glassengine.errors import CorruptError, GlassError
from glassengine.recording.layout.noise_floor import FILE, read_noise_floor
from glassengine.testing import models

IDS = torch.tensor([[0, 0, 17, 200, 9, 33], [5, 91, 14, 3, 77, 120]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def recorded(model: nn.Module, path: Path, *, floor: bool = False) -> Path:
    commands.record_target(model, path, inputs=INPUTS, then=commands.measure_noise_floor if floor else None)
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.dtype]:
    dtype: torch.dtype = getattr(torch, request.param)
    path = tmp_path_factory.mktemp("floor") / "baseline"
    return recorded(models.llama().to(dtype), path, floor=True), dtype


def in_halves(model: nn.Module) -> None:
    """Sum every matrix product in two parts."""

    def split(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        half = layer.in_features // 2
        return lambda x: x[..., :half] @ layer.weight[:, :half].T + x[..., half:] @ layer.weight[:, half:].T

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = split(module)


@pytest.mark.parametrize("variant", ["written out", "eager attention", "in halves"])
def test_another_implementation_is_within_the_floor(
    baseline: tuple[Path, torch.dtype], tmp_path: Path, variant: str
) -> None:
    path, dtype = baseline
    model = models.llama().to(dtype)
    if variant == "eager attention":
        model.set_attn_implementation("eager")
    if variant == "in halves":
        in_halves(model)
    with sdpa_kernel(SDPBackend.MATH) if variant == "written out" else contextlib.nullcontext():
        recorded(model, tmp_path / "candidate")
    result = glass.compare(path, tmp_path / "candidate")
    assert (result.ok, result.verdict, result.calibration) == (True, "rounding", f"calibrated by the floor of {path}")
    # It measured something: tensors differ, some by no less than a tenth of the floor.
    assert 0.1 < max(pair.noise_ratio for pair in result.pairs if pair.noise_ratio is not None) < 2
    # Planted beside it: what the same numbers look like to someone who knows no floor.
    (tmp_path / "bare").mkdir()
    for file in path.iterdir():
        if file.name != FILE:
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    blind = glass.compare(tmp_path / "bare", tmp_path / "candidate")
    assert blind.calibration == "uncalibrated"
    if dtype is torch.bfloat16:
        assert not blind.ok


def test_a_mistake_is_beyond_the_floor_where_it_is_made(baseline: tuple[Path, torch.dtype], tmp_path: Path) -> None:
    path, dtype = baseline
    model = models.llama().to(dtype)
    model.model.layers[1].mlp.up_proj.weight.data[5] *= 2
    recorded(model, tmp_path / "candidate")
    result = glass.compare(path, tmp_path / "candidate")
    assert result.first_divergence is not None
    assert result.first_divergence.site == "model.layers.1.mlp.up_proj"
    assert (result.ok, result.verdict) == (False, "wrong")
    assert {pair.judged_by for pair in result.pairs if pair.verdict == "wrong"} == {"noise floor"}


def test_the_floor_of_generated_steps_follows_the_recorded_tokens(tmp_path: Path) -> None:
    options = {"inputs": INPUTS, "max_new_tokens": 4}
    commands.record_target(models.llama(), tmp_path / "a", then=commands.measure_noise_floor, **options)  # type: ignore[arg-type]
    model = models.llama()
    in_halves(model)
    commands.record_target(model, tmp_path / "b", **options)  # type: ignore[arg-type]
    result = glass.compare(tmp_path / "a", tmp_path / "b")
    assert {pair.step for pair in result.pairs if pair.judged_by == "noise floor"} == {0, 1, 2, 3}
    assert result.ok and max(pair.noise_ratio for pair in result.pairs if pair.noise_ratio is not None) < 2


def test_a_floor_is_not_used_for_a_coarser_candidate(tmp_path: Path) -> None:
    recorded(models.llama(), tmp_path / "a", floor=True)
    recorded(models.llama().bfloat16(), tmp_path / "b")
    result = glass.compare(tmp_path / "a", tmp_path / "b")
    assert result.calibration == "another precision: drift, float32 against bfloat16"
    assert all("floor" not in pair.judged_by for pair in result.pairs)


def test_given_tolerances_replace_the_floor(baseline: tuple[Path, torch.dtype], tmp_path: Path) -> None:
    path, dtype = baseline
    model = models.llama().to(dtype)
    in_halves(model)
    recorded(model, tmp_path / "candidate")
    result = glass.compare(path, tmp_path / "candidate", rtol=0.0, atol=0.0)
    assert (result.ok, result.calibration) == (False, "by the given tolerances")


def test_a_module_that_counts_its_calls_begins_anew(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x) * self.calls

    torch.manual_seed(0)
    model, x = Counting(), torch.randn(3, 4)
    commands.record_target(model, tmp_path / "a", inputs=[{"x": x}, {"x": x}], then=commands.measure_noise_floor)
    model.calls.zero_()
    model.linear.bias.data[1] += 0.01
    commands.record_target(model, tmp_path / "b", inputs=[{"x": x}, {"x": x}])
    result = glass.compare(tmp_path / "a", tmp_path / "b")
    assert result.first_divergence is not None and result.first_divergence.site == "linear"


def test_tensors_that_are_no_plain_ones_have_a_floor_too(tmp_path: Path) -> None:
    """A parameter that a module returns, and what is written under a byte budget, take another way to the writer."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.weight

    torch.manual_seed(0)
    commands.record_target(
        Returning(),
        tmp_path / "a",
        inputs={"x": torch.randn(3, 4)},
        byte_budget=1 << 20,
        then=commands.measure_noise_floor,
    )
    recording, floor = glass.Recording.open(tmp_path / "a"), read_noise_floor(tmp_path / "a")
    assert floor is not None
    measured = {entry.site for entry in recording.entries if floor.of(entry) is not None}
    assert measured == set(recording.sites()) >= {".:out[1]", "linear"}


def test_a_distributed_tensor_has_the_floor_of_its_shard(tmp_path: Path) -> None:
    parallel = pytest.importorskip("torch.distributed.tensor")
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))

        class Spread(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return parallel.DTensor.from_local(super().forward(input), mesh, [parallel.Shard(0)])

        torch.manual_seed(0)
        model, inputs = nn.Sequential(Spread(4, 4)), {"input": torch.randn(3, 4)}
        commands.record_target(model, tmp_path / "a", inputs=inputs, then=commands.measure_noise_floor)
    finally:
        distributed.destroy_process_group()
    recording, floor = glass.Recording.open(tmp_path / "a"), read_noise_floor(tmp_path / "a")
    entry = recording.entry("0", 0)
    assert entry.sharding is not None and floor is not None
    found = floor.of(entry)
    assert found is not None and found.whole > 0


FACTORIES = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh())  # other weights in every call

def inputs():
    return {"input": torch.ones(1, 2)}
"""


def test_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(FACTORIES)
    target = ["record", f"{tmp_path}/net.py:model", "--inputs", f"{tmp_path}/net.py:inputs"]
    for name, flags in (("a", ["--noise-floor"]), ("bare", [])):
        assert main([*target, "-o", str(tmp_path / name), *flags]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith(f"ok (calibrated by the floor of {tmp_path / 'a'})")
    assert main(["compare", str(tmp_path / "bare"), str(tmp_path / "bare")]) == 0
    assert capsys.readouterr().out.startswith("ok (uncalibrated)")
    # Recorded again without it, the directory keeps no floor of other numbers.
    assert main([*target, "-o", str(tmp_path / "a"), "--overwrite"]) == 0
    assert not (tmp_path / "a" / FILE).exists()


@pytest.mark.parametrize("fault", ["cut", "other", "newer"])
def test_a_damaged_floor_is_refused(tmp_path: Path, fault: str) -> None:
    torch.manual_seed(0)
    for name in ("a", "b"):
        model = nn.Sequential(nn.Linear(2, 3) if name == "a" else nn.Linear(2, 5))
        commands.record_target(
            model, tmp_path / name, inputs={"input": torch.ones(1, 2)}, then=commands.measure_noise_floor
        )
    file = tmp_path / "a" / FILE
    data = file.read_bytes()
    if fault == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif fault == "other":
        file.write_bytes((tmp_path / "b" / FILE).read_bytes())
    else:
        file.write_bytes(data.replace(b'"schema_version":"1"', b'"schema_version":"9"'))
    wanted = {"cut": "is damaged", "other": "belongs to another recording", "newer": "a newer version"}[fault]
    with pytest.raises(CorruptError, match=wanted):
        glass.compare(tmp_path / "a", tmp_path / "a")


def test_a_full_disk_leaves_the_recording_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glassengine.recording.layout.noise_floor.save_safetensors", full)
    model, inputs = nn.Sequential(nn.Linear(2, 3)), {"input": torch.ones(1, 2)}
    with pytest.raises(GlassError, match="the recording is complete without it"):
        commands.record_target(model, tmp_path / "a", inputs=inputs, then=commands.measure_noise_floor)
    assert glass.Recording.open(tmp_path / "a").complete
    assert not [path for path in (tmp_path / "a").iterdir() if path.name.endswith(".partial")]
    assert glass.compare(tmp_path / "a", tmp_path / "a").calibration == "uncalibrated"


def test_a_rank_of_several_measures_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    commands.record_target(models.llama(), tmp_path / "a", inputs=INPUTS, then=commands.measure_noise_floor)
    assert read_noise_floor(tmp_path / "a" / "rank1") is not None


def test_parts_of_a_distributed_tensor_are_rounded_otherwise_each() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    parts = [torch.randn(16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    with RoundedOtherwise(0):
        found = TwoTensor(*parts) * 3
    for part, own in zip(parts, (found.a, found.b), strict=True):
        assert not torch.equal(own, part * 3)
        torch.testing.assert_close(own, part * 3)
