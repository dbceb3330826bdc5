"""News of open sequences: how much at once."""

from __future__ import annotations

import asyncio

from deployments.tokens import Inbox
from specdec.core.messages import Notes, Plan
from specdec.protocol.ingress import TokenDelta
from tests.letters import provenance


def delta(*tokens: int, plan: Plan | None = None) -> TokenDelta:
    return TokenDelta(tokens, Notes(provenance("p" * len(tokens)), (0,) * len(tokens)), None, plan)


async def waiting(inbox: Inbox) -> asyncio.Task[TokenDelta]:
    """A reader that has done whatever it can do without time."""
    task = asyncio.create_task(inbox.take())
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_everything_is_given_as_it_comes() -> None:
    inbox = Inbox()
    for token in range(3):
        task = await waiting(inbox)
        assert not task.done()
        inbox.put(delta(token))
        assert await task == delta(token)


async def test_what_has_piled_up_is_given_in_one() -> None:
    inbox = Inbox()
    inbox.put(delta(1))
    assert await inbox.take() == delta(1)
    inbox.put(delta(2, 3, plan=Plan(4)))
    inbox.put(delta(4))
    inbox.put(TokenDelta((5,), Notes(provenance("a"), (2,)), "length"))
    assert await inbox.take() == TokenDelta((2, 3, 4, 5), Notes(provenance("pppa"), (0, 0, 0, 2)), "length", Plan(4))


async def test_a_reader_that_is_cancelled_takes_nothing_along() -> None:
    inbox = Inbox()
    task = await waiting(inbox)
    task.cancel()
    inbox.put(delta(2))
    await asyncio.gather(task, return_exceptions=True)
    inbox.put(TokenDelta((3,), Notes(provenance("p"), (0,)), "length"))
    assert (await inbox.take()).tokens == (2, 3)
