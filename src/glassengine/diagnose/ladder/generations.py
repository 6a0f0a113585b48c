"""How each kind of generation is judged: its climbs, and which of the given inputs decoding has a use for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.encoder_decoder import beside_source, start_both
from glassengine.diagnose.ladder.image_text import start_with_images
from glassengine.diagnose.ladder.rungs import start
from glassengine.judge.cases import Case, Inputs, beside_tokens
from glassengine.program import LoadedModel
from glassengine.program.generation.generation import CAUSAL, PLAIN, RECURRENT, Generation
from glassengine.program.generation.kinds import ENCODER_DECODER, IMAGE_TEXT
from glassengine.program.kinds.image_text import IMAGE_TOKEN, PIXELS, without_derived
from glassengine.progress import Progress

Start = Callable[[LoadedModel, Inputs, int, ExitStack, Progress, Case | None], Sequence[Climb]]


@dataclass(frozen=True)
class Judged:
    """What a check asks of a kind of generation.

    Attributes:
        start: Returns the climb of each program, in the order in which they run, with its first side.
        beside: Returns the names of given inputs that its steps cannot take: with them one forward is judged.
        given: Returns the inputs without what it makes itself.
    """

    start: Start
    beside: Callable[[LoadedModel, Inputs], list[str]]
    given: Callable[[LoadedModel, Inputs], Inputs] = lambda model, inputs: inputs


def _start_one(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, case: Case | None
) -> Sequence[Climb]:
    return (start(model, inputs, steps, stack, progress, case),)


def _start_both(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, case: Case | None
) -> Sequence[Climb]:
    return start_both(model, inputs, steps, stack, progress)


def _start_with_images(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, case: Case | None
) -> Sequence[Climb]:
    return start_with_images(model, inputs, steps, stack, progress)


def _beside_images(model: LoadedModel, inputs: Inputs) -> list[str]:
    return [name for name in beside_tokens(inputs) if name != PIXELS]


def _without_derived(model: LoadedModel, inputs: Inputs) -> Inputs:
    if inputs is None or isinstance(inputs, str):
        return inputs
    return [without_derived(step, model.metadata[IMAGE_TOKEN]) for step in inputs]


def _beside_prompts(model: LoadedModel, inputs: Inputs) -> list[str]:
    return beside_tokens(inputs)


JUDGED: Mapping[Generation, Judged] = {
    PLAIN: Judged(_start_one, lambda model, inputs: []),
    CAUSAL: Judged(_start_one, _beside_prompts),
    RECURRENT: Judged(_start_one, _beside_prompts),
    ENCODER_DECODER: Judged(_start_both, beside_source),
    IMAGE_TEXT: Judged(_start_with_images, _beside_images, _without_derived),
}
