"""Reads rollouts of verl, TRL, OpenRLHF, NeMo-RL, slime, miles, vLLM, SGLang and llama.cpp, and plain arrays.

All become one form: token ids, reported log-probabilities, masks, routes. What a file is follows from its keys. Lists
may be ragged, or padded arrays with masks. No reader runs code of a file.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_bytes, shown
from glassengine.reading.tensors import read_header, read_npz, read_safetensors, read_torch

_MOST_BYTES = 1 << 31
_MOST_ITEMS = 1 << 26
_TORCH = (".pt", ".pth", ".pkl", ".bin")
_ID = "token_id:"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One prompt with one response.

    Attributes:
        prompt: Token ids.
        response: Token ids: generated ones, and those of tools between them.
        logprobs: What the engine reported for each token of the response, in float64; NaN where it reported nothing.
        routes: Experts of each token but the last one: [tokens - 1, layers, k], or flat; None where unknown.
        kept: The tokens that sampling kept, for each token of the response; None where unknown.
        turn: Version of the weights, as the file words it.
    """

    prompt: list[int]
    response: list[int]
    logprobs: Tensor
    routes: Tensor | None = None
    kept: list[list[int]] | None = None
    turn: str | None = None


@dataclass(frozen=True)
class Rollout:
    """What a file holds.

    Attributes:
        format: Its name: "verl", "TRL", ...
        samples: In the order of the file.
        temperature: That the file states; None where it states none.
        notes: What was left out, and why.
    """

    format: str
    samples: list[Sample]
    temperature: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens with a log-probability."""
        return sum(int(one.logprobs.isfinite().sum()) for one in self.samples)

    @property
    def versions(self) -> list[str]:
        """All versions of the weights, in order."""
        return sorted({one.turn for one in self.samples if one.turn is not None})


@dataclass(frozen=True)
class RolloutFormat:
    """A way to write rollouts.

    Attributes:
        name: Of the framework.
        keys: All of them are in each record.
        read: Yields the samples of a record.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Record], Iterator[Sample]]


def read_rollout(path: str | Path, *, pad: int = 0) -> Rollout:
    """Read a file.

    Args:
        path: The file.
        pad: Token that prompts are padded with in front, where the file has no mask of them.

    Raises:
        UsageError: There is no such file, or its keys are of no known format.
        CorruptError: It is damaged, would run code, or has other numbers of tokens and log-probabilities.
    """
    records = [{"pad_token_id": pad, **_plain(one)} for one in _records(Path(path))]
    found = next((one for one in FORMATS if records and all(key in records[0] for key in one.keys)), None)
    if found is None:
        raise _unknown(path, records)
    samples: list[Sample] = []
    notes: list[str] = []
    for number_of, record in enumerate(records, 1):
        missing = [key for key in found.keys if key not in record]
        if missing:
            raise CorruptError("a record lacks a key", got=f"{shown(path)}: record {number_of}", expected=missing)
        if _has_gaps(record):
            notes.append(f"record {number_of} is left out: it has fewer log-probabilities than tokens were generated")
            continue
        samples += [one for one in found.read(record) if one.response]
    if not any(bool(one.logprobs.isfinite().any()) for one in samples):
        raise UsageError("the file has no log-probability of a generated token", got=f"{shown(path)} ({found.name})")
    stated = {one for record in records for one in (_temperature(record),) if one is not None}
    return Rollout(found.name, samples, stated.pop() if len(stated) == 1 else None, notes)


def _records(path: Path) -> list[Any]:
    suffix = path.suffix.lower()
    if suffix in _TORCH:
        value = read_torch(path, old=True)
    elif suffix == ".npz":
        value = read_npz(path)
    elif suffix == ".safetensors":
        value = read_safetensors(path)
    else:
        data = read_bytes(path, most=_MOST_BYTES)
        if suffix == ".jsonl" or b"}\n{" in data[:_MOST_ITEMS]:
            lines = [line for line in data.splitlines() if line.strip()]
            return [parsed(line, dict[str, Any], path, nonfinite=True, items=_MOST_ITEMS) for line in lines]
        value = parsed(data, Any, path, nonfinite=True, items=_MOST_ITEMS)
    if isinstance(value, Mapping) and isinstance(value.get("samples"), list):
        return list(value["samples"])
    if isinstance(value, Mapping) and isinstance(value.get("batch"), Mapping):
        return [{**value["batch"], "meta_info": value.get("meta_info", {})}]
    return list(value) if isinstance(value, list) else [value]


def _plain(record: Any) -> Record:
    """Return a record with lists in place of arrays; routes, which are large, stay arrays."""
    if not isinstance(record, Mapping):
        raise CorruptError("a rollout is an object, or a list of them", got=type(record).__name__)
    return {
        str(key): value.tolist() if isinstance(value, (Tensor, np.ndarray)) and "routed" not in str(key) else value
        for key, value in record.items()
    }


def _unknown(path: str | Path, records: Sequence[Record]) -> UsageError:
    keys = sorted(records[0].keys() - {"pad_token_id"}) if records else []
    if {"input", "output"} <= set(keys):
        return UsageError(
            "the file has no token ids",
            got=f"{shown(path)}: texts alone, as rollout_data_dir of verl writes them",
            expected="token ids and log-probabilities",
            hint="save prompts, responses, rollout_log_probs and response_mask of the batch: torch.save({...}, FILE)",
        )
    is_text = any("text" in key or key in ("prompt", "completion") for key in keys)
    return UsageError(
        "the file has no token ids" if is_text else "the keys of the file are of no known format",
        got=f"{shown(path)}: {', '.join(map(shown, keys[:8])) or 'nothing'}",
        expected="keys of " + ", ".join(dict.fromkeys(one.name for one in FORMATS)),
        hint='the plain form is {"prompt_ids": [[...]], "response_ids": [[...]], "logprobs": [[...]]}',
    )


def _temperature(record: Record) -> float | None:
    for place in (record, record.get("meta_info"), record.get("sampling_params")):
        value = place.get("temperature") if isinstance(place, Mapping) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def _has_gaps(record: Record) -> bool:
    """Whether a server left tokens out, as llama.cpp does where a character is not complete."""
    usage = record.get("usage")
    told = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    choices = record.get("choices") or ()
    content = [(one.get("logprobs") or {}).get("content") for one in choices if isinstance(one, Mapping)]
    return told is not None and len(content) == 1 and content[0] is not None and len(content[0]) < told


def _each(record: Record, *keys: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of several keys together; None for a key that is not there; a flat list is one row."""
    values = [record.get(key) for key in keys]
    lists = [value for value in values if value is not None]
    if lists and all(not value or not isinstance(value[0], (list, tuple)) for value in lists):
        values, lists = [None if v is None else [v] for v in values], [[v] for v in lists]
    if len({len(value) for value in lists}) > 1:
        raise CorruptError("keys have other numbers of samples", got=", ".join(keys))
    for row in range(len(lists[0]) if lists else 0):
        yield tuple(None if value is None else value[row] for value in values)


def _routes(value: Any, row: int | None = None, first: int = 0, last: int | None = None) -> Tensor | None:
    """Return routes as a tensor: of an array, of lists, or of base 64."""
    if value is None:
        return None
    if isinstance(value, str):
        return torch.from_numpy(_decoded(value))
    found = torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
    found = found if row is None else found[row]
    return found[first:last].long()


def _decoded(text: str) -> np.ndarray[Any, Any]:
    try:
        data = base64.b64decode(text, validate=True)
        if not data.startswith(b"\x93NUMPY"):
            return np.frombuffer(data, np.int32).astype(np.int64)
        file = io.BytesIO(data)
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return np.frombuffer(data[file.tell() :], dtype).reshape(shape, order="F" if fortran else "C").astype(np.int64)
    except (ValueError, binascii.Error) as error:
        raise CorruptError("routed_experts cannot be read", got=shown(str(error))) from error


_MOST_ID = 1 << 31


def sample(
    prompt: Iterable[Any],
    response: Iterable[Any],
    logprobs: Iterable[Any],
    mask: Sequence[Any] | None = None,
    **more: Any,
) -> Sample:
    """Return a sample of plain numbers.

    Args:
        prompt: Token ids.
        response: Token ids.
        logprobs: One a token of the response; None where there is none.
        mask: Zero for tokens that the engine did not generate.
        more: Other attributes.

    Raises:
        CorruptError: These are no token ids, or the numbers of values differ.
    """
    ours, theirs = ids(prompt), ids(response)
    values = [math.nan if value is None else number(value) for value in logprobs]
    if len(values) != len(theirs) or (mask is not None and len(mask) != len(theirs)):
        got = f"{len(theirs)} tokens, {len(values)} log-probabilities"
        raise CorruptError(
            "a sample has another number of log-probabilities than tokens",
            got=got if mask is None else f"{got}, a mask of {len(mask)}",
            hint="a server that joins tokens to characters leaves some out: ask it for token ids",
        )
    if mask is not None:
        values = [value if keep else math.nan for value, keep in zip(values, mask, strict=True)]
    found = torch.tensor(values, dtype=torch.float64)
    return Sample(ours, theirs, torch.where(found.isfinite(), found, math.nan), **more)


def ids(values: Iterable[Any]) -> list[int]:
    """Return token ids.

    Raises:
        CorruptError: Something else is there.
    """
    found = [int(value) if isinstance(value, (int, float)) and value == int(value) else -1 for value in values]
    if any(not 0 <= value < _MOST_ID for value in found):
        raise CorruptError("token ids are whole numbers from 0", got="another value")
    return found


def number(value: Any) -> float:
    """Return a number.

    Raises:
        CorruptError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CorruptError("a log-probability is a number", got=type(value).__name__)
    return float(value)


def _verl(record: Record) -> Iterator[Sample]:
    keys = ("prompts", "responses", "rollout_log_probs", "response_mask", "attention_mask", "input_ids")
    for row, (prompt, response, logprobs, mask, attended, whole) in enumerate(_each(record, *keys)):
        size = len(response)
        prompt = whole[:-size] if prompt is None else prompt
        if attended is not None:
            padding = len(prompt) - sum(map(bool, attended[: len(prompt)]))
            end = sum(map(bool, attended[len(prompt) :]))
        else:
            padding = next((at for at, one in enumerate(prompt) if one != record["pad_token_id"]), 0)
            end = max((at + 1 for at, keep in enumerate(mask or [1] * size) if keep), default=0)
        routes = _routes(record.get("routed_experts"), row, padding, len(prompt) + end - 1)
        kept = None if mask is None else mask[:end]
        yield sample(prompt[padding:], response[:end], logprobs[:end], kept, routes=routes)


def _agent_loop(record: Record) -> Iterator[Sample]:
    extra = record.get("extra_fields") or {}
    version = extra.get("param_version_end") if isinstance(extra, Mapping) else None
    routes = _routes(record.get("routed_experts"))
    keys = ("prompt_ids", "response_ids", "response_logprobs", "response_mask")
    for prompt, response, logprobs, mask in _each(record, *keys):
        routes = routes if routes is None else routes[: len(prompt) + len(response) - 1]
        yield sample(prompt, response, logprobs, mask, routes=routes, turn=None if version is None else str(version))


def _trl(record: Record) -> Iterator[Sample]:
    keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "logprob_token_ids")
    for prompt, response, logprobs, mask, names in _each(record, *keys):
        if logprobs and isinstance(logprobs[0], (list, tuple)):  # the likeliest tokens of each place
            names = names or [[token] for token in response]
            logprobs = [
                dict(zip(named, values, strict=False)).get(token)
                for token, named, values in zip(response, names, logprobs, strict=True)
            ]
        yield sample(prompt, response, logprobs, mask)


def _openrlhf(record: Record) -> Iterator[Sample]:
    for tokens, logprobs, mask in _each(record, "sequences", "rollout_log_probs", "action_mask"):
        # Both are shifted: the first value is of the second token.
        generated = [at for at, keep in enumerate(mask) if keep]
        if generated:
            first, end = generated[0], generated[-1] + 1
            yield sample(tokens[: first + 1], tokens[first + 1 : end + 1], logprobs[first:end], mask[first:end])


def _nemo(record: Record) -> Iterator[Sample]:
    keys = ("token_ids", "generation_logprobs", "token_loss_mask", "input_lengths", "sample_loss_mask")
    lengths = record["input_lengths"]
    several = isinstance(lengths, list)
    rows: Iterator[Any] = _each(record, *keys) if several else iter([tuple(record.get(key) for key in keys)])
    for tokens, logprobs, mask, length, counts in rows:
        generated = [at for at, keep in enumerate((mask or [])[: int(length)]) if keep]
        if generated and counts != 0 and tokens is not None and logprobs is not None and mask is not None:
            first, end = generated[0], generated[-1] + 1
            yield sample(tokens[:first], tokens[first:end], logprobs[first:end], mask[first:end])


def _slime(record: Record) -> Iterator[Sample]:
    size, tokens = int(record["response_length"]), record["tokens"]
    logprobs, mask = (record.get(key) for key in ("rollout_log_probs", "loss_mask"))
    versions = record.get("weight_versions") or [None]
    kept, offsets = (record.get(key) for key in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"))
    sets = None
    if kept and offsets and len(offsets) == size + 1:
        sets = [list(kept[a:b]) for a, b in pairwise(offsets)]
    if logprobs is not None and size:
        routes = _routes(record.get("rollout_routed_experts"))
        turn = None if versions[-1] is None else str(versions[-1])
        prompt = tokens[: len(tokens) - size]
        yield sample(prompt, tokens[len(prompt) :], logprobs, mask, routes=routes, kept=sets, turn=turn)


def _vllm(record: Record) -> Iterator[Sample]:
    prompt = record["prompt_token_ids"]
    outputs = [one for one in record.get("outputs") or () if one.get("logprobs")]
    for one in outputs:
        tokens = one["token_ids"]
        logprobs = [_chosen(found, token) for token, found in zip(tokens, one["logprobs"], strict=True)]
        yield sample(prompt, tokens, logprobs, routes=_routes(one.get("routed_experts")))
    if not outputs and record.get("prompt_logprobs"):
        yield from _of_prompt(prompt, record["prompt_logprobs"])


def _of_prompt(prompt: Sequence[int], found: Sequence[Any]) -> Iterator[Sample]:
    """Yield a prompt as the response to its first token."""
    logprobs = [_chosen(one, token) for token, one in zip(prompt, found, strict=True)]
    yield sample(prompt[:1], prompt[1:], logprobs[1:])


def _chosen(found: Any, token: int) -> Any:
    """Return the value of a token among those of its place: numbers, or objects with one."""
    if not isinstance(found, Mapping):
        return found
    value = next((found[key] for key in (token, str(token), f"{_ID}{token}") if key in found), None)
    return value.get("logprob") if isinstance(value, Mapping) else value


def _openai(record: Record) -> Iterator[Sample]:
    for choice in record["choices"]:
        prompt = choice.get("prompt_token_ids") or record.get("prompt_token_ids")
        logprobs = choice.get("logprobs") or {}
        content = logprobs.get("content")
        tokens = choice.get("token_ids")
        if content is not None:
            values = [one.get("logprob") for one in content]
            tokens = tokens or [one.get("id", _id_of(one.get("token"))) for one in content]
        else:
            values = logprobs.get("token_logprobs") or []
            tokens = tokens or [_id_of(one) for one in logprobs.get("tokens") or ()]
        found = choice.get("prompt_logprobs") or record.get("prompt_logprobs")
        if prompt and not values and found:
            yield from _of_prompt(prompt, found)
            continue
        if not prompt or any(token is None for token in tokens):
            raise UsageError(
                "the file has no token ids",
                got=f"an answer of a server without {'those of the response' if prompt else 'prompt_token_ids'}",
                hint='ask vLLM with "return_token_ids": true; of other servers add "prompt_token_ids" to the choice',
            )
        yield sample(prompt, tokens, values, routes=_routes(choice.get("routed_experts")))


def _id_of(text: Any) -> int | None:
    number_of = text.removeprefix(_ID) if isinstance(text, str) and text.startswith(_ID) else ""
    return int(number_of) if number_of.isdecimal() else None


def _sglang(record: Record) -> Iterator[Sample]:
    facts = record["meta_info"]
    found = facts.get("output_token_logprobs") or []
    given = facts.get("input_token_logprobs") or []
    prompt = record.get("prompt_token_ids") or record.get("input_ids") or [one[1] for one in given]
    if not prompt:
        raise UsageError(
            "the file has no token ids of the prompt",
            got="an answer of SGLang without input_token_logprobs",
            hint='ask with "logprob_start_len": 0, or add "prompt_token_ids" beside "meta_info"',
        )
    version = facts.get("weight_version")
    turn = None if version is None else str(version)
    routes = _routes(facts.get("routed_experts"))
    yield sample(prompt, [one[1] for one in found], [one[0] for one in found], routes=routes, turn=turn)


def _lists(record: Record) -> Iterator[Sample]:
    for row, (prompt, response, logprobs, mask) in enumerate(
        _each(record, "prompt_ids", "response_ids", "logprobs", "mask")
    ):
        routes = record.get("routes")
        yield sample(prompt, response, logprobs, mask, routes=_routes(None if routes is None else routes[row]))


def _arrays(record: Record) -> Iterator[Sample]:
    for tokens, logprobs, mask in _each(record, "token_ids", "logprobs", "mask"):
        generated = [at for at, keep in enumerate(mask) if keep]
        if generated:
            first, end = generated[0], generated[-1] + 1
            yield sample(tokens[:first], tokens[first:end], [number(x) for x in logprobs[first:end]], mask[first:end])


FORMATS = (
    RolloutFormat("slime or miles", ("tokens", "response_length", "rollout_log_probs"), _slime),
    RolloutFormat("NeMo-RL", ("token_ids", "input_lengths", "generation_logprobs"), _nemo),
    RolloutFormat("OpenRLHF", ("sequences", "action_mask", "rollout_log_probs"), _openrlhf),
    RolloutFormat("verl", ("prompts", "responses", "rollout_log_probs"), _verl),
    RolloutFormat("verl", ("input_ids", "responses", "rollout_log_probs"), _verl),
    RolloutFormat("verl's agent loop", ("prompt_ids", "response_ids", "response_logprobs"), _agent_loop),
    RolloutFormat("TRL", ("prompt_ids", "completion_ids", "logprobs"), _trl),
    RolloutFormat("SGLang", ("meta_info", "text"), _sglang),
    RolloutFormat("SGLang", ("meta_info", "output_ids"), _sglang),
    RolloutFormat("SGLang", ("meta_info", "prompt_token_ids"), _sglang),
    RolloutFormat("OpenAI's protocol", ("choices",), _openai),
    RolloutFormat("vLLM", ("prompt_token_ids", "outputs"), _vllm),
    RolloutFormat("vLLM", ("prompt_token_ids", "prompt_logprobs"), _vllm),
    RolloutFormat("plain lists", ("prompt_ids", "response_ids", "logprobs"), _lists),
    RolloutFormat("plain arrays", ("token_ids", "logprobs", "mask"), _arrays),
)
"""In the order in which they are tried."""
