"""One service for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.integration.poison import start
from tests.integration.running import RunningService


@pytest.fixture(scope="package")
def service() -> Iterator[RunningService]:
    """The demo pair with drafts in any case, nobody let wait for a place, and a hook that acts where it is asked to."""
    limits = ("--limits-max-concurrent-requests", "64", "--limits-max-queued-requests", "0")
    running = start(*limits)
    yield running
    assert running.stop() == 0
