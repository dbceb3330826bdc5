"""A rolling update under seeded streams: none is broken, none is changed, and no new request is turned away."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def under(update: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.updates", update]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rolling_update_breaks_no_stream_and_loses_no_request() -> None:
    outcome = under("same")
    assert not any(outcome[what] for what in ("broken", "lost", "doubled", "changed")), outcome
    assert outcome["statuses"]
    assert None not in outcome["statuses"], "a connection was refused or cut"
    assert set(outcome["statuses"]) <= {200, 503}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_update_to_another_model_changes_no_answer_that_was_begun() -> None:
    outcome = under("other")
    assert not any(outcome[what] for what in ("lost", "doubled", "changed")), outcome
    assert set(outcome["statuses"]) <= {200, 404, 503}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_target_that_is_quantized_anew_loses_no_stream() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")
    outcome = under("quantized")
    assert not any(outcome[what] for what in ("lost", "doubled", "changed")), outcome
    assert not outcome["broken"], outcome["errors"]
    assert outcome["is_other"], "the fingerprint is as it was"
    assert outcome["num_with_adapter"] == 10, "what was loaded is forgotten"
    assert set(outcome["statuses"]) <= {200, 503}
