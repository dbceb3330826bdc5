"""Updates under seeded streams and new requests: none is broken, none is changed, and who is turned away is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def under(*update: str, module: str = "updates") -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.integration.{module}", *update]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(600)
def test_a_rolling_update_breaks_no_stream_and_loses_no_request() -> None:
    outcome = under("same")
    assert not any(outcome[what] for what in ("broken", "lost", "doubled", "changed")), outcome
    assert outcome["statuses"]
    assert None not in outcome["statuses"], "a connection was refused or cut"
    assert set(outcome["statuses"]) <= {200, 503}


@pytest.mark.timeout(600)
def test_an_update_to_another_model_changes_no_answer_that_was_begun() -> None:
    outcome = under("other", "--max-tokens", "1200")
    assert outcome["has_outlived"], "the streams had ended before the new version served"
    assert not any(outcome[what] for what in ("broken", "lost", "doubled", "changed")), outcome
    assert set(outcome["statuses"]) <= {200, 404, 503}


@pytest.mark.timeout(600)
def test_a_target_that_is_quantized_anew_loses_no_stream() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")
    outcome = under("quantized")
    assert not any(outcome[what] for what in ("lost", "doubled", "changed")), outcome
    assert not outcome["broken"], outcome["errors"]
    assert outcome["is_other"], "the fingerprint is as it was"
    assert outcome["num_with_adapter"] == 10, "what was loaded is forgotten"
    assert set(outcome["statuses"]) <= {200, 503}


def failed(what: str, mode: str) -> dict[str, Any]:
    outcome = under(what, mode, module="failed_updates")
    assert not any(outcome[what] for what in ("broken", "lost", "doubled", "changed")), outcome
    assert outcome["is_as_expected"], outcome["health"]
    assert outcome["num_broken"] == 0, "a connection was refused or cut"
    assert outcome["after"] == 200, "the version before is not back"
    return outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("what", "state"), [("unloadable", "failed"), ("no_place", "late")])
def test_under_surge_an_update_that_cannot_succeed_turns_nobody_away(what: str, state: str) -> None:
    outcome = failed(what, "surge")
    assert outcome["statuses"] == ["200"], outcome
    assert outcome["num_answered"] > 20
    code, told = outcome["health"]
    assert (code, told["status"], told["update"]["status"]) == (200, "ready", state)
    assert "TargetServer" in told["update"]["waiting_for"]


@pytest.mark.timeout(600)
def test_under_replace_streams_end_and_new_requests_are_told_to_come_again() -> None:
    outcome = failed("unloadable", "replace")
    assert set(outcome["statuses"]) == {"200", "503"}, outcome
    assert outcome["all_may_retry"]
    assert outcome["health"][1]["update"]["status"] == "failed"
