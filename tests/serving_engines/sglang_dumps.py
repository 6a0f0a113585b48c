"""Dumps as SGLang writes them, made of a recording of vLLM: its modules have the same names and compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine.recording.formats.folders import ServerFolder

PROCESS = "TP0_PP0_Rank0_pid77"


def forwards(source: ServerFolder) -> list[tuple[dict[str, Tensor], list[dict[str, Any]]]]:
    """Return the tensors of each forward, and its requests."""
    steps = range(len(source.metadata["forwards"]))
    by_step: list[dict[str, Tensor]] = [{} for _ in steps]
    for entry in source.entries:
        by_step[entry.step][entry.site] = source.tensor(entry).clone()
    return [(values, source.metadata["forwards"][step]) for step, values in enumerate(by_step)]


def given(values: dict[str, Tensor], requests: list[dict[str, Any]], slots: dict[str, int]) -> dict[str, Tensor]:
    """Return what SGLang dumps of a batch."""
    return {
        "input_ids": values["./in.input_ids"].long(),
        "positions": values["./in.positions"].long(),
        "seq_lens": torch.tensor([one["start"] + one["length"] for one in requests]),
        "req_pool_indices": torch.tensor([slots.setdefault(one["name"], len(slots)) for one in requests]),
    }


def modules(values: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return what each module returned."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, value in values.items():
        module, _, port = name.partition("/out.")
        if port and module != ".":
            found.setdefault(module, {})[int(port)] = value
    return {module: [ports[place] for place in sorted(ports)] for module, ports in found.items()}


def write_passes(source: ServerFolder, folder: Path) -> Path:
    """Write what `--debug-tensor-dump-output-folder` does: scores are in the file of the next forward."""
    process = folder / PROCESS
    process.mkdir(parents=True)
    behind: dict[str, Any] = {}
    for number, (values, requests) in enumerate(forwards(source)):
        # Of modules that have none inside of them; attention is one of these.
        own: dict[str, Any] = {name: one[0] if len(one) == 1 else one for name, one in modules(values).items()}
        batch = given(values, requests, {})
        told = {f"model.forward_batch_info.{name}": batch[name] for name in ("input_ids", "seq_lens", "positions")}
        torch.save({**behind, **own, **told}, process / f"Pass{number:05d}.pt")
        behind = {"model": values["model.norm/out.0"], "logits_processor": values["./logits.0"]}
    return folder


def write_dumper(source: ServerFolder, folder: Path) -> Path:
    """Write what the dumper does with `DUMPER_NON_INTRUSIVE_MODE=all`: a file for each tensor, its tags in the name."""
    folder.mkdir()
    index, slots = 0, dict[str, int]()
    for step, (values, requests) in enumerate(forwards(source)):
        found = given(values, requests, slots)
        for module, ports in modules(values).items():
            many = len(ports) > 1
            found |= {
                f"non_intrusive__{module}.output{f'.{place}' if many else ''}": value
                for place, value in enumerate(ports)
            }
        for name, value in values.items():
            module, _, port = name.partition("/in.")
            if port and module != ".":
                found[f"non_intrusive__{module}.inputs.{port}"] = value
        found["non_intrusive__logits_processor.output.next_token_logits"] = values["./logits.0"]
        for name, value in found.items():
            index += 1
            tags = f"step={step}___rank=0___dump_index={index}___name={name}___recompute_status=disabled"
            torch.save({"value": value, "meta": {"name": name, "step": step}}, folder / f"{tags}.pt")
    return folder
