"""Engines side by side: what is shown of each, clean pairs that only round differently, planted faults, refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import glassengine as glass
from glassengine import commands
from glassengine.diagnose import side_by_side as module
from glassengine.diagnose.side_by_side import judge_logits, token_differences
from glassengine.engine import Engine, build_program
from glassengine.errors import IncomparableError, UsageError
from glassengine.program import LoadedModel, Program, export_program, load_model
from glassengine.program.kinds.causal_lm import USER_MODULE
from glassengine.report import terminal_without_tensors
from glassengine.results.engines import SideBySide
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint

LOADED: dict[Path, Engine] = {}
PROMPTS = ["Hey, are you conscious?", "ab"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_checkpoint(models.llama(vocab_size=VOCAB_SIZE), tmp_path_factory.mktemp("side") / "tiny"))


@pytest.fixture(scope="module")
def program(loaded: LoadedModel) -> Program:
    return export_program(loaded)


@pytest.fixture(scope="module")
def release(program: Program, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "release"
    return build_program(program, directory, backend="eager", model=loaded).directory


@pytest.fixture(scope="module")
def debug(program: Program, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "debug"
    options: Any = {"outputs": ["layers.*.mlp"], "max_seq_len": 64}
    return build_program(program, directory, backend="eager", model=loaded, **options).directory


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a stored program is what takes time here."""

    def load(directory: Path, **_: bool) -> Engine:
        if directory not in LOADED:
            LOADED[directory] = glass.load(directory)
        return LOADED[directory]

    monkeypatch.setattr(module, "load", load)


def run(*engines: Path, **options: Any) -> SideBySide:
    return commands.side_by_side(engines, **{"max_new_tokens": 6, "rounds": 1, "prompts": PROMPTS, **options})


def draw(result: SideBySide) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(terminal_without_tensors.side_by_side(result))
    return capture.get()


def test_a_debug_build_and_a_release_build(release: Path, debug: Path, program: Program, tmp_path: Path) -> None:
    build_program(program, tmp_path / "runtime", backend="onnxruntime")
    result = run(release, debug, tmp_path / "runtime")
    first, second, third = result.columns
    assert (first.agreement, second.agreement, third.agreement) == (None, "bitwise", "within rounding")
    assert result.ok and result.agreement == "within rounding"
    assert second.added_outputs == ("model.layers.0.mlp", "model.layers.1.mlp") and first.added_outputs == ()
    assert (first.backend, third.backend) == ("eager", "onnxruntime") and third.dtype == "float32"
    # What differs is shown for all, what does not for none.
    assert [column.options["max_seq_len"] for column in result.columns] == ["128", "64", "128"]
    assert [column.options["weights"].split()[0] for column in result.columns] == ["beside", "beside", "within"]
    assert "passes" not in first.options and "max_batch_size" not in first.options
    for column in result.columns:
        files = [path for path in Path(column.engine).rglob("*") if path.is_file()]
        assert column.total_bytes == sum(path.stat().st_size for path in files)
        main = sum(path.stat().st_size for path in files if Path(column.engine) / "main" in path.parents)
        assert column.executable_bytes == main > 0
        assert column.weights_bytes == (Path(column.engine) / "weights.safetensors").stat().st_size
        assert column.prefill_ms > 0 and column.decode_ms is not None and column.decode_ms > 0
    assert result.num_threads == torch.get_num_threads() and result.rounds == 1
    assert [len(column.steps) for column in result.columns] == [0, 6, 6]
    assert {step.judged_by for step in third.steps} == {"noise floor"}
    assert all(step.noise_ratio is not None and 0 < step.noise_ratio < 2 for step in third.steps)
    assert all(step.rounding_units > 0 and step.figures.max_abs_diff > 0 for step in third.steps)
    # Only positions that hold a token count: 23 + 2 in the prefill, then 2.
    assert [step.figures.num_elements for step in third.steps] == [25 * VOCAB_SIZE, *[2 * VOCAB_SIZE] * 5]
    shown = draw(result)
    for part in ("added outputs", "2: model.layers.0.mlp", "bitwise equal", "within rounding", "KiB", "decode step"):
        assert part in shown
    assert "1 threads" in shown and "prompts of 23, 2 tokens" in shown and "noise ratio" in shown
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_tokens_are_those_of_the_first_engine(release: Path, few_floors: None) -> None:
    engine = glass.load(release)
    result = run(release, release)
    for row, prompt in zip(result.token_ids, result.prompt_token_ids, strict=True):
        session = engine.session(1, 40)
        expected = [int(session.prefill(torch.tensor([prompt]))[0, -1].argmax())]
        while len(expected) < 6:
            expected.append(int(session.decode(torch.tensor([expected[-1]]))[0, -1].argmax()))
        assert list(row) == expected


@pytest.fixture
def few_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLOOR_STEPS", 1)


@pytest.mark.slow
def test_half_precision_is_within_rounding(
    release: Path, loaded: LoadedModel, tmp_path: Path, few_floors: None
) -> None:
    half = export_program(load_model(loaded.spec, dtype="bfloat16"))
    build_program(half, tmp_path / "half", backend="eager", model=loaded)
    result = run(release, tmp_path / "half", release, max_new_tokens=3)
    column = result.columns[1]
    assert column.agreement == "within rounding" and column.dtype == "bfloat16"
    assert [note for note in result.notes if "not verified" in note and str(tmp_path / "half") in note]
    # Noise is that of the two engines compared, not of the coarsest of all.
    assert result.columns[2].agreement == "bitwise"
    # The same the other way round.
    assert run(tmp_path / "half", release, max_new_tokens=2).columns[1].agreement == "within rounding"


def test_a_planted_fault_is_beyond(release: Path, program: Program, tmp_path: Path, few_floors: None) -> None:
    head = program.exported.state_dict[USER_MODULE + ".lm_head.weight"]
    with torch.no_grad():
        try:
            head.mul_(1.001)
            build_program(program, tmp_path / "louder", backend="eager")
        finally:
            head.div_(1.001)
    result = run(release, tmp_path / "louder")
    column = result.columns[1]
    assert column.agreement == "beyond" and not result.ok
    assert all(step.agreement == "beyond" for step in column.steps)
    # All logits are a thousandth too large: every token stays what it was.
    assert column.num_different_tokens == 0 and column.first_different_token is None
    assert draw(result).startswith("NOT OK: Logits of louder are beyond rounding, first in step 0.")


def test_judging_one_step() -> None:
    generator = torch.Generator().manual_seed(0)
    baseline = torch.randn((3, 1000), generator=generator)
    noise = torch.randn((3, 1000), generator=generator) * 1e-5
    clean = judge_logits(0, baseline, baseline + noise, 1e-5)
    assert clean.agreement == "within rounding" and clean.noise_ratio is not None and 0.5 < clean.noise_ratio < 1.5
    assert judge_logits(0, baseline, baseline.clone(), 1e-5).agreement == "bitwise"
    # All elements a little off, one element far off, one not finite.
    assert judge_logits(0, baseline, baseline + 30 * noise, 1e-5).agreement == "beyond"
    one = (baseline + noise).clone()
    one[1, 7] += 1e-3
    assert judge_logits(0, baseline, one, 1e-5).agreement == "beyond"
    one[1, 7] = float("nan")
    found = judge_logits(0, baseline, one, 1e-5)
    assert found.agreement == "beyond" and found.noise_ratio == math.inf and found.rounding_units == math.inf
    assert judge_logits(0, one, one.clone(), 1e-5).agreement == "bitwise"
    # A zero of the other sign is not the same bits, and no difference either.
    zeros = torch.zeros((1, 4))
    assert judge_logits(0, zeros, -zeros, 1e-5).agreement == "within rounding"
    assert judge_logits(0, zeros, zeros + 1e-6, 1e-5).agreement == "beyond"


def test_units_of_rounding() -> None:
    baseline = torch.tensor([[1.0, -8.0], [0.5, 0.25]], dtype=torch.bfloat16)
    candidate = baseline.clone()
    candidate[0, 0] += 2.0**-7
    candidate[1, 1] += 2.0**-8
    found = judge_logits(0, baseline, candidate, None)
    # Of the position's largest logit: 2^-7 / (2^-7 * 8) and 2^-8 / (2^-7 * 0.5).
    assert found.rounding_units == 1.0 and found.judged_by == "tolerance (uncalibrated)" and found.noise_ratio is None
    assert found.agreement == "within rounding" and found.figures.num_different == 2
    candidate[1, 1] = 0.5
    assert judge_logits(0, baseline, candidate, None).agreement == "beyond"


def test_margins_of_a_changed_token() -> None:
    ours = torch.tensor([[1.0, 3.0, 2.5], [0.0, 1.0, 2.0]])
    theirs = torch.tensor([[1.0, 2.0, 2.75], [0.0, 1.0, 2.0]])
    (found,) = token_differences(4, ours, theirs)
    assert (found.step, found.row, found.baseline, found.candidate) == (4, 0, 1, 2)
    assert (found.baseline_margin, found.candidate_margin) == (0.5, 0.75)


def test_without_weights_the_tolerance_stands_in(release: Path, debug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> float:
        raise UsageError("the checkpoint is not where it was")

    monkeypatch.setattr(module, "measure_floors", gone)
    result = run(release, debug, max_new_tokens=2)
    assert {step.judged_by for step in result.columns[1].steps} == {"tolerance (uncalibrated)"}
    assert any("the checkpoint is not where it was" in note for note in result.notes)
    assert "judged   by tolerance (uncalibrated)" in draw(result)


@pytest.mark.slow
def test_prompts_of_every_kind(release: Path, tmp_path: Path, few_floors: None) -> None:
    made_up = run(release, release, prompts=None, max_new_tokens=1)
    assert [len(row) for row in made_up.prompt_token_ids] == [16] and made_up.columns[0].decode_ms is None
    assert made_up.prompt_token_ids == run(release, release, prompts=[], max_new_tokens=1).prompt_token_ids
    assert len(run(release, release, prompts=None, max_new_tokens=125).prompt_token_ids[0]) == 3  # of 128 slots
    (tmp_path / "ids.json").write_text("[[5, 6, 7], [8]]")
    for ids in (tmp_path / "ids.json", [[5, 6, 7], [8]]):
        result = run(release, release, prompts=None, input_ids=ids, max_new_tokens=2)
        assert result.prompt_token_ids == ((5, 6, 7), (8,)) and result.agreement == "bitwise"


def test_a_long_run_shows_the_worst_step(release: Path, few_floors: None) -> None:
    result = run(release, release, max_new_tokens=12)
    figures = dataclasses.replace(result.columns[1].steps[10].figures, num_different=3, max_abs_diff=0.5)
    worst = dataclasses.replace(
        result.columns[1].steps[10], agreement="within rounding", rounding_units=2.0, noise_ratio=7.0, figures=figures
    )
    steps = (*result.columns[1].steps[:10], worst, result.columns[1].steps[11])
    column = dataclasses.replace(result.columns[1], steps=steps, agreement="within rounding")
    shown = draw(dataclasses.replace(result, columns=(result.columns[0], column)))
    assert "max abs 0.5, 2 roundings, noise ratio 7 (step 10)" in shown
    # Engines are called by the ends of their directories that tell them apart, and have these in a row of their own.
    assert f"Against those of {release.name}" in shown and f"{release}" in shown
    first = dataclasses.replace(result.columns[0], engine="elsewhere/first")
    shown = draw(dataclasses.replace(result, columns=(first, column)))
    assert "Against those of first" in shown and "directory" in shown and "elsewhere/first" in shown


def test_refusals(release: Path, tmp_path: Path) -> None:
    for engines, options, message in (
        ([release], {}, "too few engines"),
        ([release, release], {"input_ids": [[1]]}, "both given"),
        ([release, release], {"max_new_tokens": 0}, "nothing would be run"),
        ([release, release], {"max_new_tokens": 500}, "--max-seq-len"),
        ([release, tmp_path / "none"], {}, "unknown engine directory"),
    ):
        with pytest.raises(UsageError, match=message):
            run(*engines, **options)


def test_engines_of_different_models_are_incomparable(release: Path, program: Program, tmp_path: Path) -> None:
    def build(name: str, **metadata: Any) -> Path:
        changed = dataclasses.replace(program, metadata={**program.metadata, **metadata})
        return build_program(changed, tmp_path / name, backend="eager").directory

    other = build("other", fingerprint="of other weights")
    with pytest.raises(IncomparableError, match=r"not of one model\n.*weights of other weights") as error:
        run(release, other)
    assert "glass check BASELINE --candidate" in str(error.value)
    with pytest.raises(IncomparableError, match=r"not of one model\n.*some\.Other of"):
        run(release, build("class", **{"class": "some.Other"}))
    plain = glass.build(torch.nn.Linear(2, 2), tmp_path / "plain", backend="eager", inputs={"input": torch.ones(1, 2)})
    with pytest.raises(IncomparableError, match="does not generate"):
        run(release, plain.directory)
