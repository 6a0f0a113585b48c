"""The real Netron opens an ONNX file with verdicts, and shows them with the node that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.report.exported import write_onnx
from tests.report.browser import chromium

# Netron takes `eval` from its page, and Playwright asks by it.
KEEP_EVAL = "const own = window.eval; Object.defineProperty(window, 'eval', {get: () => own, set() {}});"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Netron's server leaves its socket to the collector
def test_verdicts_stand_with_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netron = pytest.importorskip("netron", reason="netron is not installed")
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    for name, activation in (("relu", "Relu"), ("gelu", "Gelu")):
        text = f"""<ir_version: 9, opset_import: ["" : 20]>
        g (float[2, 4] x) => (float[2, 4] y) {{ wide = Mul (x, x)  y = {activation} (wide) }}"""
        onnx.save(onnx.parser.parse_model(text), f"{name}.onnx")
    torch.save({"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}, "x.pt")
    result = glass.check("relu.onnx", candidate="gelu.onnx", inputs="x.pt")
    assert not result.ok and write_onnx(result, Path("gelu.onnx"), Path("verdicts.onnx")) == 2
    host, port = netron.start("verdicts.onnx", browse=False)
    try:
        with chromium() as browser:
            page = browser.new_page()
            page.add_init_script(KEEP_EVAL)
            page.route(lambda url: f"//{host}:{port}" not in url, lambda route: route.abort())
            page.goto(f"http://{host}:{port}")
            page.get_by_text("Accept").click()
            page.get_by_text("Gelu", exact=True).click()
            page.get_by_text("NODE PROPERTIES").wait_for()
            shown = page.locator("#sidebar").inner_text()
            named = page.eval_on_selector_all("#sidebar input", "found => found.map((one) => one.value)")
    finally:
        netron.stop()
    assert {"glass.verdict", "glass.error_over_floor"} <= set(named)
    assert "wrong" in shown.splitlines() and "reverse replay" in shown
