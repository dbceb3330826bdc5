"""One service for all tests that leave it as they found it, and seeded streams on whatever service a test has."""

from collections.abc import Iterator

import pytest

from tests.integration.kills import Stream, Streams
from tests.integration.launched import start_fixture  # noqa: F401
from tests.integration.poison import start
from tests.integration.running import RunningService


@pytest.fixture(scope="package")
def service() -> Iterator[RunningService]:
    """The demo pair with drafts in any case, nobody let wait for a place, and a hook that acts where it is asked to."""
    limits = ("--limits-max-concurrent-requests", "64", "--limits-max-queued-requests", "0")
    running = start(*limits)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def streams(service: RunningService) -> Streams:
    """Seeded streams, not started."""
    return Streams(service.url, service.model, count=8, max_tokens=300)


@pytest.fixture(scope="module")
def undisturbed(streams: Streams) -> list[Stream]:
    """What becomes of them when nothing happens."""
    with streams.running() as wait:
        return wait()
