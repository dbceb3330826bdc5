"""One link: a worker that dials and a router that answers, over a carrier within this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from deployments.transport.host import LoopHost, Mailbox
from deployments.transport.link import Answerer, Dialer, carry, spawn
from deployments.transport.wire import (
    WIRE_VERSION,
    Frame,
    Greeting,
    Hello,
    LinkError,
    LinkRefusedError,
    LinkTimes,
    OtherModelError,
    decode,
    encode,
)
from specdec.core.types import Fingerprints
from tests.deployments.transport.nodes import Inbox, MemoryChannel, MemoryTransport, ended, words
from tests.waiting import eventually

TIMES = LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, peer_timeout_s=60.0)


class Ends:
    """The two ends, the link between them, and what they were told of it."""

    def __init__(self, times: LinkTimes = TIMES, mine: Fingerprints | None = None) -> None:
        self.worker, self.router = LoopHost(Inbox(), tick_s=60.0), LoopHost(Inbox(), tick_s=60.0)
        self.refusal, self.events = "", []
        self.answerer = Answerer(
            "r",
            Fingerprints("d", "v"),
            self.router,
            lambda _hello: self.refusal,
            lambda hello: self.events.append(("joined", hello.caller)),
            lambda hello: self.events.append(("lost", hello.caller)),
            times,
        )
        self.transport = MemoryTransport({"r": self.answerer})
        self.dialer = Dialer(
            "w", "Target", "mine", mine or Fingerprints(), "decision", self.worker, self.transport, times
        )
        self.ups = 0

    def dial(self) -> asyncio.Task[None]:
        def up() -> None:
            self.ups += 1

        link = spawn(self.dialer.dial("r", up))
        link.add_done_callback(lambda done: done.cancelled() or done.exception())  # not every test asks for its end
        return link

    async def linked(self) -> asyncio.Task[None]:
        ups, events, link = self.ups, len(self.events), self.dial()
        await eventually(lambda: (self.ups > ups and len(self.events) > events) or link.done())
        assert not link.done(), link.exception()
        return link


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    for host in (ends.worker, ends.router):
        host.start()
    yield ends
    for host in (ends.worker, ends.router):
        host.stop()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_batches_travel_both_ways_in_order(ends: Ends) -> None:
    link = await ends.linked()
    ends.worker.tell(lambda m, _now_s: m.say("r", words(*range(100))))
    ends.router.tell(lambda m, _now_s: m.say("w", words("a", "b")))
    await eventually(lambda: len(ends.router._machine.got) == 100 and len(ends.worker._machine.got) == 2)
    assert ends.router._machine.got == list(words(*range(100)))
    assert ends.worker._machine.got == list(words("a", "b"))
    assert not link.done()


@pytest.mark.parametrize("side", ["router", "worker"])
async def test_either_sides_end_ends_the_link_on_both(ends: Ends, side: str) -> None:
    link = await ends.linked()
    getattr(ends, side).unlink_all()
    assert isinstance(await ended(link), LinkError)
    await eventually(lambda: not ends.worker._mailboxes and not ends.router._mailboxes)
    assert ends.events == [("joined", "w"), ("lost", "w")]


async def test_a_cut_link_leaves_nothing_behind(ends: Ends) -> None:
    link = await ends.linked()
    link.cancel()
    await eventually(lambda: link.done() and ends.events[-1:] == [("lost", "w")])
    assert not ends.worker._mailboxes
    assert not ends.router._mailboxes


async def test_a_refusal_is_told_and_links_nothing(ends: Ends) -> None:
    ends.refusal = "the replica is draining"
    error = await ended(ends.dial())
    assert isinstance(error, LinkRefusedError)
    assert "draining" in str(error)
    assert (ends.ups, ends.events) == (0, [])


async def test_whose_machine_has_failed_dials_nobody(ends: Ends) -> None:
    ends.worker._fail(ValueError("poisoned"))
    assert str(await ended(ends.dial())) == "the replica has failed"
    assert not ends.transport.channels


async def test_a_callee_of_another_model_is_not_worked_with(ends: Ends) -> None:
    other = Ends(mine=Fingerprints("another", "v"))
    error = await ended(other.dial())
    assert isinstance(error, OtherModelError)
    assert "decision fingerprint is d, here it is another" in str(error)
    assert other.ups == 0


async def test_a_callee_of_another_wire_version_is_not_worked_with(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(frame: Frame) -> bytes:
        return encode(replace(frame, wire=WIRE_VERSION + 1) if isinstance(frame, Greeting) else frame)

    monkeypatch.setattr("deployments.transport.link.encode", encoded)
    error = await ended(ends.dial())
    assert isinstance(error, OtherModelError)
    assert f"its wire version is {WIRE_VERSION + 1}, here it is {WIRE_VERSION}" in str(error)
    assert ends.ups == 0


async def test_another_replica_in_place_of_the_callee_is_not_worked_with(ends: Ends) -> None:
    ends.transport.answerers["gone"] = ends.answerer
    error = await ended(spawn(ends.dialer.dial("gone", lambda: None)))
    assert isinstance(error, LinkRefusedError)
    assert "r answered in place of gone" in str(error)


@pytest.mark.parametrize("deaf", ["caller", "callee"])
async def test_silence_ends_a_link_on_both_sides(deaf: str) -> None:
    ends = Ends(LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, peer_timeout_s=0.2))
    link = await ends.linked()
    [channel] = ends.transport.channels
    (channel.other if deaf == "caller" else channel).is_cut = True
    await ended(link)
    await eventually(lambda: ends.events[-1:] == [("lost", "w")])


async def test_heartbeats_keep_an_idle_link() -> None:
    ends = Ends(LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, peer_timeout_s=1.0))
    link = await ends.linked()
    await asyncio.sleep(1.5)
    assert not link.done()
    link.cancel()


async def test_a_link_that_is_dialled_anew_takes_the_place_of_the_old_one(ends: Ends) -> None:
    """The end of the old one must not be told after the start of the new one."""
    old = await ends.linked()
    [channel] = ends.transport.channels
    channel.is_cut = channel.other.is_cut = True
    new = ends.dial()
    await eventually(lambda: len(ends.events) == 3)
    assert ends.events == [("joined", "w"), ("lost", "w"), ("joined", "w")]
    ends.router.tell(lambda m, _now_s: m.say("w", words("up")))
    await eventually(lambda: ends.worker._machine.got == list(words("up")))
    old.cancel()
    await asyncio.sleep(0.02)
    assert not new.done()
    assert len(ends.events) == 3


@pytest.mark.parametrize("to", ["router", "worker"])
async def test_what_cannot_be_decoded_ends_the_link(ends: Ends, to: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ray.serve")
    link = await ends.linked()
    [channel] = ends.transport.channels
    await (channel if to == "router" else channel.other).send(b"\x80\x04garbage")
    error = await ended(link)
    await eventually(lambda: ends.events[-1:] == [("lost", "w")])
    assert "undecodable frame" in (caplog.text if to == "router" else str(error))


async def test_the_first_frame_must_be_a_hello(ends: Ends) -> None:
    mine, theirs = MemoryChannel(), MemoryChannel()
    mine.other, theirs.other = theirs, mine
    await mine.send(encode(Greeting("w")))
    await ends.answerer.answer(theirs)
    assert theirs.is_closed
    assert ends.events == []


async def test_a_callee_that_never_greets_is_given_up(ends: Ends) -> None:
    opened: list[MemoryChannel] = []

    async def deaf(hello: Hello) -> MemoryChannel:
        channel = MemoryChannel()
        channel.other = MemoryChannel()
        opened.append(channel)
        return channel

    ends.dialer._times = LinkTimes(open_timeout_s=0.05)
    ends.dialer._open_channel = deaf
    assert str(await ended(ends.dial())) == "r is silent"
    assert [channel.is_closed for channel in opened] == [True]


async def test_the_half_that_still_runs_is_awaited_when_the_other_ends() -> None:
    order: list[str] = []

    class Slow(MemoryChannel):
        async def send(self, frame: bytes) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                order.append("the writer has cleaned up")

        async def receive(self) -> bytes:
            await asyncio.sleep(0.02)
            raise LinkError("broken")

    box = Mailbox()
    box.put(words("a"))
    with pytest.raises(LinkError, match="broken"):
        await carry(Slow(), "peer", LoopHost(Inbox()), box, TIMES)
    order.append("the link has ended")
    assert order == ["the writer has cleaned up", "the link has ended"]


async def test_a_greeting_tells_who_the_callee_is(ends: Ends) -> None:
    channel = await ends.transport(Hello("w", "r", "Target", wire=WIRE_VERSION))
    assert decode(await channel.receive(), Greeting) == Greeting("r", Fingerprints("d", "v"), wire=WIRE_VERSION)
    channel.close()
