"""A headless Chromium of this machine, driven by Playwright; a test skips with the reason where one is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
OPTIONS = ["--no-sandbox", "--disable-gpu"]  # as root in a container, without a screen
READY = "document.documentElement.dataset.ready === 'yes'"


def executable() -> str:
    """Return the browser of this machine, or skip the test."""
    pytest.importorskip("playwright", reason="Playwright is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine: `make browser` installs one where it may")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a window of its own; every message of the browser and every request that it makes is kept."""

    def __init__(
        self, browser: Any, folder: Path, *, width: int = 1280, height: int = 800, scheme: str = "light", at: str = ""
    ) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{(folder / 'index.html').as_uri()}{at}")

    def ready(self) -> Any:
        """Wait until all data are shown, and return Playwright's page."""
        self.page.wait_for_function(READY, timeout=30_000)
        return self.page

    def close(self) -> None:
        """Close the window."""
        self.context.close()
