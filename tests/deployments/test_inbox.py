"""News of open sequences: how much at once, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from deployments import requests
from deployments.inbox import Inbox
from deployments.openai.service import ModelInfo, SequenceRequest, ServedModel, TokenDelta
from deployments.requests import RoutedTokens
from deployments.transport.host import LoopHost
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.messages import Notes, Plan
from specdec.sampling.params import SamplingParams, SequenceSpec

NEVER_S = 1e6
INFO = ModelInfo(ServedModel("demo", "target", 128, 4096))


def delta(*tokens: int, plan: Plan | None = None) -> TokenDelta:
    return TokenDelta(tokens, Notes("p" * len(tokens), (0,) * len(tokens)), None, plan)


async def waiting(inbox: Inbox) -> asyncio.Task[TokenDelta]:
    """A reader that has done whatever it can do without time."""
    task = asyncio.create_task(inbox.take())
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_what_comes_first_is_given_at_once() -> None:
    inbox = Inbox(lambda: NEVER_S)
    task = await waiting(inbox)
    assert not task.done()
    inbox.put(delta(1))
    assert await task == delta(1)


async def test_what_comes_during_the_pause_is_given_in_one_with_the_end() -> None:
    inbox = Inbox(lambda: NEVER_S)
    inbox.put(delta(1))
    await inbox.take()
    inbox.put(delta(2, 3, plan=Plan(4)))
    task = await waiting(inbox)
    inbox.put(delta(4))
    await asyncio.sleep(0)
    assert not task.done()
    inbox.put(TokenDelta((5,), Notes("a", (2,)), "length"))
    assert await task == TokenDelta((2, 3, 4, 5), Notes("pppa", (0, 0, 0, 2)), "length", Plan(4))


async def test_the_end_does_not_wait_where_it_was_there_before_the_reader() -> None:
    inbox = Inbox(lambda: NEVER_S)
    inbox.put(delta(1))
    await inbox.take()
    inbox.put(delta(2))
    inbox.put(TokenDelta(finish="stop"))
    assert (await (await waiting(inbox))).finish == "stop"


async def test_a_pause_ends() -> None:
    inbox = Inbox(lambda: 0.01)
    inbox.put(delta(1))
    await inbox.take()
    inbox.put(delta(2))
    inbox.put(delta(3))
    assert await inbox.take() == delta(2, 3)


async def test_without_a_pause_everything_is_given_as_it_comes() -> None:
    inbox = Inbox(lambda: 0.0)
    for token in range(3):
        task = await waiting(inbox)
        assert not task.done()
        inbox.put(delta(token))
        assert await task == delta(token)


async def test_a_reader_that_is_cancelled_takes_nothing_along() -> None:
    inbox = Inbox(lambda: NEVER_S)
    inbox.put(delta(1))
    await inbox.take()
    inbox.put(delta(2))
    task = await waiting(inbox)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    inbox.put(TokenDelta((3,), Notes("p", (0,)), "length"))
    assert (await inbox.take()).tokens == (2, 3)


class Told:
    """Stands for the host of an ingress, which is told of requests and does nothing."""

    def tell(self, action: Callable[[IngressMachine, float], None]) -> None:
        pass


@pytest.mark.parametrize(("rate", "pauses"), [(100.0, [0.01, 0.02, 0.03]), (10.0, [0.1, 0.2, 0.25])])
async def test_all_sequences_together_keep_to_the_rate_but_none_waits_long(
    monkeypatch: pytest.MonkeyPatch, rate: float, pauses: list[float]
) -> None:
    asked: list[Callable[[], float]] = []

    class Noted(Inbox):
        def __init__(self, pause_s: Callable[[], float]) -> None:
            super().__init__(pause_s)
            asked.append(pause_s)

    async def no_figures() -> bytes:
        return b""

    monkeypatch.setattr(requests, "Inbox", Noted)
    tokens = RoutedTokens(INFO, no_figures, 8, rate)
    tokens.connect(cast(LoopHost[IngressMachine], Told()), lambda: True)
    spec = SequenceSpec(SamplingParams(), 0, 1, 8)
    opened = []
    for i, pause_s in enumerate(pauses):
        opened.append(tokens.open(SequenceRequest(f"s{i}", (1,), spec)))
        assert await anext(opened[-1]) == TokenDelta()
        assert [one() for one in asked] == pytest.approx([pause_s] * (i + 1))
    await opened.pop().aclose()
    assert asked[0]() == pytest.approx(pauses[1])
