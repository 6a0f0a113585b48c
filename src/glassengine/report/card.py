"""A result as a picture of 1200 x 630 pixels, to show beside a link: the first words, the sides, and the map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.reading.files import open_regular
from glassengine.report.exported import COLORS
from glassengine.report.words import headline, result_line
from glassengine.results import Comparison
from glassengine.results.notebook import verdict_rows
from glassengine.results.report import WrittenReport
from glassengine.results.stored import read_comparisons
from glassengine.writing.files import aside, local

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


def is_picture(path: str | Path) -> bool:
    """Whether an output is a picture."""
    return str(path).lower().endswith(".png")


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
    head = headline(result)
    draw.rectangle((0, 0, SIZE[0], 16), fill=COLORS["rounding" if result.ok else "wrong"])
    top = 60
    lines = [(_LARGE, f"{head.mark}: {head.why}")]
    lines += [(_SMALL, result_line(found)) for found in result.results[-1:]]
    lines.append((_SMALL, f"{result.baseline} (baseline), {result.candidate} (candidate)"))
    for size, text in lines:
        font = ImageFont.load_default(size)
        for line in _wrapped(text, lambda part, font=font: draw.textlength(part, font=font)):
            draw.text((_LEFT, top), line, font=font, fill="#1a1a1a")
            top += round(size * 1.25)
        top += round(size * 0.4)
    rows = verdict_rows(result)
    top, height = _MAP[0], _MAP[1] / max(len(rows), 1)
    for y, row in enumerate(rows):
        width = _WIDTH / len(row)
        for x, (_, verdict) in enumerate(row):
            if verdict:
                left, up = _LEFT + x * width, top + y * height
                draw.rectangle((left, up, left + width - 1, up + height - 1), fill=COLORS[verdict])
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
