"""A comparison for what people open already: Model Explorer, Perfetto, TensorBoard, Netron.

All show the same: of each tensor the worst verdict over cases, steps and ranks, and its error over the noise floor.

A result as a picture of 1200 x 630 pixels, to show beside a link: the first words, the sides, and the map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import BackendError, UsageError, nearest
from glassengine.extensions import require_package
from glassengine.reading.files import open_regular, printable, read_bytes, shown
from glassengine.report.words import headline, result_line, results_shown
from glassengine.results import VERDICTS, Comparison, Pair
from glassengine.results.notebook import color_of, worst_rows
from glassengine.results.report import WrittenReport
from glassengine.results.stored import read_comparisons
from glassengine.writing import aside, local, write_events

COLORS = {"identical": "#e8e8e8", "rounding": "#9ecae1", "suspicious": "#ffd92f", "wrong": "#d95f02"}
_TEXT = {"identical": "#000000", "rounding": "#000000", "suspicious": "#000000", "wrong": "#ffffff"}
_LARGEST = 1e30
"""In place of what is not finite, which JSON does not know."""
_MOST_ONNX_BYTES = 1 << 31
_PREFIX = "glass."


def worst_of(result: Comparison) -> dict[str, Pair]:
    """Return the worst pair of each site of the baseline, in order of execution."""
    worst: dict[str, Pair] = {}
    for pair in result.pairs:
        worst[pair.site] = max(worst.get(pair.site, pair), pair, key=_badness)
    return worst


def model_explorer(result: Comparison, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return node data of Model Explorer: a value and a color for each node.

    Args:
        result: What was compared.
        names: Site -> how the opened graph calls it, e.g. its FX node; sites that it lacks keep their names.
    """
    nodes = {}
    for site, pair in worst_of(result).items():
        data = {"value": _ratio(pair), "bgColor": COLORS[pair.verdict], "textColor": _TEXT[pair.verdict]}
        for name in names.get(site, (site,)):
            nodes[printable(name)] = data
    return {"main": {"name": "error / noise floor", "results": nodes, "thresholds": [], "gradient": []}}


def perfetto(result: Comparison) -> dict[str, Any]:
    """Return a trace whose time is the order of execution: a slice for each tensor, a row for each step, and a counter.

    A tensor takes one millisecond, since a comparison knows nothing of time.
    """
    events: list[dict[str, Any]] = []
    rows: dict[tuple[str, str, int, int], int] = {}
    places: dict[tuple[str, str, int, int], int] = {}
    processes: dict[str, int] = {}
    for pair in result.pairs:
        key = (pair.level or "record", pair.case or "", pair.step, pair.rank)
        process = processes.setdefault(key[0], len(processes) + 1)
        if key not in rows:
            rows[key] = len(rows) + 1
            rank = f", rank {pair.rank}" if pair.rank else ""
            name = f"{key[1]}{', ' if key[1] else ''}step {pair.step}{rank}"
            events.append(_named("thread_name", process, rows[key], name))
        start = 1000 * places.get(key, 0)
        places[key] = places.get(key, 0) + 1
        place = {"pid": process, "tid": rows[key], "ts": start}
        facts = {"verdict": pair.verdict, "candidate_site": printable(pair.candidate_site), "inherited": pair.inherited}
        facts |= {"error/floor": _ratio(pair), "judged_by": pair.judged_by}
        name = f"{pair.verdict}: {pair.site}" if pair.verdict in ("wrong", "suspicious") else pair.site
        events.append({"ph": "X", "name": printable(name), "cat": pair.verdict, "dur": 1000, "args": facts, **place})
        if pair.noise_ratio is not None:
            counter = {"ph": "C", "name": f"error/floor, row {rows[key]}", "args": {"value": _ratio(pair)}}
            events.append({**counter, **place})
    events += [_named("process_name", number, 0, name) for name, number in processes.items()]
    about = {"written_by": "Glass Engine", **_about(result)}
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def write_tensorboard(result: Comparison, directory: Path) -> Path:
    """Write an event file: how many tensors have which verdict in each step, and the largest error over noise floor.

    Raises:
        UsageError: TensorBoard is not installed.
    """
    try:
        return write_events(directory, _events(result), "glass")
    except ImportError as error:
        hint = "pip install 'glassengine[tensorboard]'"
        raise UsageError("the package tensorboard is missing", got=str(error), hint=hint) from error


def _events(result: Comparison) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 0, {"tag": "glass/ok", "simple_value": float(result.ok)}
    yield 0, {"tag": "glass/coverage", "simple_value": result.coverage}
    levels = list(dict.fromkeys(pair.level or "record" for pair in result.pairs))
    for level in levels:
        of_level = [pair for pair in result.pairs if (pair.level or "record") == level]
        for step in sorted({pair.step for pair in of_level}):
            pairs = [pair for pair in of_level if pair.step == step]
            for verdict in VERDICTS:
                count = sum(pair.verdict == verdict for pair in pairs)
                yield step, {"tag": f"{level}/{verdict}", "simple_value": float(count)}
            ratios = [_ratio(pair) for pair in pairs if pair.noise_ratio is not None]
            if ratios:
                yield step, {"tag": f"{level}/largest error over floor", "simple_value": max(ratios)}


def write_onnx(result: Comparison, model: Path, target: Path, *, overwrite: bool = False) -> int:
    """Write a copy of an ONNX file whose nodes have the verdicts as metadata, which Netron shows.

    Returns the number of these nodes. Weights stay where they are: a file with weights in others beside it is copied
    into its own directory only.

    Raises:
        BackendError: onnx is not installed.
        UsageError: It is not an ONNX file, no tensor of the result is in it, its weights would be lost, or the target
            is there, or is the file itself.
    """
    if target.exists() and (not overwrite or target.samefile(model)):
        raise UsageError("a file is not replaced", got=shown(target), hint="another name, or --overwrite")
    onnx = require_package("onnx", "an ONNX file cannot be read here", "pip install 'glassengine[onnx]'", BackendError)
    copy = onnx.ModelProto()
    try:
        copy.ParseFromString(read_bytes(model, most=_MOST_ONNX_BYTES))
    except Exception as error:  # of protobuf, whose errors have no common type
        raise UsageError("not an ONNX model", got=f"{shown(model)}: {shown(str(error))}") from error
    is_external = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(copy.graph))
    if is_external and target.resolve().parent != model.resolve().parent:
        raise UsageError(
            "the weights of this file lie beside it",
            got=f"{shown(target)}: another directory",
            expected=f"a file in {shown(model.resolve().parent)}",
        )
    worst = worst_of(result)
    there = {pair.candidate_site: pair for pair in reversed(list(worst.values()))}
    outputs = {name for node in copy.graph.node for name in node.output}
    by_name: Mapping[str, Pair] = max((worst, there), key=lambda known: len(known.keys() & outputs))
    if not by_name.keys() & outputs:
        near = nearest(next(iter(outputs), ""), by_name)
        raise UsageError("no tensor of the result is in this file", got=shown(model), expected=near or None)
    count = 0
    for node in copy.graph.node:
        pairs = [by_name[name] for name in node.output if name in by_name]
        if pairs:
            count += 1
            _annotate(node, max(pairs, key=_badness))
    for name, value in _about(result).items():
        copy.metadata_props.add(key=f"{_PREFIX}{name}", value=printable(str(value)))
    with aside(target) as path:
        path.write_bytes(copy.SerializeToString())
    return count


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors(inner)


def _annotate(node: Any, pair: Pair) -> None:
    kept = [prop for prop in node.metadata_props if not prop.key.startswith(_PREFIX)]
    del node.metadata_props[:]
    node.metadata_props.extend(kept)
    facts: dict[str, object] = {"verdict": pair.verdict, "judged_by": pair.judged_by, "inherited": pair.inherited}
    facts |= {"error_over_floor": pair.noise_ratio, "error_over_bound": pair.bound_ratio, "reason": pair.reason}
    for name, value in facts.items():
        if value is not None:
            node.metadata_props.add(key=f"{_PREFIX}{name}", value=printable(str(value)))


def _badness(pair: Pair) -> tuple[int, float]:
    return VERDICTS.index(pair.verdict), _ratio(pair)


def _ratio(pair: Pair) -> float:
    """Return the error over the noise floor; without one 0, and for what is wrong a very large number."""
    if pair.noise_ratio is None:
        return _LARGEST if pair.verdict == "wrong" else 0.0
    return pair.noise_ratio if math.isfinite(pair.noise_ratio) else _LARGEST


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "ts": 0, "args": {"name": printable(name)}}


def _about(result: Comparison) -> dict[str, object]:
    first = result.first_divergence
    facts: dict[str, object] = {"ok": result.ok, "verdict": result.verdict, "coverage": result.coverage}
    facts |= {"baseline": printable(result.baseline), "candidate": printable(result.candidate)}
    return facts if first is None else facts | {"first_divergence": printable(first.site)}


SIZE = 1200, 630
_LEFT, _WIDTH = 60, 1080
_MAP = 470, 100
"""Top and height of the map."""
_LARGE, _SMALL = 44, 26
_MOST_LINES = 4
_SOFTWARE = "Glass Engine, card"
"""What a picture says of itself, so that no other one is replaced."""
_HEAD = 256
"""Bytes of a file in which it says that."""


def write_card(document: str | Path, path: str | Path) -> WrittenReport:
    """Draw the result that a file of `--json` holds.

    Args:
        document: What `check` or `compare` wrote; of several results the first.
        path: Of the picture, a PNG file; a card that is there is replaced.

    Raises:
        UsageError: Pillow is missing, the file holds another result, or the path is in a store or is another file.
    """
    target = local(path)
    if target.exists() and not _is_card(target):
        raise UsageError("a card replaces only a card", got=str(target), expected="a new file, or a card")
    result = read_comparisons(str(document))[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    picture = drawn(result)
    from PIL.PngImagePlugin import PngInfo  # drawn has said so where Pillow is missing

    mark = PngInfo()
    mark.add_text("Software", _SOFTWARE)
    with aside(target) as part, part.open("wb") as file:
        picture.save(file, format="PNG", optimize=True, pnginfo=mark)
    size = target.stat().st_size
    return WrittenReport(str(target), result.ok, result.verdict, 0, 0, {}, 1, size)


def _is_card(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return _SOFTWARE.encode() in file.read(_HEAD)


def drawn(result: Comparison) -> Any:
    """Return the picture, an image of Pillow.

    Raises:
        UsageError: Pillow is missing.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise UsageError("the package PIL is missing", hint="pip install 'glassengine[images]'") from error
    image = Image.new("RGB", SIZE, "#ffffff")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, SIZE[0], 16), fill=COLORS["rounding" if result.ok else "wrong"])
    top = 60
    lines = [(_LARGE, f"{'ok' if result.ok else 'NOT OK'}: {headline(result).why}")]
    lines += [(_SMALL, result_line(found)) for found in results_shown(result)[:1]]
    lines.append((_SMALL, f"{result.baseline} (baseline), {result.candidate} (candidate)"))
    for size, text in lines:
        font = ImageFont.load_default(size)
        for line in _wrapped(text, lambda part, font=font: draw.textlength(part, font=font)):
            draw.text((_LEFT, top), line, font=font, fill="#1a1a1a")
            top += round(size * 1.25)
        top += round(size * 0.4)
    rows = worst_rows(result)
    top, height = _MAP[0], _MAP[1] / max(len(rows), 1)
    for y, row in enumerate(rows):
        width = _WIDTH / len(row)
        for x, (_, pair) in enumerate(row):
            if pair is not None:
                left, up = _LEFT + x * width, top + y * height
                draw.rectangle((left, up, left + width - 1, up + height - 1), fill=color_of(pair))
    draw.text((_LEFT, SIZE[1] - 44), "Glass Engine", font=ImageFont.load_default(_SMALL), fill="#666666")
    return image


def _wrapped(text: str, length_of: Any) -> list[str]:
    """Return the lines of a text, wrapped at words; what does not fit into a few lines ends with dots."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and length_of(longer) > _WIDTH:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"{lines[_MOST_LINES - 1]} ..."]
    return lines
