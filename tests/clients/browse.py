"""What a person sees on ``/ui``, by a headless Chromium; prints a report as JSON.

Run by ``tests/clients/test_page.py`` in the environment of other people's programs: ``browse.py URL KEY FOLDER``.
Screenshots go into the folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

PATIENCE_MS = 120_000
POLL_MS = 20
NUM_TOKENS = 400
SIZE = {"width": 1280, "height": 960}


def main(url: str, key: str, folder: Path) -> dict[str, Any]:
    """Ask for an answer as a person would: with no key, a wrong one, the right one; run, look, stop.

    An empty key is for a service without keys, whose page must not ask for one.
    """
    report: dict[str, Any] = {"console": [], "requests": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: report["console"].append(message.text))
        page.on("pageerror", lambda error: report["console"].append(str(error)))
        page.on("request", lambda request: report["requests"].append(request.url))
        page.goto(f"{url}/ui")
        if key:
            report["keys"] = _give_keys(page, key)
            report["axe_key_form"] = _serious(page)
            page.click("#access button")
            page.wait_for_selector("#access", state="hidden")
        _until(page, lambda: not page.inner_text("#model").startswith("Looking"))
        report["asks_for_a_key"] = page.is_visible("#access")
        report["model"] = page.inner_text("#model")
        page.fill("#max-tokens", str(NUM_TOKENS))
        page.click("#run")
        report["lanes"] = _watch_lanes(page)
        page.screenshot(path=folder / "light.png")
        report["during"] = page.inner_text("#spec")
        _wait_for_end(page)
        report["verdict"] = page.inner_text("#verdict")
        report["texts"] = [page.inner_text("#spec"), page.inner_text("#plain")]
        report["tokens"] = {kind: page.locator(f"#spec .t.{kind}").count() for kind in "acbp"}
        report["plain_tokens"] = {kind: page.locator(f"#plain .t.{kind}").count() for kind in "acbp"}
        report["said"] = page.inner_text("#lanes-said")
        report["tip"] = _walk(page)
        report["axe_light"] = _serious(page)
        page.screenshot(path=folder / "light-done.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        report["axe_dark"] = _serious(page)
        page.screenshot(path=folder / "dark-done.png", full_page=True)
        page.click("#run")
        page.wait_for_selector("#spec .t:nth-child(30)")
        page.screenshot(path=folder / "dark.png")
        page.click("#stop")
        _wait_for_end(page)
        report["stopped"] = page.inner_text("#verdict")
        page.fill("#max-tokens", "100000000")
        page.click("#run")
        _wait_for_end(page)
        report["error"] = page.inner_text("#error")
        page.set_viewport_size({"width": 390, "height": 800})
        report["overflow"] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        page.screenshot(path=folder / "narrow.png", full_page=True)
        browser.close()
    return report


def _give_keys(page: Page, key: str) -> list[str]:
    """What the form says without a key, and what with a wrong one; then the right one is given."""
    page.wait_for_selector("#access-why:not(:empty)")
    said = [page.inner_text("#access-why")]
    page.fill("#key", "wrong")
    page.click("#access button")
    _until(page, lambda: page.inner_text("#access-why") != said[0])
    said.append(page.inner_text("#access-why"))
    page.fill("#key", key)
    return said


def _wait_for_end(page: Page) -> None:
    _until(page, lambda: page.is_enabled("#run"))


def _until(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for something that must happen; Playwright's own way is an ``eval``, which the page forbids."""
    for _ in range(PATIENCE_MS // POLL_MS):
        if condition():
            return
        page.wait_for_timeout(POLL_MS)
    raise TimeoutError("what must happen does not")


def _watch_lanes(page: Page) -> list[int]:
    """Bars of the target and of the draft while the answer comes, and how many pictures of them differed."""
    page.wait_for_selector("#spec .t:nth-child(30)")
    pictures: list[str] = []
    for _ in range(3):
        _until(page, lambda: page.inner_html("#timeline") not in pictures)
        pictures.append(page.inner_html("#timeline"))
    counts = [page.locator(f"#timeline rect[class^={kind}]").count() for kind in ("round", "draft")]
    return [*counts, len(pictures)]


def _walk(page: Page) -> list[str]:
    """What the tip says at the second token, reached by keys, and at one that is pointed at."""
    page.focus("#spec")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    said = [page.inner_text("#tip")]
    page.keyboard.press("Escape")
    page.hover("#plain .t:nth-child(3)")
    said.append(page.inner_text("#tip"))
    page.mouse.move(0, 0)
    return said


def _serious(page: Page) -> list[str]:
    """What axe finds that is serious or worse."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
