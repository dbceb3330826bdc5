"""A service that is told to stop under streams: they end, new requests are refused, and nothing is left."""

from __future__ import annotations

from tests.integration.drains import Refusal, under_sigterm
from tests.integration.kills import Streams, start


def test_sigterm_under_eight_streams_breaks_none_and_refuses_the_next() -> None:
    service = start(replicas=1)
    streams = Streams(service.url, service.model, count=8, max_tokens=600)
    drained = under_sigterm(service, streams)
    assert not drained.compared.broken
    assert drained.compared.is_exact
    assert drained.told, "the streams had ended before anything was asked"
    assert set(drained.told) == {Refusal(503, "1", "service_unavailable")}
    assert drained.exit_code == 0
