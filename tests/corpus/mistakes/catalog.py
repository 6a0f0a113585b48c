"""All kinds of mistake of the corpus."""

from __future__ import annotations

from tests.corpus.edits import Mistake
from tests.corpus.mistakes.attention import ATTENTION_MISTAKES
from tests.corpus.mistakes.layers import LAYER_MISTAKES
from tests.corpus.mistakes.layout import LAYOUT_MISTAKES
from tests.corpus.mistakes.precision_losses import PRECISION_LOSSES
from tests.corpus.mistakes.random_mistakes import RANDOM_MISTAKES
from tests.corpus.mistakes.weights import WEIGHT_MISTAKES

MISTAKES: tuple[Mistake, ...] = (
    *ATTENTION_MISTAKES,
    *LAYER_MISTAKES,
    *LAYOUT_MISTAKES,
    *WEIGHT_MISTAKES,
    *PRECISION_LOSSES,
    *RANDOM_MISTAKES,
)
