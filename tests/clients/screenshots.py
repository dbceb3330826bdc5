"""The screenshots of docs/images, by a headless Chromium: ``make screenshots``, beside ``make serve``.

``screenshots.py FOLDER URL``: the page ``/ui`` in light, dark, and as wide as a phone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE_MS = 300_000
POLL_MS = 50
NUM_TOKENS = 160


def main(folder: Path, url: str) -> None:
    """Ask for one answer with and without speculation, and take it in each color and width."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=WIDE, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{url}/ui")
        page.fill("#max-tokens", str(NUM_TOKENS))
        _until_enabled(page, "#run")
        page.click("#run")
        _until_enabled(page, "#run")
        page.screenshot(path=folder / "ui.png")
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / "ui-dark.png")
        page.set_viewport_size(PHONE)
        page.evaluate("document.querySelector('#results').scrollIntoView()")
        page.screenshot(path=folder / "ui-phone.png")
        browser.close()


def _until_enabled(page: Page, button: str) -> None:
    """Playwright's own way to wait for a condition is an ``eval``, which the page forbids."""
    for _ in range(PATIENCE_MS // POLL_MS):
        if page.is_enabled(button):
            return
        page.wait_for_timeout(POLL_MS)
    raise TimeoutError(f"{button} stays disabled")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
