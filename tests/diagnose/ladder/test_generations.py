"""Models of images and text are judged on the two programs that their engines generate with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.diagnose import check
from glassengine.errors import IncomparableError, UsageError
from glassengine.results import Comparison
from glassengine.testing import models

TOKEN, NUM_FEATURES = 3, 4
TOWER = "model.vision_tower.encoder.layers.0.mlp.fc1"
PROJECTOR = "model.multi_modal_projector.linear_2"
MERGE = "model/masked_scatter.0"


def llava() -> Any:
    return models.llava(num_layers=1, image_size=8)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an engine whose tower and projector have a changed weight, and whose features go one token late."""
    model = llava()
    for path in (TOWER, PROJECTOR):
        model.get_submodule(path).get_parameter("weight").data[3] *= 1.5
    places = model.model.get_placeholder_mask
    model.model.get_placeholder_mask = lambda ids, **rest: places(ids, **rest).roll(1, dims=1)
    directory = tmp_path_factory.mktemp("engines") / "wrong"
    glass.build(model, directory, backend="eager", max_batch_size=2, max_seq_len=40)
    return directory


@pytest.fixture(scope="module")
def judged(wrong: Path) -> Comparison:
    return check(llava(), candidate=wrong, steps=1)


@pytest.mark.slow
def test_mistakes_in_tower_projector_and_merge_are_named(judged: Comparison) -> None:
    assert not judged.ok and judged.first_divergence is not None
    assert judged.first_divergence.site == f"{TOWER}/linear.0"
    sites = [origin.site for origin in judged.origins if origin.level == "engine"]
    assert sites == [f"{TOWER}/linear.0", f"{PROJECTOR}/linear.0", MERGE]


@pytest.mark.slow
def test_the_untouched_model_is_its_programs(judged: Comparison) -> None:
    levels = {level.name: level for level in judged.levels}
    assert levels["program"].verdict in ("identical", "rounding") and levels["program"].coverage == 1.0
    assert levels["engine"].coverage == 1.0
    of_model = {pair.site for pair in judged.pairs if pair.level == "program"}
    assert {"model.multi_modal_projector.linear_2", "lm_head"} <= of_model


@pytest.mark.slow
def test_prompts_with_and_without_images_are_judged(judged: Comparison) -> None:
    cases = {pair.case for pair in judged.pairs if pair.site == MERGE}
    batch = "prompt 0 with an image and prompt 1, left-padded"
    assert cases == {"prompt 0 with an image", "prompt 1", batch}
    assert {pair.step for pair in judged.pairs if pair.site == MERGE} == {0, 1}


@pytest.mark.slow
def test_given_images_are_judged_in_a_decode_loop(wrong: Path, tmp_path: Path) -> None:
    """Two images in one prompt, which are two steps of the vision program."""
    ids = torch.full((1, 12), 7)
    ids[0, 1:5] = ids[0, 6:10] = TOKEN
    pixels = torch.randn((2, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    torch.save({"input_ids": ids, "pixel_values": pixels}, tmp_path / "inputs.pt")
    result = check(llava(), candidate=wrong, steps=1, inputs=str(tmp_path / "inputs.pt"))
    steps = {site: {p.step for p in result.pairs if p.site == site} for site in (f"{TOWER}/linear.0", MERGE)}
    assert steps == {f"{TOWER}/linear.0": {0, 1}, MERGE: {0, 1}}
    assert {origin.site for origin in result.origins} >= {f"{TOWER}/linear.0", MERGE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": torch.zeros(1, 3, 8, 9)}, r"another size[\s\S]*\[images, 3, 8, 8\]"),
        ({"input_ids": torch.full((1, 5), 7)}, r": 0 image tokens\n.*4, 4 for each of 1"),
    ],
)
def test_images_that_do_not_fit_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    ids = torch.tensor([[7, *[TOKEN] * NUM_FEATURES, 9]])
    torch.save({"input_ids": ids, "pixel_values": torch.zeros(1, 3, 8, 8), **change}, tmp_path / "inputs.pt")
    with pytest.raises(UsageError, match=message):
        check(llava(), inputs=str(tmp_path / "inputs.pt"), backend="eager")


def test_checks_of_text_alone_say_so() -> None:
    result = check(llava(), candidate=llava(), steps=0)
    assert result.ok
    (skipped,) = [item for item in result.skipped if item.site == "images"]
    assert skipped.reason == "judged from text alone: with images a port is judged in one forward, of --inputs"


@pytest.mark.slow
def test_an_engine_with_images_is_refused_for_a_model_without(wrong: Path) -> None:
    with pytest.raises(IncomparableError, match=r"encoder and decoder[\s\S]*one program"):
        check(models.llama(), candidate=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "inductor"])
def test_engines_of_every_back_end_agree(backend: str) -> None:
    result = check(llava(), backend=backend, steps=1)
    assert result.ok and result.coverage == 1.0 and result.counts["wrong"] == 0
    assert [level.name for level in result.levels if level.name != "op-by-op"] == ["program", "engine", "release"]
