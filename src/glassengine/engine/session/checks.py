"""Inputs checked before they reach compiled code, which would read past the end of a tensor that is too small.

The message of every refusal is a table of all inputs: what was given, what the engine was built for, what is wrong and
what helps. The same table is logged of each step at level DEBUG.

Shape legend: B batch, S new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from glassengine.engine.manifest import Manifest
from glassengine.errors import CorruptError, UsageError
from glassengine.program.representation.signature import named_inputs

_HEADER = ("input", "dtype", "device", "shape", "built for", "problem", "to do")


def require_generating(manifest: Manifest) -> None:
    """Raise unless the engine has a prefill and decode steps.

    Raises:
        UsageError: It is one of a plain module.
    """
    if not manifest.generates:
        raise UsageError(
            f"the engine {manifest.name!r} has no prefill and decode",
            got=f"kind {manifest.kind}",
            hint="call it: engine(**inputs), or engine.forward(TEXT)",
        )


def require_module(manifest: Manifest) -> None:
    """Raise unless the engine runs in one forward.

    Raises:
        UsageError: It generates.
    """
    if manifest.generates:
        raise UsageError(
            f"the engine {manifest.name!r} generates", hint="engine.generate(PROMPT) or engine.session(...)"
        )


def size_rows(manifest: Manifest, batch_size: int, length: int) -> list[InputRow]:
    """Return the rows of the sizes of a session."""
    most, longest = manifest.max_batch_size or 0, manifest.max_seq_len or 0
    batch = ("", "")
    if batch_size < 1:
        batch = ("no sequences", "give at least one prompt")
    elif batch_size > most:
        batch = (f"{batch_size} sequences, at most {most}", f"build with --max-batch-size {batch_size}")
    total = ("", "")
    if length > longest:
        total = (
            f"prompt and new tokens are {length} tokens, at most {longest}",
            f"build with --max-seq-len {length}, shorten the prompt, or lower --max-new-tokens",
        )
    return [
        InputRow("batch size", "-", "-", str(batch_size), f"1..{most}", *batch),
        InputRow("length", "-", "-", str(length), f"1..{longest}", *total),
    ]


def token_row(
    manifest: Manifest, tokens: Any, *, batch_size: int, room: int, new: int | None = None, name: str = "input_ids"
) -> InputRow:
    """Return the row of token ids [B, S].

    `room` is what is left of the cache, `new` the tokens of a step, if it takes that many alone.
    """
    vocab = manifest.vocab_size
    built = f"int64 cpu [{batch_size}, {new or f'1..{room}'}]" + (f", ids 0..{vocab - 1}" if vocab else "")
    if not isinstance(tokens, torch.Tensor):
        return InputRow(name, type(tokens).__name__, "-", "-", built, "no tensor", "pass torch.tensor(ids)")

    def row(problem: str = "", fix: str = "") -> InputRow:
        return row_of(name, tokens, built, problem, fix)

    if tokens.dtype != torch.int64:
        return row("dtype must be int64", "pass .to(torch.int64)")
    if tokens.device.type != "cpu":
        return row("must be on the CPU", "pass .cpu()")
    if tokens.dim() != 2:
        return row(f"{tokens.dim()} dimensions instead of 2", "pass [batch, tokens]")
    if tokens.shape[0] != batch_size:
        return row(
            f"{tokens.shape[0]} sequences in a session of {batch_size}", f"engine.session({tokens.shape[0]}, LENGTH)"
        )
    size = tokens.shape[1]
    if size != (new or max(size, 1)):
        return row(f"{size} tokens a sequence instead of {new or 'at least 1'}", f"pass [{batch_size}, {new or 1}]")
    if size > room:
        return row(
            f"the cache of the session is full: {size} more tokens, {room} slots left",
            "make the session longer, or lower --max-new-tokens",
        )
    low, high = int(tokens.min()), int(tokens.max())
    if vocab is not None and not 0 <= low <= high < vocab:
        return row(
            f"ids from {low} to {high}, outside of the vocabulary 0 to {vocab - 1}",
            "use the tokenizer that belongs to the model: --tokenizer DIRECTORY",
        )
    return row()


def constant_rows(manifest: Manifest, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> list[InputRow]:
    """Return the rows of what the encoder of an encoder-decoder has made."""
    entries = {entry.name: entry for entry in manifest.inputs}
    rows = []
    for name in names:
        entry = entries[name]
        built = f"{entry.dtype} cpu [{', '.join(map(str, entry.shape))}]"
        tensor = constants.get(name)
        if tensor is None:
            rows.append(
                InputRow(name, "-", "-", "-", built, "missing", "engine.session(..., constants=engine.encode(...))")
            )
            continue
        fits = str(tensor.dtype).removeprefix("torch.") == entry.dtype and tensor.dim() == len(entry.shape)
        rows.append(row_of(name, tensor, built, *(() if fits else ("another dtype or shape", "engine.encode(...)"))))
    unknown = [name for name in constants if name not in names]
    rows += [row_of(name, constants[name], "-", "not an input", "leave it out") for name in unknown]
    return rows


def mask_row(mask: Any, tokens: torch.Tensor) -> InputRow:
    """Return the row of an attention mask [B, S] for `tokens`: 1 for tokens, 0 for padding on the left."""
    name, built = "attention_mask", f"int64 cpu {list(tokens.shape)}, padding on the left"
    if not isinstance(mask, torch.Tensor):
        return InputRow(name, type(mask).__name__, "-", "-", built, "no tensor", "pass torch.tensor(mask)")

    def row(problem: str = "", fix: str = "") -> InputRow:
        return row_of(name, mask, built, problem, fix)

    if mask.is_floating_point() or mask.is_complex():
        return row("dtype must be a whole number or bool", "pass .to(torch.int64)")
    if mask.device.type != "cpu":
        return row("must be on the CPU", "pass .cpu()")
    if mask.shape != tokens.shape:
        return row("another shape than the token ids", f"pass {list(tokens.shape)}")
    if mask.numel() and not bool(((mask == 0) | (mask == 1)).all()):
        return row("values other than 0 and 1", "1 for tokens, 0 for padding")
    if mask.numel() and not bool((mask[:, -1] == 1).all()):
        return row("padding on the right", "padding on the left: padding_side='left' of the tokenizer")
    return row()


def check_prompts(manifest: Manifest, tokens: torch.Tensor, mask: torch.Tensor, *, length: int) -> None:
    """Check prompts for a session that is still to be made.

    Raises:
        UsageError: One message with a table of all inputs.
    """
    batch_size, room = tokens.shape[0], max(tokens.shape[1], manifest.max_seq_len or 0)
    ids = token_row(manifest, tokens, batch_size=batch_size, room=room)
    # Sizes have rows of their own; what the engine was built for does not depend on what was given.
    vocab = f", ids 0..{manifest.vocab_size - 1}" if manifest.vocab_size else ""
    ids = replace(ids, built=f"int64 cpu [1..{manifest.max_batch_size}, 1..{manifest.max_seq_len}]{vocab}")
    refuse(manifest.name, [*size_rows(manifest, batch_size, length), ids, mask_row(mask, tokens)])


def check_inputs(manifest: Manifest, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `inputs` by the executable's names.

    Raises:
        UsageError: One message with a table of all inputs.
    """
    given = named_inputs(inputs)
    sizes: dict[str, int] = {}
    rows: list[InputRow] = []
    for entry in manifest.inputs:
        tensor = given.pop(entry.name, None)
        built = f"{entry.dtype} cpu [{', '.join(_size_text(size, manifest) for size in entry.shape)}]"
        if tensor is None:
            rows.append(InputRow(entry.name, "-", "-", "-", built, "missing", "pass it"))
            continue
        problem, fix = "", ""
        if str(tensor.dtype).removeprefix("torch.") != entry.dtype:
            problem = f"dtype must be {entry.dtype}"
            fix = f"pass .to(torch.{entry.dtype}), or build with other --inputs"
        elif tensor.device.type != "cpu":
            problem, fix = "must be on the CPU", "pass .cpu()"
        else:
            problem, fix = _shape_problem(tuple(tensor.shape), entry.shape, manifest, sizes)
        rows.append(row_of(entry.name, tensor, built, problem, fix))
    rows += [row_of(name, tensor, "-", "not an input", "leave it out") for name, tensor in given.items()]
    refuse(manifest.name, [*rows, *_fixed_rows(manifest, inputs)])
    tensors = named_inputs(inputs)
    return {entry.name: tensors[entry.name] for entry in manifest.inputs}


def _fixed_rows(manifest: Manifest, inputs: Mapping[str, Any]) -> list[InputRow]:
    """Plain values are part of the graph: another value would be ignored."""
    rows = []
    for name, value in inputs.items():
        plain = isinstance(value, (bool, int, float, str, type(None)))
        if plain and manifest.fixed_inputs.get(name, not value) != value:
            built = repr(manifest.fixed_inputs[name]) if name in manifest.fixed_inputs else "-"
            given = (type(value).__name__, "-", repr(value))
            rows.append(InputRow(name, *given, built, "its value was built in", "build again with other --inputs"))
    return rows


def _shape_problem(
    given: tuple[int, ...], built: tuple[int | str, ...], manifest: Manifest, sizes: dict[str, int]
) -> tuple[str, str]:
    if len(given) != len(built):
        return f"{len(given)} dimensions", f"pass {len(built)} dimensions"
    for index, (size, wanted) in enumerate(zip(given, built, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                return f"dimension {index} must be {wanted}", "build with --inputs of two steps that differ in it"
        elif wanted in manifest.ranges:
            low, high = manifest.ranges[wanted]
            if size < low or (high is not None and size > high):
                allowed = f"{low} to {'any' if high is None else high}"
                return f"dimension {index} must be {allowed}", "build with --inputs of other sizes"
            if sizes.setdefault(wanted, size) != size:
                return f"dimension {index} must be {sizes[wanted]}, as in the inputs above", "pass equal sizes"
    return "", ""


def _size_text(size: int | str, manifest: Manifest) -> str:
    if isinstance(size, int) or size not in manifest.ranges:
        return str(size)
    low, high = manifest.ranges[size]
    return f"{low}..{'' if high is None else high}"


def results_of(
    manifest: Manifest,
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    past_of: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return what an engine returns: what it gave, and the inputs that it wrote into.

    Raises:
        CorruptError: A file of it says that it gives something else.
    """
    returned = {
        entry.name: outputs.get(entry.name, inputs.get(past_of.get(entry.name, ""))) for entry in manifest.outputs
    }
    results = {name: value for name, value in returned.items() if value is not None}
    if len(results) < len(returned):
        absent = next(name for name in returned if name not in results)
        raise CorruptError(f"the engine {manifest.name!r} gives no {absent!r}", got=", ".join(outputs))
    return results


@dataclass(frozen=True)
class InputRow:
    """One input.

    Attributes:
        name: As the engine calls it.
        dtype: torch dtype name, or the type of a plain value; "-" where nothing was given.
        device: Where it is.
        shape: Its sizes, or the plain value itself.
        built: What the engine was built for.
        problem: What is wrong; empty when nothing is.
        fix: The exact call or flag that helps.
    """

    name: str
    dtype: str
    device: str
    shape: str
    built: str
    problem: str = ""
    fix: str = ""


def row_of(name: str, tensor: torch.Tensor, built: str, problem: str = "", fix: str = "") -> InputRow:
    """Return the row of a tensor; its values are not looked at."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputRow(name, dtype, str(tensor.device), str(list(tensor.shape)), built, problem, fix)


def render(rows: Sequence[InputRow]) -> str:
    """Return the table as text, a line per row; columns that are empty throughout are left out."""
    cells = [[r.name, r.dtype, r.device, r.shape, r.built, r.problem or "ok", r.fix] for r in rows]
    if not any(row.problem for row in rows):
        cells = [cell[: 5 if any(row.built for row in rows) else 4] for cell in cells]
    table = [list(_HEADER[: len(cells[0])]), *cells]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def render_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the table of what a step is about to be given."""
    return render([row_of(name, tensor, "") for name, tensor in tensors.items()])


def refuse(engine: str, rows: Sequence[InputRow]) -> None:
    """Raise if any row has a problem; the hint repeats what helps.

    Raises:
        UsageError: With the table of all rows.
    """
    fixes = dict.fromkeys(row.fix for row in rows if row.problem and row.fix)
    if any(row.problem for row in rows):
        raise UsageError(
            f"the inputs do not fit the engine {engine!r}", got="\n" + render(rows), hint="; ".join(fixes) or None
        )
