"""Make reports of what is in `cases/`, and keep their first screens: report-*.png. `make pictures` runs this.

Each case is made as a user would make it. The result stands in the first screen at 1280 by 800 pixels, or this fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SCREEN = {"width": 1280, "height": 800}
NARROW = {"width": 400, "height": 800}
COLORS = 128

Case = Callable[[Any, str], None]


def _command(*words: str, status: int = 1) -> Case:
    def run(files: Any, directory: str) -> None:
        from glassengine.cli.main import main

        found = main([*words, "--report", directory, "-q", "--no-progress"])
        if found != status:
            raise SystemExit(f"exit status {found}, {status} expected: {' '.join(words)}")

    return run


def _onnx(files: Any, directory: str) -> None:
    files.write_onnx("mlp.onnx", "Relu")
    files.write_onnx("gelu.onnx", "Gelu")
    _command("check", "mlp.onnx", "--candidate", "gelu.onnx")(files, directory)


def _recordings(files: Any, directory: str) -> None:
    from glassengine.cli.main import main

    for factory in ("right", "wrong_eps"):
        main(["record", f"nets.py:{factory}", "--inputs", "nets.py:inputs", "-o", factory, "-q", "--no-progress"])
    _command("compare", "right", "wrong_eps")(files, directory)


def _ranks(files: Any, directory: str) -> None:
    files.write_ranks("one-rank", "two-ranks")
    _command("compare", "one-rank", "two-ranks")(files, directory)


def _replay(files: Any, directory: str) -> None:
    from glassengine.report.page.write import write_report

    write_report(files.replay_broken("snapshots"), directory)


def _series(files: Any, directory: str) -> None:
    import nets

    nets.watched("run")
    nets.watched("other-run", rate=0.3)
    _command("compare", "run", "other-run")(files, directory)


def _quantized(files: Any, directory: str) -> None:
    files.write_four_bits("four-bits", offset=1)
    _command("check", "examples/tiny-llama", "--candidate", "four-bits")(files, directory)


_TRAINING = ("--inputs", "nets.py:batches", "--loss", "nets.py:mean", "--optimizer", "nets.py:sgd")
CASES: dict[str, Case] = {
    "port": _command("check", "examples/tiny-llama", "--candidate", "examples/wrong_port.py:attention_scale"),
    "onnx": _onnx,
    "recordings": _recordings,
    "training": _command(
        "check-training", "nets.py:right", *_TRAINING, "--candidate-optimizer", "nets.py:sgd_with_momentum"
    ),
    "replay": _replay,
    "decode": _command("check", "nets.py:llama", "--candidate", "nets.py:wrong_when_decoding"),
    "ranks": _ranks,
    "nan": _command("check", "nets.py:right", "--candidate", "nets.py:makes_nan", "--inputs", "nets.py:inputs"),
    "quantized": _quantized,
    "ok": _command("check", "nets.py:right", "--backend", "eager", "--inputs", "nets.py:inputs", status=0),
    "series": _series,
}
"""Name -> what makes it."""


@contextlib.contextmanager
def _among_copies() -> Iterator[Any]:
    """Work in a directory that holds the cases and the example, so that names in the pictures are short."""
    folder = str(Path(tempfile.gettempdir(), "glass-reports"))
    # Of one name, which the pictures show.
    Path(folder).mkdir()
    try:
        for name in ("nets.py", "files.py"):
            shutil.copy(HERE / "cases" / name, folder)
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        with contextlib.chdir(folder):
            sys.path.insert(0, folder)
            import files

            yield files
    finally:
        shutil.rmtree(folder)


def _screenshot(page: Any, name: str) -> None:
    from PIL import Image

    file = HERE / f"report-{name}.png"
    page.screenshot(path=str(file))
    # The colors of the scale keep their values; those between a letter and its ground are drawn by the nearest one.
    palette = Image.new("P", (1, 1))
    with Image.open(file) as picture:
        known = sorted(picture.convert("RGB").getcolors(1 << 21), reverse=True)[:COLORS]
        palette.putpalette([part for _, color in known for part in color])
        small = picture.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def _opened(browser: Any, report: Path, size: dict[str, int], colors: str) -> Any:
    page = browser.new_context(viewport=size, color_scheme=colors).new_page()
    page.goto((report / "index.html").as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'yes' || !document.getElementById('index')")
    return page


def _require_first_screen(page: Any, name: str) -> None:
    """Fail where answer, code or hint do not end within the first screen."""
    for box in (one.bounding_box() for one in page.locator("h1, .sources pre, .hint").all()):
        if box is None or box["y"] + box["height"] > SCREEN["height"]:
            raise SystemExit(f"{name}: the answer is not on the first screen")


def main() -> None:
    """Make the reports that are named, or all, and their pictures."""
    sys.path.insert(0, str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.report.browser import chromium

    wanted = sys.argv[1:] or list(CASES)
    with _among_copies() as files, chromium() as browser:
        for name in wanted:
            CASES[name](files, name)
            page = _opened(browser, Path(name).resolve(), SCREEN, "light")
            _require_first_screen(page, name)
            _screenshot(page, name)
            if name == "port":
                _screenshot(_opened(browser, Path(name).resolve(), NARROW, "dark"), "port-narrow-dark")
            sys.stdout.write(f"-- {name}\n")


if __name__ == "__main__":
    main()
