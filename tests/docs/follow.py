"""Follows a page by its text alone, in an empty directory, with the commands of an environment; prints a transcript.

    python tests/docs/follow.py docs/tutorial.md .venv-dist/bin

The page's files are written, its console lines run in a shell, and what they print is compared with the page. Blocks
that are marked as original (the installation) are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.docs.conftest import blocks_of, commands_of, mismatch


def tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(page: Path, commands: Path) -> int:
    """Follow the page, and return how many commands printed something else."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = f"{commands.resolve()}{os.pathsep}{environ['PATH']}"
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    problems, status, begun = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.mark.startswith("file: "):
                (Path(folder) / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
            if block.language != "console" or block.mark:
                continue
            for command, shown in commands_of(block.text):
                text = f"(exit {status}); {command}" if command == "echo $?" else command
                done = subprocess.run(
                    ["bash", "-c", text],
                    cwd=folder,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                status = done.returncode
                tell(f"[{time.monotonic() - begun:5.0f} s] $ {command}\n{done.stdout}")
                if (line := mismatch(shown, done.stdout)) is not None:
                    problems += 1
                    tell(f"DIFFERS: the page shows {line!r}\n")
    tell(f"{problems} commands differ from the page\n")
    return problems


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), Path(sys.argv[2]))))
