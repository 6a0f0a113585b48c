"""A report of 100 000 tensors in four steps: time and memory of making it, first paint and scrolling in a browser.

    python -m benchmarks html [TENSORS [STEPS]]

The document is made up, in the shape that `glass compare --json` writes, and is read as any other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import keep, surroundings

TENSORS, STEPS, LAYERS = 100_000, 4, 200

MEASURED = """
import re, sys, time
from pathlib import Path
from glassengine.report.page.write import write_report
written = write_report(sys.argv[1], sys.argv[2])
# Of this program alone: the figure of `getrusage` is also that of what it was forked from.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(time.process_time(), peak, written.num_tensors, written.num_files, written.total_bytes)
"""


def pairs(tensors: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the pairs of a model in which layer 120 introduces an error that later ones inherit."""
    from tests.report.made_results import figures

    told = {verdict: figures(size).to_dict() for verdict, size in (("rounding", 1e-6), ("wrong", 2e-2))}
    each = tensors // LAYERS
    for step in range(steps):
        for number in range(tensors):
            layer, op = divmod(number, each)
            verdict = "wrong" if number >= 120 * each + 17 else "identical" if op % 3 == 0 else "rounding"
            site = f"model.layers.{layer}.block.{op // 10}.self_attn.projection/linear.{op % 10}"
            yield {
                "step": step, "site": site, "candidate_site": site, "method": "name+fingerprint", "confidence": 1.0,
                "verdict": verdict, "judged_by": "reverse replay", "figures": told.get(verdict),
                "noise_ratio": {"identical": 0.0, "rounding": 0.3 + op / 1000, "wrong": 50.0 + op}[verdict],
                "bound_ratio": 0.1, "level": "candidate", "case": "prompts", "inherited": number > 120 * each + 17,
                "reason": None, "baseline": None, "candidate": None, "abs_error": None, "rel_error": None, "rank": 0,
                "dtype": "float32", "shape": [1, 7, 64],
            }  # fmt: skip


def write_document(path: Path, tensors: int, steps: int) -> None:
    """Write the document, indented as a command writes it, pair by pair."""
    from tests.report.made_results import comparison, layered

    head = comparison(layered(layers=3), generates=True).to_dict()
    text = json.dumps({**head, "pairs": []}, indent=2)
    before, after = text.split('"pairs": []')
    with path.open("w", encoding="utf-8") as file:
        file.write(before + '"pairs": [')
        for number, pair in enumerate(pairs(tensors, steps)):
            file.write(("," if number else "") + "\n    " + json.dumps(pair, indent=2).replace("\n", "\n    "))
        file.write("\n  ]" + after)


PAINT = """() => new Promise((done) => new PerformanceObserver((list) => done(list.getEntries().at(-1).startTime))
    .observe({ type: "largest-contentful-paint", buffered: true }))"""
FIRST = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
SCROLL = """async () => {
    const box = document.querySelector(".rows"), times = [];
    let last = performance.now();
    for (let frame = 0; frame < 120; frame += 1) {
        box.scrollTop = (box.scrollHeight * frame) / 120;
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        times.push(now - last);
        last = now;
    }
    return times.slice(5);
}"""
FILTER = """(text) => { const box = document.getElementById("search"); box.value = text;
    const start = performance.now(); box.dispatchEvent(new Event("input")); return performance.now() - start; }"""


def in_the_browser(folder: Path) -> list[str]:
    """Return lines about one opening of the page."""
    from tests.report.browser import READY, Tab, chromium

    lines = []
    with chromium() as browser:
        tab = Tab(browser, folder)
        page = tab.page
        page.wait_for_function(READY, timeout=120_000)
        ready = page.evaluate("performance.now()")
        lines.append(f"first contentful paint {page.evaluate(FIRST):7.0f} ms")
        lines.append(f"largest paint          {page.evaluate(PAINT):7.0f} ms")
        lines.append(f"map, table, tree drawn {ready:7.0f} ms")
        frames = sorted(page.evaluate(SCROLL))
        worst = frames[int(len(frames) * 0.95)]
        lines.append(f"scrolling the table    {statistics.median(frames):7.1f} ms a frame, 95 % below {worst:.1f} ms")
        taken = page.evaluate(FILTER, "layers[.]7.*linear[.]3$")
        lines.append(f"a regular expression   {taken:7.0f} ms: {page.locator('#kept').inner_text()}")
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        lines.append(f"JavaScript heap        {heap:7.0f} MB")
        assert tab.messages == [], tab.messages
    return lines


def main(arguments: list[str] | None = None) -> int:
    tensors, steps = ([int(word) for word in arguments or ()] + [TENSORS, STEPS][len(arguments or ()) :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        document, target = Path(folder, "result.json"), Path(folder, "report")
        write_document(document, tensors, steps)
        size = document.stat().st_size / 1e6
        start = time.perf_counter()
        command = [sys.executable, "-c", MEASURED, str(document), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall = time.perf_counter() - start
        cpu, peak, rows, count, total = map(float, done.stdout.split())
        page = (target / "index.html").stat().st_size / 1e6
        lines = [
            surroundings(),
            f"\npython -m benchmarks html: {tensors:,} tensors x {steps} steps, a document of {size:.0f} MB\n",
            f"making the report      {wall:7.1f} s ({cpu:.1f} s of processor), peak memory {peak:.0f} MB",
            f"on disk                {total / 1e6:7.1f} MB, {count:.0f} files, page {page:.2f} MB, {rows:,.0f} rows",
            *in_the_browser(target),
        ]
    keep("html", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
