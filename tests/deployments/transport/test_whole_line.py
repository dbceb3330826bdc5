"""An ingress, a router, a target and a drafter in one process, joined by real links."""

from __future__ import annotations

import asyncio

import pytest

from specdec.core.types import Fingerprints
from tests.deployments.transport.line import NUM_TOKENS, SCRIPT, Line
from tests.waiting import eventually


async def test_streams_of_tokens_are_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    await eventually(lambda: {kind for kind, _ in line.routers.worker_metrics().values()} == {"target", "drafter"})
    await eventually(lambda: bool(line.ingress.linked_peers()))
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(line.generate(seed) for seed in range(4)))
    wanted = [tuple(SCRIPT.true_token(seed, 3 + place) for place in range(NUM_TOKENS)) for seed in range(4)]
    assert found == wanted
    assert line.num_accepted > 0, "drafts have come, and were used"
    await line.close()


async def test_a_target_of_another_model_is_given_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(monkeypatch, target=Fingerprints("another", "v"))
    await eventually(lambda: "here it is another" in caplog.text)
    await asyncio.sleep(0.5)
    assert caplog.text.count("here it is another") == 1
    assert "t" not in line.routers.worker_metrics()
    await line.close()
