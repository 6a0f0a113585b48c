"""All kinds of mistake of the corpus."""

from __future__ import annotations

from glassengine.testing.attention_mistakes import ATTENTION_MISTAKES
from glassengine.testing.edits import Mistake
from glassengine.testing.layer_mistakes import LAYER_MISTAKES
from glassengine.testing.layout_mistakes import LAYOUT_MISTAKES
from glassengine.testing.precision_losses import PRECISION_LOSSES
from glassengine.testing.random_mistakes import RANDOM_MISTAKES
from glassengine.testing.weight_mistakes import WEIGHT_MISTAKES

MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION_MISTAKES,
    *LAYER_MISTAKES,
    *LAYOUT_MISTAKES,
    *WEIGHT_MISTAKES,
    *PRECISION_LOSSES,
    *RANDOM_MISTAKES,
)
