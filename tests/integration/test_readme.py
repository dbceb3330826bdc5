"""The first ten minutes of README and quickstart, on the demo pair as it is served."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.running import RunningService

ROOT = Path(__file__).resolve().parents[2]
README, QUICKSTART = ((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md"))


def on(service: RunningService, text: str) -> str:
    return text.replace("http://127.0.0.1:8000", service.url)


@pytest.mark.parametrize("text", [README, QUICKSTART], ids=["README", "quickstart"])
def test_the_curl_command_gives_the_answer_that_is_shown(service: RunningService, text: str) -> None:
    (command,) = re.findall(r"^ {4}(curl .*?\"})'$", text, flags=re.MULTILINE | re.DOTALL)
    shown = re.search(r"The answer's text is\n\n((?: {4}.*\n)+)", text)
    assert shown is not None
    ran = subprocess.run(["bash", "-c", on(service, command) + "'"], capture_output=True, text=True, timeout=60)
    answer = json.loads(ran.stdout)["choices"][0]["text"]
    assert answer.splitlines() == [line.removeprefix("    ") for line in shown[1].splitlines()]


def test_the_python_example_streams_text(service: RunningService) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", QUICKSTART, flags=re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(on(service, example), "quickstart.md", "exec"), {})
    assert "as f:" in printed.getvalue()
