"""The book of requests: what is taken in at once, who waits, and who goes first."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.config.limits import Limits
from deployments.http.admission import Admission, Reservation
from deployments.http.errors import ApiError
from tests.deployments.http.conftest import limits


async def waiting(reservation: Reservation, count: int = 1, priority: int = 0) -> asyncio.Task[None]:
    task = asyncio.create_task(reservation.take(count, priority))
    await asyncio.sleep(0)
    return task


async def taken(admission: Admission, key: str, count: int = 1) -> Reservation:
    reservation = admission.enter(key, 1)
    await reservation.take(count)
    return reservation


async def order(*tasks: asyncio.Task[None]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_requests_and_bytes_are_refused_before_anything_is_read() -> None:
    admission = Admission(limits(2, 1, max_total_body_bytes=100, retry_after_s=7))
    tickets = [admission.enter("", 30) for _ in range(3)]
    with pytest.raises(ApiError, match="3 requests") as caught:
        admission.enter("", 0)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "7"})
    tickets.pop().leave()
    with pytest.raises(ApiError, match="60 bytes"):
        admission.enter("", 41)
    admission.enter("", 40)


async def test_one_that_does_not_fit_lets_others_pass_and_has_its_turn_after_sixteen() -> None:
    admission = Admission(limits(4, 40))
    held = [await taken(admission, "b", 2)]
    large = await waiting(admission.enter("", 1), 4)
    for _ in range(16):
        small = admission.enter("c", 1)
        assert await order(await waiting(small)) == [True], "two places are free, and the large one needs four"
        small.leave()
    late = await waiting(admission.enter("c", 1))
    assert await order(large, late) == [False, False], "now places are kept free"
    held.pop().leave()
    assert await order(large, late) == [True, False]
    assert admission.num_sequences == 4


async def test_places_are_given_in_order_to_those_who_fit() -> None:
    admission = Admission(limits(3, 8))
    held = [await taken(admission, "") for _ in range(3)]
    waits = [await waiting(admission.enter("", 1), count) for count in (1, 2, 1)]
    held.pop().leave()
    assert await order(*waits) == [True, False, False]
    held.pop().leave()
    assert await order(*waits) == [True, False, True], "the one that needs two is passed"


async def test_a_better_priority_overtakes_those_who_wait_but_not_a_key_below_its_share() -> None:
    admission = Admission(limits(4, 8, max_share_per_key=0.5))
    held = [await taken(admission, "a") for _ in range(4)]
    turns: list[str] = []
    wants = {"first": ("a", 0), "low": ("a", 5), "high": ("a", -1), "second": ("a", 0), "of another key": ("b", 9)}
    for name, (key, priority) in wants.items():
        task = await waiting(admission.enter(key, 1), priority=priority)
        task.add_done_callback(lambda _, name=name: turns.append(name))
    for reservation in held:
        reservation.leave()
        await order()
    assert turns == ["of another key", "high", "first", "second"]


async def test_where_nobody_may_wait_nobody_does() -> None:
    admission = Admission(limits(2, 0))
    reservation = await taken(admission, "")
    await taken(admission, "")
    with pytest.raises(ApiError, match="2 requests"):
        admission.enter("", 1)
    reservation.leave()
    with pytest.raises(ApiError, match="1 of 2 sequences are open"):
        await admission.enter("", 1).take(2)


async def test_more_sequences_than_there_are_places_are_refused_for_good() -> None:
    with pytest.raises(ApiError, match="at most 2") as caught:
        await Admission(limits(2, 5)).enter("", 1).take(3)
    assert (caught.value.status, caught.value.param) == (400, "n")


async def test_a_key_beyond_its_share_waits_for_others_but_takes_what_nobody_wants() -> None:
    admission = Admission(limits(4, 8, max_share_per_key=0.5))
    held = [await taken(admission, "a") for _ in range(4)]
    more = await waiting(admission.enter("a", 1))
    other = await waiting(admission.enter("b", 1))
    held.pop().leave()
    assert await order(more, other) == [False, True]
    held.pop().leave()
    assert await order(more) == [True], "nobody else waits"


async def test_the_queue_is_shared_too() -> None:
    """A key that has filled the queue gives its newest place in it to another, and to no more than its share."""
    admission = Admission(limits(1, 4, max_share_per_key=0.5))
    held = await taken(admission, "a")
    of_a = []
    for _ in range(4):
        reservation = admission.enter("a", 1)
        of_a.append((reservation, await waiting(reservation)))
    with pytest.raises(ApiError, match="5 requests"):
        admission.enter("a", 1)
    held_back = []
    for number in (3, 2):
        held_back.append(await waiting(admission.enter("b", 1)))
        with pytest.raises(ApiError, match="this key has many"):
            await of_a[number][1]
        of_a[number][0].leave()
    with pytest.raises(ApiError, match="5 requests"):
        admission.enter("b", 1)
    held.leave()
    assert await order(of_a[0][1], of_a[1][1], *held_back) == [True, False, False, False]


async def test_whoever_gives_up_leaves_nothing_behind() -> None:
    admission = Admission(limits(1, 4))
    held = await taken(admission, "")
    reservation = admission.enter("", 1)
    gone, later = await waiting(reservation), await waiting(admission.enter("", 1))
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    reservation.leave()
    reservation.leave()
    held.leave()
    assert await order(later) == [True]
    assert (admission.num_sequences, admission.num_waiting, admission.num_requests) == (1, 0, 1)


async def test_a_place_given_to_one_that_gives_up_at_that_moment_is_given_on() -> None:
    admission = Admission(limits(1, 4))
    held = await taken(admission, "")
    reservation = admission.enter("", 1)
    gone, later = await waiting(reservation), await waiting(admission.enter("", 1))
    held.leave()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert await order(later) == [True]


async def test_tokens_are_counted_when_they_are_known() -> None:
    admission = Admission(limits(max_total_tokens=100))
    first, second = admission.enter("", 1), admission.enter("", 1)
    first.add_tokens(60)
    with pytest.raises(ApiError, match="60 tokens are open") as caught:
        second.add_tokens(41)
    assert caught.value.status == 429
    with pytest.raises(ApiError) as caught:
        second.add_tokens(101)
    assert caught.value.status == 400
    first.leave()
    second.add_tokens(100)
    assert admission.num_tokens == 100


async def answered(admission: Admission, num_tokens: int, key: str = "") -> None:
    reservation = await taken(admission, key)
    reservation.generated(num_tokens)
    reservation.leave()


async def test_outputs_count_as_they_are_expected_and_longer_ones_as_they_are() -> None:
    admission = Admission(limits(max_total_tokens=1 << 26))
    tickets = [admission.enter("", 1) for _ in range(200)]
    for ticket in tickets:
        ticket.add_tokens(10, [1 << 20])
    assert admission.num_tokens == 200 * (10 + 1024), "not even two would fit at their longest for each 64"
    tickets[0].add_tokens(0, [7, 1 << 20])
    assert admission.num_tokens == 200 * (10 + 1024) + 7 + 1024
    before = admission.num_tokens
    tickets[1].generated(1000)
    assert admission.num_tokens == before
    tickets[1].generated(1000)
    assert admission.num_tokens == before + 2000 - 1024
    with pytest.raises(ApiError, match="not 67108865") as caught:
        tickets[2].add_tokens(1, [1 << 26])
    assert caught.value.status == 400
    for ticket in tickets:
        ticket.leave()
        ticket.generated(5000)
    assert admission.num_tokens == 0


async def test_what_is_expected_follows_what_comes() -> None:
    admission = Admission(limits(max_total_tokens=1 << 26))
    for _ in range(100):
        await answered(admission, 64)
    ticket = admission.enter("", 1)
    ticket.add_tokens(0, [1 << 20])
    assert 64 <= admission.num_tokens <= 70


async def test_who_is_refused_is_told_when_a_slot_is_expected() -> None:
    now_s, jitter = 0.0, 1.0
    admission = Admission(limits(2, 3, queue_timeout_s=300.0, retry_after_s=1), lambda: now_s, lambda: jitter)

    async def told() -> int:
        with pytest.raises(ApiError) as caught:
            await admission.enter("", 1).take(1)
        return int((caught.value.headers or {})["Retry-After"])

    first = [await taken(admission, "") for _ in range(2)]
    waits = [await waiting(admission.enter("", 1)) for _ in range(3)]
    assert await told() == 1, "nobody knows yet"
    now_s = 20.0
    for held in first:
        held.leave()
    waits += [await waiting(admission.enter("", 1)) for _ in range(2)]
    assert await told() == 40, "three wait for two slots, each of which is free after 20 s"
    jitter = 0.5
    assert await told() == 20
    jitter = 100.0
    assert await told() == 300, "longer than limits.queue_timeout_s nobody waits here"
    for one in waits:
        one.cancel()


async def test_without_a_word_an_ingress_holds_no_more_tokens_than_fit_its_memory() -> None:
    most = 256 * 2**20 // 4
    admission = Admission(Limits())
    first, second = admission.enter("", 1), admission.enter("", 1)
    first.add_tokens(most)
    for num_tokens, status in ((1, 429), (most + 1, 400)):
        with pytest.raises(ApiError) as caught:
            second.add_tokens(num_tokens)
        assert caught.value.status == status


async def test_of_bytes_and_tokens_a_key_holds_its_share_and_no_more_but_for_one_request() -> None:
    admission = Admission(limits(max_total_body_bytes=100, max_total_tokens=100, max_share_per_key=0.5))
    large = admission.enter("a", 60)
    with pytest.raises(ApiError, match="this API key hold 60 bytes") as caught:
        admission.enter("a", 1)
    assert (caught.value.status, "Retry-After" in caught.value.headers) == (429, True)
    other = admission.enter("b", 40)
    large.add_tokens(60)
    large.leave()
    first, second = admission.enter("a", 10), admission.enter("a", 40)
    first.add_tokens(20)
    with pytest.raises(ApiError, match="this API key hold 20 tokens"):
        second.add_tokens(31)
    second.add_tokens(30)
    other.add_tokens(50)


async def test_a_body_counts_as_long_as_what_has_come_of_it() -> None:
    admission = Admission(limits(max_total_body_bytes=100, max_share_per_key=0.5))
    chunked, other = admission.enter("a", 0), admission.enter("b", 40)
    chunked.body_came(60)  # alone a request may be larger than its key's share
    assert admission.num_bytes == 100
    for reservation in (chunked, other):
        with pytest.raises(ApiError, match="100 bytes") as caught:
            reservation.body_came(61)
        assert caught.value.status == 429
    chunked.body_came(5)
    assert admission.num_bytes == 45
    more = admission.enter("a", 0)
    with pytest.raises(ApiError, match="this API key hold 5 bytes"):
        more.body_came(46)
    for reservation in (chunked, other, more):
        reservation.leave()
    chunked.body_came(7)
    assert admission.num_bytes == 0


async def test_a_body_larger_than_its_keys_share_may_come_in_several_parts() -> None:
    admission = Admission(limits(max_total_body_bytes=100, max_share_per_key=0.5))
    chunked = admission.enter("a", 0)
    for num_bytes in (30, 60, 90):
        chunked.body_came(num_bytes)
    assert admission.num_bytes == 90


async def test_a_key_that_holds_nothing_is_below_its_share_however_large_its_request() -> None:
    admission = Admission(limits(4, 8, max_share_per_key=0.5))
    held = await taken(admission, "c", 3)
    await taken(admission, "a")
    above_share = await waiting(admission.enter("a", 1), 2)
    large = await waiting(admission.enter("b", 1), 3)
    held.leave()
    assert await order(above_share, large) == [False, True]


async def test_lower_limits_leave_nobody_waiting_for_what_will_never_be_free() -> None:
    admission = Admission(limits(8, 8))
    held = await taken(admission, "", 8)
    large, small = await waiting(admission.enter("", 1), 5), await waiting(admission.enter("", 1), 2)
    admission.set_limits(limits(4, 8))
    with pytest.raises(ApiError, match="at most 4") as caught:
        await large
    assert caught.value.status == 400
    held.leave()
    assert await order(small) == [True]


async def test_higher_limits_let_in_who_waits_at_once() -> None:
    admission = Admission(limits(1, 8))
    await taken(admission, "")
    waits = [await waiting(admission.enter("", 1)) for _ in range(3)]
    admission.set_limits(limits(3, 8))
    assert await order(*waits) == [True, True, False]


async def test_whatever_comes_nothing_exceeds_the_limits_and_everybody_ends() -> None:
    chance = random.Random(7)
    bounds = limits(6, 5, max_total_body_bytes=90, max_share_per_key=0.5)
    admission = Admission(bounds)
    ended = {"served": 0, "refused": 0, "gone": 0}
    asked: list[asyncio.Task[None]] = []
    served: list[asyncio.Event] = []

    async def request(key: str, num_bytes: int, count: int) -> None:
        reservation = None
        try:
            reservation = admission.enter(key, num_bytes)
            await reservation.take(count)
            served.append(asyncio.Event())
            await served[-1].wait()
            ended["served"] += 1
        except ApiError:
            ended["refused"] += 1
        except asyncio.CancelledError:
            ended["gone"] += 1
        finally:
            if reservation is not None:
                reservation.leave()

    for _ in range(1500):
        match chance.choice(["come", "come", "end", "give up"]):
            case "come":
                task = asyncio.create_task(request(chance.choice("abc"), chance.randint(1, 20), chance.randint(1, 6)))
                asked.append(task)
            case "end" if served:
                served.pop(chance.randrange(len(served))).set()
            case "give up":
                chance.choice(asked or [asyncio.create_task(request("a", 1, 1))]).cancel()
        if chance.random() < 0.7:
            await asyncio.sleep(0)
        assert admission.num_sequences <= bounds.max_concurrent_requests
        assert admission.num_waiting <= bounds.max_queued_requests
        assert admission.num_bytes <= bounds.max_total_body_bytes
    while not all(task.done() for task in asked):
        while served:
            served.pop().set()
        await asyncio.sleep(0)
    # One that is cancelled before its first turn never asks at all.
    assert [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Exception)] == []
    assert all(ended.values())
    assert admission.num_requests == admission.num_bytes == admission.num_sequences == admission.num_waiting == 0
