"""The measuring of memory, and the line and plot made of it."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks.plot import fit_line, panels
from benchmarks.size import run

HOLD = "import time; data = b'x' * 200_000_000; time.sleep(0.5)"


def test_memory_of_a_process_and_its_children() -> None:
    alone = run([sys.executable, "-c", HOLD])
    assert 200e6 < alone.peak_bytes < 260e6
    both = run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])\n"])
    assert both.peak_bytes > alone.peak_bytes


def test_output_is_kept_and_a_failure_is_none_to_measure() -> None:
    assert run([sys.executable, "-c", "print('plan')"]).output == "plan\n"
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", "raise SystemExit(3)"])


def test_line() -> None:
    line = fit_line([(1, 3), (2, 5), (4, 9)])
    assert (line.intercept, line.slope, line.r_squared) == pytest.approx((1, 2, 1))
    assert fit_line([(0, 0), (1, 1), (2, 0)]).r_squared == pytest.approx(0)


def test_plot_is_svg_with_every_point() -> None:
    text = panels([("memory", "GB", {"build": [(1, 2), (2, 3)], "run & check": [(1, 1), (2, 1)]})] * 2, "GB of weights")
    root = ET.fromstring(text)
    assert len(root.findall(".//{*}circle")) == 8
    assert "run & check" in {found.text for found in root.findall(".//{*}text")}
