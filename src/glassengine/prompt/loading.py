"""Finds parameters that a model makes up, and those of its checkpoint that it does not take: from headers, no weights.

transformers loads a model whose checkpoint lacks parameters: it draws them at random, prints a table, and generates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.prompt.side import Loaded, PromptSide
from glassengine.results.without_tensors import PromptFinding

_ROWS = 16
"""Of two tables that should be one, which are compared."""


def has_weights(path: Path) -> bool:
    """Whether a directory has weights of which the headers say names and shapes."""
    return any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def loaded(path: Path) -> Loaded:
    """Return what transformers would make of the checkpoint in a directory.

    Raises:
        GlassError: A file is damaged, or the configuration is out of proportion.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from glassengine.program.loading.checkpoint_files import (
        model_class_of,
        require_plain_files,
        weight_files,
        without_weights,
    )
    from glassengine.program.loading.load import bounded_by_checkpoint, require_countable
    from glassengine.reading.tensors import open_safetensors

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of its table of missing parameters
    require_plain_files(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    require_countable(config.to_dict(), str(path))
    if getattr(config, "quantization_config", None) is not None:
        return Loaded(0, reason="the checkpoint is quantized: packed weights have other names")
    files: dict[str, Path] = {}
    weights: dict[str, Any] = {}
    for file in weight_files(str(path)):
        with open_safetensors(file) as opened:
            for name in list(opened.keys()):
                files[name] = file
                weights[name] = torch.empty(opened.get_slice(name).get_shape(), device="meta", dtype=torch.bfloat16)
    is_encoder = (path / "modules.json").is_file()
    with bounded_by_checkpoint(path, weights=False):
        plain = type(without_weights(model_class_of(config, is_sentence_encoder=is_encoder), config, torch.bfloat16))
        model, report = plain.from_pretrained(  # type: ignore[attr-defined]
            *(None,),
            config=config,
            state_dict=weights,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            device_map="meta",
        )
    ties = getattr(model, "_tied_weights_keys", None) if config.get_text_config().tie_word_embeddings else None
    pairs = ties.items() if isinstance(ties, dict) else ()
    untied = [f"{a} and {b}" for a, b in pairs if a in files and b in files and not _same_rows(files, a, b)]
    other = [f"{name} is {list(x)} in the file, {list(y)} in the model" for name, x, y in report["mismatched_keys"]]
    return Loaded(
        len(weights), sorted(report["missing_keys"]), sorted(report["unexpected_keys"]), sorted(other), untied
    )


def _same_rows(files: dict[str, Path], *names: str) -> bool:
    """Whether some rows of two tables in the files are the same."""
    from glassengine.reading.tensors import open_safetensors

    rows = []
    for name in names:
        with open_safetensors(files[name]) as opened:
            table = opened.get_slice(name)
            size = table.get_shape()[0]
            rows.append([size, *(table[at : at + 1].tolist() for at in range(0, size, max(size // _ROWS, 1)))])
    return bool(rows[0] == rows[1])


def compare_loading(baseline: PromptSide, candidate: PromptSide) -> tuple[list[PromptFinding], int]:
    """Return what does not fit in the checkpoint of either side, and the number of their parameters.

    Parameters that nothing takes are wrong if they are of a layer, or of the candidate alone: others are often of a
    head that another model has.
    """
    found, number = [], 0
    unused: Sequence[str] = ()
    for side, opened in (("baseline", baseline), ("candidate", candidate)):
        one = opened.load() if opened.opened.has_weights else Loaded(0)
        number += one.number
        causes = (
            ("random parameters", one.missing, "the checkpoint lacks {} parameters, which the model draws at random"),
            ("other shapes", one.mismatched, "{} parameters of another shape are drawn at random"),
            ("untied weights", one.untied, "{} pairs are tied by the configuration, and differ in the file"),
            ("unused parameters", one.unexpected, "the checkpoint has {} parameters that the model does not take"),
        )
        for cause, names, words in causes:
            if names:
                of_layers = any(re.search(r"(^|\.)\d+\.", name) for name in names)
                is_wrong = cause != "unused parameters" or of_layers or (side != "baseline" and names != unused)
                detail = f"{side}: {words.format(len(names))}: {', '.join(names[:3])}"
                found.append(
                    PromptFinding("loading", cause, "wrong" if is_wrong else "note", detail, len(names), one.number)
                )
        if one.reason is not None:
            found.append(PromptFinding("loading", "not compared", "note", f"{side}: {one.reason}"))
        unused = one.unexpected
    return found, number
