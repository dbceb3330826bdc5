"""A poisonous request ends with an error; the streams beside it are those of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.integration.kills import Stream, Streams
from tests.integration.poison import KINDS, poison
from tests.integration.running import RunningService

MAX_REOPENS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_poisonous_request_ends_alone(
    service: RunningService, streams: Streams, undisturbed: list[Stream], kind: str
) -> None:
    outcome = poison(service, streams, undisturbed, kind)
    assert outcome.status == 500
    assert outcome.error["message"]
    assert outcome.compared is not None
    assert not outcome.compared.broken
    assert outcome.compared.is_exact
    if kind == "die":
        assert 1 <= outcome.deaths["target"] <= MAX_REOPENS
    else:
        assert not any(outcome.deaths.values()), outcome.deaths
