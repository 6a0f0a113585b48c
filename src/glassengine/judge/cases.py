"""Cases: what a check runs (a batch of prompts, or the steps of a plain module), the same for every implementation.

A causal LM gets each prompt alone (batch 1) and one left-padded batch of two; a prefill and `steps` decode steps,
teacher forced with the tokens that the unchanged baseline picks. A recurrent model gets a prompt token by token, each
a step. A plain module gets its inputs, one step per dict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine.engine.prompts import load_tokenizer
from glassengine.engine.tokenizing import encode, token_rows
from glassengine.errors import UsageError
from glassengine.program import LoadedModel
from glassengine.program.inputs.user_inputs import are_in_order, load_inputs, steps_of
from glassengine.program.kinds.causal_lm import accepted
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.kinds.image_text import first_constants, following_constants
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs
from glassengine.reading.files import read_text
from glassengine.results.answer import InputUsed, Origin, input_used

PROMPTS = (
    "The value of an expression is computed when it is first needed, and",
    "If no exception is raised,",
)

SHORT = (8, 5)
"""Tokens of the built-in prompts for a recurrent model: each is a step."""

_MAX_PROMPTS_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """One batch that every implementation runs.

    Attributes:
        name: Shown on screen.
        steps: For a plain module, the keyword arguments of each step; empty for a causal LM.
        input_ids: [B, S] int64, left-padded; None for a plain module.
        attention_mask: [B, S] int64.
        num_steps: Prefill plus decode steps.
        tokens: [B, num_steps - 1] int64, what is decoded; None for what the unchanged baseline picks.
        one_token: Whether a step has one token, also those of the prompt.
        constants: Inputs of the program that are the same in every step, by name; with images also where their
            features go, see `program.kinds.image_text`.
        source: What the encoder of an encoder-decoder made `constants` from, as keyword arguments of the model.
        origin: Where the inputs come from.
        recipes: How generated inputs were made, by name.
    """

    name: str
    num_steps: int
    steps: tuple[Mapping[str, Any], ...] = ()
    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    one_token: bool = False
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = "given"
    recipes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> tuple[InputUsed, ...]:
        """What is run, input by input: names, dtypes, sizes, ranges, and whether they were made up."""
        steps = list(self.steps)
        if not steps:
            named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
            given = {name: tensor for name, tensor in named.items() if tensor is not None}
            steps = [given | dict(self.source or {})]
        found = []
        for number, step in enumerate(steps):
            plain = {name: value for name, value in step.items() if isinstance(value, (bool, int, float, str))}
            for name, value in (named_inputs(step) | plain).items():
                recipe = self.recipes.get(name, "")
                found.append(input_used(name, value, step=number, origin=self.origin, recipe=recipe))
        return tuple(found)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return 1 if self.input_ids is None else int(self.input_ids.shape[0])

    @property
    def cache_length(self) -> int:
        """Cache slots: tokens of the prompt and of all decode steps; export assumes at least 2."""
        assert self.input_ids is not None
        return max(2, self.num_steps if self.one_token else int(self.input_ids.shape[1]) + self.num_steps - 1)


@dataclass
class StepInputs:
    """Inputs of one step of a causal LM for the static-cache program, built up step by step.

    B batch, S new tokens, T cache length. `attention_mask` is [B, T]; `token_mask` [B, S] marks real (not padding)
    tokens of this step; `to_come` are the tokens of the steps after it, where the case prescribes them, `mask_to_come`
    says which of these are padding, for as many as it has, and `constants` are what the program makes of the case's.
    `known_masks` are those that `valid_mask` has worked out.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    cache_position: torch.Tensor
    token_mask: torch.Tensor
    to_come: torch.Tensor | None = None
    mask_to_come: torch.Tensor | None = None
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    known_masks: dict[Any, torch.Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def first(cls, case: Case) -> StepInputs:
        """Return the prefill inputs of `case`, with room in the cache for its decode steps."""
        assert case.input_ids is not None and case.attention_mask is not None
        batch, size = case.input_ids.shape
        new = 1 if case.one_token else size
        mask = torch.zeros((batch, case.cache_length), dtype=torch.int64)
        mask[:, :new] = case.attention_mask[:, :new]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :new]
        given = (case.input_ids[:, new:], case.tokens)
        to_come = [tokens for tokens in given if tokens is not None and tokens.shape[1]]
        return cls(
            case.input_ids[:, :new],
            mask,
            positions,
            torch.arange(new),
            mask[:, :new].bool(),
            torch.cat(to_come, dim=1) if to_come else None,
            case.attention_mask[:, new:],
            first_constants(case.constants),
        )

    def following(self, tokens: torch.Tensor) -> StepInputs:
        """Return the inputs of the next decode step for `tokens` [B], or for those that the case prescribes."""
        to_come, mask_to_come = self.to_come, self.mask_to_come
        real = torch.ones_like(tokens[:, None])
        if to_come is not None and to_come.shape[1]:
            tokens, to_come = to_come[:, 0], to_come[:, 1:]
        if mask_to_come is not None and mask_to_come.shape[1]:
            real, mask_to_come = mask_to_come[:, :1], mask_to_come[:, 1:]
        slot = int(self.cache_position[-1]) + 1
        mask = self.attention_mask.clone()
        mask[:, slot] = real[:, 0]
        positions = (mask.sum(-1, keepdim=True) - 1).clamp(min=0)
        slots = torch.tensor([slot])
        constants = following_constants(self.constants, len(tokens))
        return StepInputs(tokens[:, None], mask, positions, slots, real.bool(), to_come, mask_to_come, constants)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the program's inputs by name, caches excluded."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "cache_position": self.cache_position,
            **self.constants,
        }


def taken_by(module: nn.Module, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a step for `module`: one that knows no cache is not told to use none."""
    return {name: value for name, value in step.items() if name != "use_cache" or accepted(module, {name: value})}


def tokens_in_one_forward(model: LoadedModel, port: nn.Module, inputs: Inputs) -> Sequence[Mapping[str, Any]]:
    """Return steps for a causal LM and a port of it that is a plain module: the prompts, and nothing that follows.

    Args:
        model: The causal LM; its tokenizer encodes text.
        port: Takes tokens, and perhaps a mask.
        inputs: As for `causal_cases`.

    Raises:
        UsageError: As for `causal_cases`.
    """
    known = accepted(port, dict.fromkeys(OF_TOKENS))
    if inputs is not None and not isinstance(inputs, str):
        return [{"use_cache": False, **_all_real(step, known), **step} for step in inputs]
    cases = causal_cases(model, inputs, 0)
    steps = MadeUp(recipes=cases[0].recipes, origin=cases[0].origin)
    for case in cases:
        assert case.input_ids is not None and case.attention_mask is not None
        steps.append({"input_ids": case.input_ids, "attention_mask": case.attention_mask, "use_cache": False})
    return steps


def _all_real(step: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the attention mask that a port may insist on, and that a step leaves to be made up: no padding."""
    ids = step.get("input_ids")
    return {"attention_mask": torch.ones_like(ids)} if "attention_mask" in known and ids is not None else {}


def causal_cases(model: LoadedModel, inputs: Inputs, steps: int) -> list[Case]:
    """Return the cases of a causal LM.

    Args:
        model: Baseline; its tokenizer encodes text.
        inputs: None for two built-in prompts; a text file with one prompt per line; or dicts of `input_ids` [B, S] and
            optionally `attention_mask`.
        steps: Number of decode steps after the prefill.

    Raises:
        UsageError: No prompts, ids outside the vocabulary, or text for a model without a tokenizer.
    """
    vocabulary = model.metadata.get("vocab_size", 1 << 62)
    if inputs is not None and not isinstance(inputs, str):
        cases = []
        for index, step in enumerate(inputs):
            if "input_ids" not in step:
                raise UsageError(
                    "the inputs have no input_ids", got=", ".join(step), expected="input_ids [batch, tokens]"
                )
            ids = torch.as_tensor(step["input_ids"]).long()
            ids = ids[None] if ids.dim() == 1 else ids
            mask = torch.as_tensor(step.get("attention_mask", torch.ones_like(ids))).long()
            cases.append(Case(f"inputs {index}", steps + 1, input_ids=ids, attention_mask=mask))
        _check_ids([case.input_ids for case in cases], vocabulary)
        return _by_token(model, cases)
    rows, who = _prompt_ids(model, inputs, vocabulary)
    recipes = {"input_ids": who}
    if inputs is None:
        # Generated inputs must not be longer than a small model can take.
        most = max(1, model.metadata.get("max_position_embeddings", 1 << 62) - steps)
        sizes = SHORT if model.generation.one_token else (most, most)
        rows = [row[: min(size, most)] for row, size in zip(rows, sizes, strict=True)]
    _check_ids(rows, vocabulary)
    cases = [padded_case(f"prompt {index}", [row], steps) for index, row in enumerate(rows)]
    if len(rows) > 1:
        cases.append(padded_case("prompts 0 and 1, left-padded", rows[:2], steps))
    origin: Origin = "built-in prompts" if inputs is None else "given"
    return _by_token(model, [replace(case, origin=origin, recipes=recipes) for case in cases])


def _by_token(model: LoadedModel, cases: Sequence[Case]) -> list[Case]:
    """Let the prompts of a recurrent model run a token a step."""
    if not model.generation.one_token:
        return list(cases)
    sizes = [0 if case.input_ids is None else case.input_ids.shape[1] for case in cases]
    return [
        replace(case, one_token=True, num_steps=case.num_steps + size - 1)
        for case, size in zip(cases, sizes, strict=True)
    ]


def module_cases(inputs: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of a plain module: the inputs of its file, where it is one that has such, and all others."""
    if not isinstance(inputs, MadeUp):
        return [Case("inputs", len(inputs), steps=tuple(inputs))]
    parts: list[tuple[str, Origin, Sequence[Mapping[str, Any]]]] = [
        ("inputs in the file", "in the file", inputs[: inputs.num_in_file]),
        ("inputs", inputs.origin, inputs[inputs.num_in_file :]),
    ]
    return [
        Case(name, len(steps), steps=tuple(steps), origin=origin, recipes={} if number == 0 else inputs.recipes)
        for number, (name, origin, steps) in enumerate(parts)
        if steps
    ]


def prompt_texts(inputs: str | None) -> list[str]:
    """Return the texts of a file with one prompt per line, or the built-in ones.

    Raises:
        UsageError: The file has none.
    """
    if inputs is None:
        return list(PROMPTS)
    texts = [line for line in read_text(inputs, most=_MAX_PROMPTS_BYTES).splitlines() if line.strip()]
    if not texts:
        raise UsageError(f"{inputs} has no prompts", expected="one prompt per line")
    return texts


def _prompt_ids(model: LoadedModel, inputs: str | None, vocabulary: int) -> tuple[list[torch.Tensor], str]:
    """Return the token ids of the prompts, and who made them."""
    tokenizer, texts = tokenizer_of(model.directory), prompt_texts(inputs)
    if inputs is not None and tokenizer is None:
        raise UsageError(
            f"{model.spec} has no tokenizer for the prompts of {inputs}", hint="--inputs ids.json with input_ids"
        )
    if tokenizer is not None:
        return [torch.tensor(row) for row in encode(tokenizer, texts)], "tokenized by the baseline"
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, min(vocabulary, 1 << 31), (size,), generator=generator) for size in (12, 7)]
    return rows, "random token ids: the baseline has no tokenizer"


def tokenizer_of(directory: str | None) -> Any:
    """Return the usable tokenizer of a directory; one without tokenizer files still yields an empty one."""
    if directory is None:
        return None
    try:
        tokenizer = load_tokenizer(directory)
    except UsageError:
        return None
    return tokenizer if token_rows(tokenizer, ["a"])[0] else None


def _check_ids(rows: Sequence[torch.Tensor | None], vocabulary: int) -> None:
    for row in rows:
        if row is not None and row.numel() and int(row.max()) >= vocabulary:
            raise UsageError(
                "a token id is outside the model's vocabulary",
                got=str(int(row.max())),
                expected=f"below {vocabulary}",
                hint="the tokenizer or the ids belong to another model",
            )
        if row is not None and not row.numel():
            raise UsageError("a prompt has no tokens")


def padded_case(name: str, rows: Sequence[torch.Tensor], steps: int) -> Case:
    """Return the case of some prompts, padded on the left to the longest."""
    size = max(len(row) for row in rows)
    ids = torch.zeros((len(rows), size), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, size - len(row) :] = row
        mask[index, size - len(row) :] = 1
    return Case(name, steps + 1, input_ids=ids, attention_mask=mask)


Inputs = str | Sequence[Mapping[str, Any]] | None
"""What `--inputs` names: a text file of prompts, keyword arguments of each step, or nothing."""

OF_TOKENS = ("input_ids", "attention_mask")


def as_inputs(inputs: str | Path | Mapping[str, Any] | Sequence[Any] | torch.Tensor | None) -> Any:
    """Return what a caller gave as `--inputs` names it, one dict a step, or tensors in order as they are.

    Raises:
        UsageError: It is something else.
    """
    if inputs is None or isinstance(inputs, str | Path):
        return None if inputs is None else str(inputs)
    return inputs if are_in_order(inputs) else steps_of(inputs, "inputs")


def read_inputs(inputs: Inputs, names: Sequence[str] = ()) -> Inputs:
    """Return the tensors that `inputs` names, or itself where it is a text file, None or tensors already.

    Args:
        inputs: As `as_inputs` returns them.
        names: Parameters of the forward, for tensors in order.
    """
    if isinstance(inputs, str) and Path(inputs).suffix != ".txt":
        return load_inputs(inputs, names)
    return steps_of(inputs, "inputs", names) if are_in_order(inputs) else inputs


def beside_tokens(inputs: Inputs) -> list[str]:
    """Return the keyword arguments that a decode loop does not use: images, embeddings, explicit positions."""
    if inputs is None or isinstance(inputs, str):
        return []
    return list(dict.fromkeys(key for step in inputs for key in step if key not in OF_TOKENS))


def in_one_forward(inputs: Inputs) -> Inputs:
    """Return the inputs of a causal LM for forwards that nothing follows: no cache comes out of them."""
    return inputs if inputs is None or isinstance(inputs, str) else [{"use_cache": False, **step} for step in inputs]


Given = StepInputs | Mapping[str, Any]
"""Inputs of a step: of a program that generates, or keyword arguments of a plain module."""


def by_name(given: Given) -> dict[str, torch.Tensor]:
    """Return the inputs of a step by the names of the program's ports, caches left out."""
    return given.named() if isinstance(given, StepInputs) else named_inputs(given)


def empty_caches(program: Program, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return zeroed caches for the batch and cache length of `named`; none where the program has no caches."""
    if program.layout is None:
        return {}
    read = (getattr(torch, port.dtype) for port in program.inputs if port.name in program.caches)
    dtype = next(read, torch.float32)  # a program that reads none of its caches has no such port
    batch, length = named["attention_mask"].shape
    return program.layout.allocate(batch, length, dtype)


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
    texts = {}
    for case in cases:
        if case.input_ids is None:
            continue
        mask = case.attention_mask
        prompt = case.input_ids[0] if mask is None else case.input_ids[0][mask[0].bool()]
        first = [[token] for token in prompt.tolist()] if case.one_token else [prompt.tolist()]
        rest = [[token] for token in chosen.get(case.name, ())[len(first) - 1 :]]
        steps = [*first, *rest][: case.num_steps]
        texts[case.name] = tuple(
            " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids) for ids in steps
        )
    return texts
