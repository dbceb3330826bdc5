"""A whole node and the GCS die under seeded streams: no stream breaks or changes, and the service goes on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.cluster_deaths import EVENTS


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("event", EVENTS)
def test_a_death_in_the_cluster_changes_no_stream(event: str) -> None:
    command = [sys.executable, "-m", "tests.integration.cluster_deaths", event]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    compared = json.loads(done.stdout.splitlines()[-1])
    assert not any(compared[what] for what in ("broken", "lost", "doubled", "changed")), compared
    assert compared["num_tokens"] > 0
