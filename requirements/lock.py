"""Write the lock files: what constraints.txt pins, with the hashes of every file that the package index lists for it.

    make lock

Hashes are those of the index's own listing; nothing but torch is downloaded. They hold on every platform and for every
version of Python that a package has files for. Run it after constraints.txt or tools.in has changed, and read the
difference: a pin that did not change must keep its hashes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Not part of the environment of the tests: what only other extras need. torch has a lock of its own.
OTHERS = {"torch", "adlfs", "gcsfs", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"}

HEAD = "# Written by `make lock`; every file of each version, by hash.\n"


def main() -> None:
    """Write `tests.lock`, `torch.lock` and `tools.lock`."""
    pins = [line for line in (HERE.parent / "constraints.txt").read_text().splitlines() if "==" in line]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    inputs = "".join(f"{pin}\n" for pin in pins if pin.partition("==")[0] not in OTHERS)
    (HERE / "tests.lock").write_text(HEAD + locked(inputs, "--no-deps"))
    listed = set(re.findall(r"sha256:([0-9a-f]{64})", locked(torch, "--no-deps"))) | {served(torch)}
    lines = " \\\n".join([torch, *(f"    --hash=sha256:{found}" for found in sorted(listed))])
    (HERE / "torch.lock").write_text(f"{HEAD}# And of the build that the index of the tests serves.\n{lines}\n")
    (HERE / "tools.lock").write_text(HEAD + locked((HERE / "tools.in").read_text()))


def locked(requirements: str, *options: str) -> str:
    """Return pins with hashes.

    Args:
        requirements: One a line.
        options: Further ones of uv.
    """
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "-", "--quiet", "--generate-hashes"]
    command += ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate", *options]
    return subprocess.run(command, input=requirements, capture_output=True, text=True, check=True).stdout


def served(requirement: str) -> str:
    """Return the SHA-256 of the file that pip would install here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*command, "--report", report, requirement], check=True)
        (found,) = json.loads(report.read_bytes())["install"]
    return str(found["download_info"]["archive_info"]["hashes"]["sha256"])


if __name__ == "__main__":
    main()
