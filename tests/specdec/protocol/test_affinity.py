"""Sequences go where their prefix is cached, and load stays even."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from specdec.core.log import TokenLog
from specdec.core.messages import Cancel, Epoch, Notes, Open, Submit, Verdict
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.drafting.plans import fixed_plan
from specdec.protocol.dispatcher import BLOCK_TOKENS, CachedPrefixes, block_digests, choose, choose_router
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from tests.letters import provenance

SLACK = 4


def log_of(seed: int, num_blocks: int) -> TokenLog:
    rng = random.Random(seed)
    return TokenLog(rng.randrange(1000) for _ in range(num_blocks * BLOCK_TOKENS))


def test_a_prefix_is_found_as_far_as_it_is_the_same() -> None:
    cached, log = CachedPrefixes(), log_of(0, 6)
    cached.add(block_digests(log, "a"))
    assert cached.num_cached(block_digests(log, "a")) == 6
    other = TokenLog([*log.tail(0, 3 * BLOCK_TOKENS), *log_of(1, 3).tail(0)])
    assert cached.num_cached(block_digests(other, "a")) == 3
    assert cached.num_cached(block_digests(log, "b")) == 0, "another salt shares nothing"
    assert block_digests(TokenLog(range(BLOCK_TOKENS - 1)), "") == []


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    cached, old, new = CachedPrefixes(most_blocks=8), log_of(0, 5), log_of(1, 5)
    cached.add(block_digests(old, ""))
    cached.add(block_digests(new, ""))
    assert cached.num_cached(block_digests(new, "")) == 5
    assert cached.num_cached(block_digests(old, "")) == 3


@pytest.mark.parametrize(
    ("loads", "cached", "slack", "chosen"),
    [
        ({"a": 3, "b": 1}, {}, 4, "b"),
        ({"a": 5, "b": 1}, {"a": 2}, 4, "a"),
        ({"a": 6, "b": 1}, {"a": 2}, 4, "b"),
        ({"a": 5, "b": 1}, {"a": 1}, 4, "b"),
        ({"a": 2, "b": 1}, {"a": 2}, 0, "b"),
        ({"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 2}, 4, "b"),
        ({"b": 1, "a": 1}, {}, 4, "a"),
        ({"b": 1, "a": 1}, {"b": 4}, 0, "b"),
        ({"b": 1, "a": 1}, {"b": 4}, -1, "a"),
        ({"b": 1, "a": 2}, {"a": 4}, -1, "b"),
    ],
)
def test_the_choice(loads: dict[str, int], cached: dict[str, int], slack: int, chosen: str) -> None:
    assert choose(loads, cached, 4, slack) == chosen


@pytest.mark.parametrize("seed", range(5))
def test_conversations_find_their_tokens_and_load_stays_even(seed: int) -> None:
    """Conversations of many turns, at random times, over four targets; each turn repeats all that was said before."""
    rng, targets = random.Random(seed), [f"T{i}" for i in range(4)]
    loads, caches = dict.fromkeys(targets, 0), {name: CachedPrefixes() for name in targets}
    held: list[tuple[float, str]] = []
    turns = [(rng.uniform(0, 600), talk) for talk in range(120) for _ in range(8)]
    said = {talk: log_of(1000 * seed + talk, rng.randrange(1, 4)) for talk in range(120)}
    where: dict[int, set[str]] = {}
    num_reusable = num_found = 0
    for now_s, talk in sorted(turns):
        for ended in [one for one in held if one[0] <= now_s]:
            held.remove(ended)
            loads[ended[1]] -= 1
        digests = block_digests(said[talk], "")
        cached = {name: cache.num_cached(digests) for name, cache in caches.items()}
        name = choose(loads, cached, len(digests), SLACK)
        assert loads[name] - min(loads.values()) <= SLACK
        num_reusable += max(cached.values())
        num_found += cached[name]
        loads[name] += 1
        held.append((now_s + rng.expovariate(1 / 8), name))
        said[talk].extend(log_of(rng.randrange(1 << 30), rng.randrange(1, 5)).tail(0))
        caches[name].add(block_digests(said[talk], ""))
        where.setdefault(talk, set()).add(name)
    assert num_reusable > 0
    assert num_found >= 0.9 * num_reusable
    assert set().union(*where.values()) == set(targets), "all of them were used"


def test_the_next_turn_of_a_conversation_goes_where_the_last_one_was() -> None:
    """Also where its answer is part of what is cached, and the other target holds less."""
    machine = RouterMachine("R", fixed_plan(0, "off"), Times())
    for name in ("T0", "T1"):
        machine.worker_joined(name, "target", 0.0)

    def submitted(seq: str, prompt: tuple[int, ...]) -> str:
        spec = SequenceSpec(SamplingParams(), seed=1, max_tokens=50, output_start=len(prompt))
        machine.receive(Submit(seq, 1, "I", prompt, spec), 0.0)
        outbox = machine.take_outbox()
        (name,) = [peer for peer, messages in outbox.items() if any(isinstance(one, Open) for one in messages)]
        return name

    first, answer = log_of(0, 4).tail(0), log_of(2, 1).tail(0)
    assert submitted("a", first) == "T0"
    assert submitted("a2", first) == "T1", "nobody has read it yet"
    log = TokenLog((*first, *answer))
    machine.receive(
        Verdict(
            "a", Epoch(1, 0), len(first), answer, Notes(provenance("p" * len(answer)), (0,) * 32), log.prefix_hash()
        ),
        0.0,
    )
    machine.receive(Cancel("a", 1), 0.0)
    for seq in ("b", "c"):
        assert submitted(seq, log_of(ord(seq), 4).tail(0)) == {"b": "T0", "c": "T0"}[seq]
    assert submitted("d", (*log.tail(0), *log_of(3, 1).tail(0))) == "T0", "it holds one more, and has read this"
    machine.workers.affinity_slack = 0
    assert submitted("e", (*log.tail(0), *log_of(3, 1).tail(0))) == "T1"
    counted = machine.metrics()
    assert counted["num_placements/some"] == 1
    assert counted["num_placements/none"] == 5
    assert counted["num_reusable_prompt_tokens"] == 2 * 5 * BLOCK_TOKENS, "of d and e: the four blocks and the answer"
    assert counted["num_reused_prompt_tokens"] == 5 * BLOCK_TOKENS


def test_prompts_that_begin_alike_have_one_router_unless_it_holds_more_than_slack() -> None:
    loads = dict.fromkeys(("R0", "R1", "R2"), 1)
    first = {seed: choose_router(loads, log_of(seed, 8), "", "s", 2) for seed in range(60)}
    for name in loads:
        assert 10 <= list(first.values()).count(name) <= 30
    for seed, name in first.items():
        longer = TokenLog([*log_of(seed, 8).tail(0), *log_of(100, 3).tail(0)])
        assert choose_router(loads, longer, "", "t", 2) == name
        assert choose_router({**loads, name: 3}, longer, "", "t", 2) == name
        assert choose_router({**loads, name: 4}, longer, "", "t", 2) != name
        fewer = {other: load for other, load in loads.items() if other != name}
        assert choose_router(fewer, longer, "", "t", 2) != name
    assert len({choose_router(loads, log_of(0, 8), salt, "s", 2) for salt in "abcdefgh"}) > 1
    assert len({choose_router(loads, TokenLog((1, 2)), "", seq, 2) for seq in "abcdefgh"}) > 1, "by its name"


def found_share(seed: int, *, by_prompt: bool) -> float:
    """Of the tokens that some target has, those that the chosen one has: three routers, each knows what it gave."""
    rng, routers, targets = random.Random(seed), ("R0", "R1", "R2"), [f"T{i}" for i in range(4)]
    held: list[tuple[float, str, str]] = []
    known = {(router, name): CachedPrefixes() for router in routers for name in targets}
    really = {name: CachedPrefixes() for name in targets}
    said = {talk: log_of(1000 * seed + talk, rng.randrange(1, 4)) for talk in range(60)}
    num_reusable = num_found = 0
    for now_s, talk in sorted((rng.uniform(0, 600), talk) for talk in range(60) for _ in range(8)):
        held = [one for one in held if one[0] > now_s]
        loads = {router: sum(one[1] == router for one in held) for router in routers}
        chosen = choose_router(loads, said[talk], "", str(now_s), 2)
        router = chosen if by_prompt else rng.choice(routers)
        digests = block_digests(said[talk], "")
        of_router = {name: sum(one[1:] == (router, name) for one in held) for name in targets}
        cached = {name: known[router, name].num_cached(digests) for name in targets}
        name = choose(of_router, cached, len(digests), SLACK)
        had = {name: prefixes.num_cached(digests) for name, prefixes in really.items()}
        num_reusable += max(had.values())
        num_found += had[name]
        held.append((now_s + rng.expovariate(1 / 8), router, name))
        said[talk].extend(log_of(rng.randrange(1 << 30), rng.randrange(1, 5)).tail(0))
        for prefixes in (known[router, name], really[name]):
            prefixes.add(block_digests(said[talk], ""))
    return num_found / num_reusable


@pytest.mark.parametrize("seed", range(3))
def test_conversations_find_their_tokens_with_several_routers(seed: int) -> None:
    by_prompt, by_chance = (found_share(seed, by_prompt=choice) for choice in (True, False))
    assert by_prompt > by_chance + 0.05
    assert by_prompt >= 0.85


def test_what_the_only_target_has_read_is_known_when_another_comes() -> None:
    machine = RouterMachine("R", fixed_plan(0, "off"), Times())
    machine.worker_joined("T1", "target", 0.0)
    log = log_of(0, 4)

    def submit(seq: str) -> str | None:
        spec = SequenceSpec(SamplingParams(), seed=1, max_tokens=50, output_start=len(log))
        machine.receive(Submit(seq, 1, "I", log.tail(0), spec), 0.0)
        return next((n for n, m in machine.take_outbox().items() if any(isinstance(one, Open) for one in m)), None)

    assert submit("a") == "T1"
    decided = TokenLog((*log.tail(0), 7))
    machine.receive(Verdict("a", Epoch(1, 0), len(log), (7,), Notes(provenance("p"), (0,)), decided.prefix_hash()), 0.0)
    machine.receive(Cancel("a", 1), 0.0)
    machine.worker_joined("T0", "target", 0.0)
    assert submit("b") == "T1", "the other would be first by name"


def test_digests_of_blocks_are_worked_out_once_for_all_samples_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, hashed = SharedTokens(log_of(0, 4).tokens), list[int]()

    class Counting:
        def __init__(self, digest_size: int) -> None:
            self._state = blake2b(digest_size=digest_size)

        def update(self, data: memoryview) -> None:
            hashed.append(len(data))
            self._state.update(data)

        def digest(self) -> bytes:
            return self._state.digest()

    monkeypatch.setattr("specdec.core.tokens.blake2b", Counting)
    found = [block_digests(TokenLog(prompt), "a") for _ in range(8)]
    assert (found, hashed) == ([found[0]] * 8, [BLOCK_TOKENS] * 4)
    monkeypatch.undo()
    tokens = [*prompt, *range(2 * BLOCK_TOKENS)]
    assert block_digests(TokenLog(prompt, tokens[len(prompt) :]), "a") == block_digests(TokenLog(tokens), "a")


def test_a_single_router_is_chosen_without_looking_at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenLog, "prefix_hash", None)
    assert choose_router({"a": 3}, log_of(0, 20), "", "s", 2) == "a"


def test_a_router_is_chosen_by_the_first_blocks_alone() -> None:
    """A long prompt is not hashed for it: 256 tokens are."""
    log = log_of(0, 200)
    known = log.prompt._digests._states
    choose_router({"a": 0, "b": 0}, log, "", "s", 2)
    assert len(known) == 1
