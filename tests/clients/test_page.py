"""The page ``/ui`` in a browser, over the service as ``make serve`` starts it; behind ``make test-clients``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.fuzz import PROGRAMS
from tests.integration.running import RunningService

pytestmark = pytest.mark.timeout(900)
BROWSE = Path(__file__).with_name("browse.py")
KEY = "a-key-of-some-length"
NUM_TOKENS = 400
"""Asked for by ``browse.py``, and long enough to look at what comes while it comes."""


def browse(*flags: str, key: str, folder: Path) -> tuple[RunningService, dict[str, Any]]:
    """Start a service, go to its page, and end it; gives what was seen."""
    service = RunningService(*flags)
    assert any(f"{service.url}/ui" in line for line in service.lines)
    command = [PROGRAMS / "python", BROWSE, service.url, key, folder]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert service.stop() == 0
    assert ran.returncode == 0, ran.stderr
    return service, json.loads(ran.stdout)


def test_without_keys_nobody_is_asked_for_one(tmp_path: Path) -> None:
    _service, seen = browse(key="", folder=tmp_path)
    assert not seen["asks_for_a_key"]
    assert seen["verdict"].startswith("The texts are the same. ")
    assert seen["stopped"].startswith("Stopped after ")
    assert [line for line in seen["console"] if "400" not in line] == []


def test_a_person_sees_how_an_answer_comes_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_API_KEYS", f"me={KEY}")
    service, seen = browse("--num-speculative-tokens", "4", key=KEY, folder=tmp_path)
    # The key.
    without, wrong = seen["keys"]
    assert without == "This service asks for an API key."
    assert wrong.startswith("This key is refused")
    assert not seen["asks_for_a_key"]
    # Both answers, and what is said of them.
    assert seen["model"].startswith("specdec-demo")
    assert seen["verdict"].startswith("The texts are the same. ")
    assert seen["texts"][0] == seen["texts"][1] != ""
    assert sum(seen["tokens"].values()) == sum(seen["plain_tokens"].values()) <= NUM_TOKENS
    assert seen["tokens"]["a"] > 0 < seen["tokens"]["c"]
    assert seen["plain_tokens"]["p"] == sum(seen["plain_tokens"].values())
    assert 0 < len(seen["during"]) < len(seen["texts"][0])
    num_rounds, num_draft_steps, num_pictures = seen["lanes"]
    assert num_rounds > 1 < num_draft_steps
    assert num_pictures == 3
    assert "draft steps of" in seen["said"]
    assert all("the target gave it" in tip for tip in seen["tip"]), seen["tip"]
    assert seen["tip"][0].startswith("2: ")
    assert "plain" in seen["tip"][1]
    # Stopping, and what the service refuses.
    assert seen["stopped"].startswith("Stopped after ")
    assert "max_tokens" in seen["error"]
    # Nothing is asked of anybody else, nothing is refused by the browser, and everybody can use it.
    assert {url for url in seen["requests"] if not url.startswith((f"{service.url}/", "data:"))} == set()
    assert [line for line in seen["console"] if "401" not in line and "400" not in line] == []
    assert seen["axe_key_form"] == seen["axe_light"] == seen["axe_dark"] == []
    assert seen["overflow"] <= 0
