"""The trace for Perfetto in the viewer whose format it is: Chromium's trace viewer, as torch-tb-profiler ships it.

Perfetto's own trace processor reads the same format; it is a program that its package downloads when it is first used.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.cli.documents import json_text
from glassengine.report.exported import perfetto
from tests.report.browser import chromium
from tests.report.made_results import comparison, layered

# The viewer is of the time of the first web components, which browsers have no longer; reading needs no more of them.
OLD_COMPONENTS = """
const prototypes = new Map();
const create = document.createElement.bind(document);
function made(name, options) {
  const element = create(name, options);
  const prototype = prototypes.get(name);
  if (prototype) { Object.setPrototypeOf(element, prototype); try { element.createdCallback?.(); } catch { } }
  return element;
}
window.CustomElements = {hasNative: false, useNative: true};
document.createElement = made;
document.registerElement = (name, options) => {
  const prototype = options?.prototype ?? Object.create(HTMLElement.prototype);
  prototypes.set(name, prototype);
  const kind = function () { return made(name); };
  kind.prototype = prototype;
  return kind;
};
Object.defineProperty(document, "_currentScript", {get: () => document.currentScript});
"""
READ = """(text) => {
  const model = new tr.Model();
  new tr.importer.Import(model).importTraces([text]);
  const found = {warnings: model.importWarnings, processes: [], slices: [], counters: []};
  for (const process of model.getAllProcesses()) {
    found.processes.push(process.name);
    for (const thread of Object.values(process.threads))
      for (const one of thread.sliceGroup.slices)
        found.slices.push([thread.name, one.title, one.start, one.duration, one.args]);
    for (const counter of Object.values(process.counters))
      found.counters.push(counter.series[0].samples.map((sample) => sample.value));
  }
  return found;
}"""


def test_a_trace_opens_without_a_warning() -> None:
    wrong = comparison(layered())
    package = pytest.importorskip("torch_tb_profiler", reason="torch-tb-profiler is not installed")
    viewer = Path(package.__path__[0]) / "static/trace_viewer_full.html"
    with chromium() as browser:
        page = browser.new_page()
        page.add_init_script(OLD_COMPONENTS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(viewer.as_uri())
        assert errors == []
        read = page.evaluate(READ, json_text(perfetto(wrong)))
    assert read["warnings"] == []
    assert read["processes"] == list(dict.fromkeys(pair.level for pair in wrong.pairs))
    assert len(read["slices"]) == len(wrong.pairs)
    # Every slice lies on the row of its step, in order of execution, a millisecond each.
    for step in range(4):
        pairs = [pair for pair in wrong.pairs if pair.step == step]
        slices = [found for found in read["slices"] if found[0].endswith(f"step {step}")]
        assert [(name, start, length) for _, name, start, length, _ in slices] == [
            (f"wrong: {pair.site}" if pair.verdict == "wrong" else pair.site, place, 1)
            for place, pair in enumerate(pairs)
        ]
        assert [told["verdict"] for *_, told in slices] == [pair.verdict for pair in pairs]
        assert [pair.noise_ratio for pair in pairs] in read["counters"]
