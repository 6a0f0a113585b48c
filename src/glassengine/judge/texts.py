"""What a language model reads in each step of a check, as text for those who read the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glassengine.judge.cases import Case, tokenizer_of
from glassengine.program import LoadedModel


def texts_of(
    model: LoadedModel, cases: Sequence[Case], chosen: Mapping[str, Sequence[int]]
) -> dict[str, tuple[str, ...]]:
    """Return what the first row of each case reads in each step: text, or token ids where there is no tokenizer.

    Args:
        model: Its tokenizer writes the text.
        cases: Those with token ids have texts.
        chosen: Of a case, by name, the token that each step is followed by.
    """
    tokenizer = tokenizer_of(model)
    found = {}
    for case in cases:
        if case.input_ids is None:
            continue
        mask = case.attention_mask
        prompt = case.input_ids[0] if mask is None else case.input_ids[0][mask[0].bool()]
        first = [[token] for token in prompt.tolist()] if case.one_token else [prompt.tolist()]
        rest = [[token] for token in chosen.get(case.name, ())[len(first) - 1 :]]
        steps = [*first, *rest][: case.num_steps]
        found[case.name] = tuple(
            " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids) for ids in steps
        )
    return found
