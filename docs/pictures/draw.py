"""Draw check.svg: the answer of one real `glass check`, as the terminal shows it. `make pictures` runs this.

The command runs in a process of its own with colors on; rich renders what it prints. tests/test_readme.py
compares the text in the picture with what the command prints today.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
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
CHARACTER = 12.2  # pixels in rich's SVG


def drawn(answer: str) -> str:
    """Return the SVG of a command line and its answer, given with ANSI colors; it refers to nothing outside itself."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), highlight=False)
    console.print(f"$ glass {' '.join(COMMAND)}", style="bold", markup=False)
    for line in answer.splitlines():
        console.print(Text.from_ansi(line.rstrip()))
    # rich names two web fonts; a document shows no picture that loads something.
    frame = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="glass check", code_format=frame, unique_id="check")
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


def main() -> None:
    """Run the command and write the picture."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    command = [sys.executable, "-m", "glassengine", *COMMAND, *QUIETLY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 1:
        raise SystemExit(f"exit status {done.returncode}, 1 expected: {done.stderr}")
    PICTURE.write_text(drawn(done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
