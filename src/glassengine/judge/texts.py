"""What a language model reads in each step of a check, as text for those who read the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glassengine.engine.prompts.tokenizing import token_rows
from glassengine.judge.cases import Case, prompt_texts, tokenizer_of
from glassengine.judge.given import Inputs
from glassengine.program import LoadedModel


def other_tokens(model: LoadedModel, directory: str | None, inputs: Inputs) -> list[str]:
    """Return in words that the tokenizer of a candidate makes other tokens of the given texts; empty where it does not.

    Args:
        model: The baseline, whose tokens both sides get.
        directory: Of the candidate.
        inputs: Of the check; token ids are not tokenized by anybody.
    """
    if not model.generation.takes_tokens or directory is None or not (inputs is None or isinstance(inputs, str)):
        return []
    ours, theirs = tokenizer_of(model.directory), tokenizer_of(directory)
    if ours is None or theirs is None:
        return []
    texts = prompt_texts(inputs)
    for text, own, other in zip(texts, token_rows(ours, texts), token_rows(theirs, texts), strict=True):
        if own != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other))
            )
            shown = f"{other[at : at + 4]} at token {at}, baseline {own[at : at + 4]}"
            return [f"the candidate's tokenizer gives other tokens for {text[:40]!r}: {shown}"]
    return []


def texts_of(
    model: LoadedModel, cases: Sequence[Case], chosen: Mapping[str, Sequence[int]]
) -> dict[str, tuple[str, ...]]:
    """Return what the first row of each case reads in each step: text, or token ids where there is no tokenizer.

    Args:
        model: Its tokenizer writes the text.
        cases: Those with token ids have texts.
        chosen: Of a case, by name, the token that each step is followed by.
    """
    tokenizer = tokenizer_of(model.directory)
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
