"""Draw check.svg and the pictures of the gallery: answers of real commands, as a terminal shows them.

A command runs in a process of its own with colors on; rich renders what it prints. tests/test_readme.py
compares the text in check.svg with what the command prints today; tests/docs/test_gallery.py runs the page of the
gallery and compares it with the pictures. `make pictures` runs this.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
COMMAND = ["check", "examples/tiny-llama", "--candidate", "examples/wrong_port.py:attention_scale"]
QUIETLY = ["--no-progress", "-q"]
PICTURE = Path(__file__).with_name("check.svg")
WIDTH = 112
GALLERY = ROOT / "docs/gallery.md"
ENTRY = re.compile(r"```console\n\$ glass (.+)\n(.+)\n(?:.*\n)*?```\n\n!\[.*\]\((pictures/gallery-[\w-]+\.svg)\)")
MOST_LINES = 14
CHARACTER = 12.2  # pixels in rich's SVG


def drawn(answer: str, words: Sequence[str] = COMMAND) -> str:
    """Return the SVG of a command line and its answer, given with ANSI colors; it refers to nothing outside itself."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), highlight=False)
    console.print(f"$ glass {shlex.join(words)}", style="bold", markup=False)
    for line in answer.splitlines():
        console.print(Text.from_ansi(line.rstrip()))
    # rich names two web fonts; a document shows no picture that loads something.
    frame = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title=f"glass {words[0]}", code_format=frame, unique_id=words[0])
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def text_in(svg: str) -> str:
    """Return the rows of a picture as text, in columns as wide as a character; without its title."""
    rows: dict[float, str] = {}
    for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in text.attrib:
            height, column = float(text.attrib["y"]), round(float(text.attrib["x"]) / CHARACTER)
            rows[height] = rows.get(height, "").ljust(column) + (text.text or "").replace(
                "\N{NO-BREAK SPACE}", " "
            ).strip("\n")
    return "\n".join(rows[height].rstrip() for height in sorted(rows))


def entries() -> list[tuple[list[str], str, Path]]:
    """Return (words of the command, first line of the answer on the page, picture) of each entry of the gallery."""
    found = ENTRY.findall(GALLERY.read_text(encoding="utf-8"))
    return [(shlex.split(command), answer, GALLERY.parent / picture) for command, answer, picture in found]


def main() -> None:
    """Run the commands and write the pictures."""
    draw(COMMAND, QUIETLY, PICTURE, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        make = [sys.executable, "examples/famous/make.py"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "examples/famous"])}
        subprocess.run(make, cwd=folder, env=environment, check=True, capture_output=True)
        for words, _, picture in entries():
            draw(words, ["--no-progress"], picture, Path(folder), MOST_LINES)


def draw(words: Sequence[str], more: Sequence[str], picture: Path, where: Path, most: int | None = None) -> None:
    """Write the picture of a command that runs in the directory `where`, with the first `most` lines of its answer."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    command = [sys.executable, "-P", "-m", "glassengine", *words, *more]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 4):
        raise SystemExit(f"exit status {done.returncode}: {done.stderr}")
    lines = done.stdout.replace(f"{ROOT}/", "").splitlines()
    if most is not None and len(lines) > most:
        lines[most:] = ["..."]
    picture.write_text(drawn("\n".join(lines), words), encoding="utf-8")


if __name__ == "__main__":
    main()
