"""One service for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.integration.running import RunningService


@pytest.fixture(scope="package")
def service() -> Iterator[RunningService]:
    """The demo pair as ``make serve`` starts it, but with drafts in any case, and with nobody let wait for a place."""
    limits = ("--limits-max-concurrent-requests", "64", "--limits-max-queued-requests", "0")
    running = RunningService("--num-speculative-tokens", "4", *limits)
    yield running
    assert running.stop() == 0
