"""The ingress' end of the service: what it gives at once, errors, failure and drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.http.service import ModelInfo, SequenceRequest, ServedModel
from deployments.tokens import Inbox, RoutedTokens
from deployments.transport.host import LoopHost
from specdec.core.errors import SequenceFailedError, ServiceUnavailableError
from specdec.core.log import TokenLog
from specdec.core.messages import End, NewTokens, Notes, Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.protocol.ingress import MODEL_REPLACED, IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from tests.letters import provenance

INFO = ModelInfo(ServedModel("demo", 128, 4096))


class Ingress:
    """A real machine on its host; the test is its router."""

    def __init__(self) -> None:
        self.tokens = RoutedTokens(INFO)
        self.host = LoopHost(IngressMachine("I", Times()), after=self.tokens.deliver)
        self.tokens.connect(self.host, lambda: True)
        self.host.start()
        self.host.attach("R")
        self.host.tell(lambda machine, now_s: machine.router_joined("R", now_s))

    def open(self, seq: str) -> AsyncGenerator[TokenDelta]:
        return self.tokens.open(SequenceRequest(seq, SharedTokens((1,)), SequenceSpec(SamplingParams(), 0, 1, 8)))

    def says(self, seq: str, tokens: tuple[int, ...], finish: str, reason: str = "") -> None:
        prefix_hash = TokenLog([1, *tokens]).prefix_hash()
        notes = Notes(provenance("p" * len(tokens)), (0,) * len(tokens))
        self.host.post([NewTokens(seq, 1, 1, tokens, notes, prefix_hash), End(seq, 1, prefix_hash, finish, reason)])


@pytest.fixture
async def ingress() -> AsyncGenerator[Ingress]:
    ingress = Ingress()
    yield ingress
    ingress.host.stop()


async def started(one: AsyncGenerator[TokenDelta]) -> asyncio.Task[TokenDelta]:
    task = asyncio.ensure_future(anext(one))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(("reason", "is_passing"), [("a hook raised", False), (MODEL_REPLACED, True)])
async def test_a_sequence_that_ends_with_an_error_gives_its_tokens_first(
    ingress: Ingress, reason: str, is_passing: bool
) -> None:
    one = ingress.open("s")
    first = await started(one)
    ingress.says("s", (5, 6), "error", reason)
    assert (await first).tokens == (5, 6)
    with pytest.raises(SequenceFailedError, match=reason) as caught:
        await anext(one)
    assert caught.value.is_passing == is_passing


async def test_nothing_is_said_before_a_worker_has_begun(ingress: Ingress) -> None:
    one = ingress.open("s")
    first = await started(one)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not first.done()
    ingress.says("s", (5,), "stop")
    assert (await first).tokens == (5,)


async def test_a_machine_that_raises_ends_all_and_takes_no_more(ingress: Ingress) -> None:
    streams = [ingress.open(f"s{i}") for i in range(3)]
    waiting = [await started(stream) for stream in streams]
    ingress.host.tell(lambda machine, now_s: machine.no_such_method())
    async with asyncio.timeout(10):
        for task in waiting:
            with pytest.raises(SequenceFailedError, match="failed"):
                await task
        with pytest.raises(ServiceUnavailableError, match="failed"):
            await anext(ingress.open("late"))


async def test_drain_refuses_what_is_new_and_lets_the_others_end(ingress: Ingress) -> None:
    one = ingress.open("s")
    first = await started(one)
    assert ingress.tokens.state() == ""
    ingress.tokens.drain()
    assert ingress.tokens.state() == "this ingress drains: it takes no new requests; 1 still run"
    with pytest.raises(ServiceUnavailableError, match="drains"):
        await anext(ingress.open("late"))
    ingress.says("s", (5,), "stop")
    assert (await first).finish == "stop"
    await one.aclose()
    assert ingress.tokens.num_open == 0


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
