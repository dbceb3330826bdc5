"""One service for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.integration.running import RunningService


@pytest.fixture(scope="package")
def service() -> Iterator[RunningService]:
    """The demo pair, started as ``make serve`` starts it, but with drafts whatever the controller thinks of them."""
    running = RunningService("--num-speculative-tokens", "4")
    yield running
    assert running.stop() == 0
