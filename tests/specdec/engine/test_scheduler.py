"""The scheduler alone: its properties over random traffic, and what a burst, a long prompt and short memory come to."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.scheduler import CachedPrefix, Request, Scheduler, shares
from specdec.engine.sequences import DECIDED
from tests.specdec.engine.simulator import Arrival, Simulator, percentile

BLOCK_SIZE = 4
BUDGETS = st.integers(1, 40)

arrivals = st.builds(
    Arrival,
    arrival_s=st.floats(0.0, 30.0),
    prompt=st.tuples(st.integers(0, 2), st.integers(1, 60)).map(lambda kind: (kind[0],) * kind[1]),
    num_output_tokens=st.integers(1, 12),
    num_draft_tokens=st.integers(0, 6),
    delay_s=st.floats(0.0, 1.0),
)


class CatchingUp:
    """A cache that always has room, of sequences whose drafts catch up with several tokens a step."""

    def __init__(self) -> None:
        self.num_computed: dict[str, int] = {}
        self.num_tokens: dict[str, int] = {}

    def request(self, key: str) -> Request:
        return Request(key, self.num_tokens[key], num_computed_tokens=self.held(key))

    def find_prefix(self, key: str) -> CachedPrefix:
        return CachedPrefix(0)

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        return self.held(key)

    def held(self, key: str) -> int:
        return min(self.num_computed.get(key, 0), self.num_tokens[key] - 1)

    def extend(self, key: str, length: int) -> bool:
        return True

    def blocks(self, key: str, start: int, stop: int) -> tuple[str, ...]:
        return ()


@settings(max_examples=60, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=12), BUDGETS, st.integers(1, 12), st.integers(20, 60), st.integers(0, 9))
def test_limits_hold_nobody_starves_and_blocks_are_conserved(
    traffic: list[Arrival], budget: int, max_num_seqs: int, num_blocks: int, acceptance: int
) -> None:
    """The pool has room for one sequence at least: preemption must bring each to its end."""
    scheduler = Scheduler(budget, max_num_seqs)
    world = Simulator(scheduler, num_blocks, BLOCK_SIZE, acceptance=acceptance / 10)
    for step in world.run(traffic):
        assert 0 < step.num_tokens <= budget
        assert step.num_rows <= max_num_seqs
        assert world.pool.num_in_use + world.pool.num_free == num_blocks
        assert all(row.num_new_tokens >= 1 for row in step.rows)
    assert all(sequence.is_done for sequence in world.sequences)
    assert world.pool.num_in_use == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=12),
    BUDGETS,
    st.integers(1, 12),
    st.integers(20, 60),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_a_step_in_which_all_decode_is_chosen_as_a_whole_like_any_other(
    traffic: list[Arrival], budget: int, max_num_seqs: int, num_blocks: int, has_windows: bool, acceptance: float
) -> None:
    """So are all steps after it: neither takes more room than the other."""
    windows = {8: num_blocks} if has_windows else {}
    worlds = [
        Simulator(Scheduler(budget, max_num_seqs), num_blocks, BLOCK_SIZE, acceptance, 0, windows, is_quick)
        for is_quick in (False, True)
    ]
    for general, quick in zip(*(world.run(traffic) for world in worlds), strict=True):
        assert general == quick
        assert worlds[0].pool.num_free == worlds[1].pool.num_free
    assert worlds[0].states.num_evictions == worlds[1].states.num_evictions


@pytest.mark.parametrize("seed", [12, 68, 742, 2, 6, 7])
def test_so_it_is_where_memory_is_tight(seed: int) -> None:
    """In the first three it matters which blocks are kept for reuse, in the others that a step has all or nothing.

    That holds where a step is not chosen as a whole after all, too: the attempt has changed nothing.
    """
    rng = random.Random(seed)
    traffic = [
        Arrival(0.0, (rng.randint(0, 2),) * rng.randint(1, 20), rng.randint(3, 14), rng.randint(0, 6))
        for _ in range(rng.randint(2, 8))
    ]
    longest = max(len(arrival.prompt) + arrival.num_output_tokens for arrival in traffic)
    num_blocks = -(-(longest + 7) // BLOCK_SIZE) + rng.randint(0, 12)
    windows = {8: num_blocks} if rng.random() < 0.4 else {}
    budget = rng.choice([16, 24, 40, 64])
    general, quick = (
        Simulator(Scheduler(budget, 8), num_blocks, BLOCK_SIZE, windows=windows, is_quick=is_quick)
        for is_quick in (False, True)
    )
    assert list(general.run(traffic)) == list(quick.run(traffic))


def test_sequences_that_decode_are_chosen_as_a_whole_where_all_drafts_have_room() -> None:
    traffic = [Arrival(0.0, (i,) * 4, 9, num_draft_tokens=2) for i in range(4)]
    counts = []
    for budget in 16, 11:
        world = Simulator(Scheduler(budget, 4), 40, BLOCK_SIZE, is_quick=True)
        for _ in world.run(traffic):
            pass
        counts.append(world.num_quick)
    assert counts[0] == 8, "all but the step that reads the prompts"
    assert 0 < counts[1] < 8, "tokens for all drafts only near the end"


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 40), st.integers(0, 9))
def test_drafts_get_even_shares_and_what_a_short_one_leaves(wanted: list[int], total: int, turn: int) -> None:
    given_ = shares(wanted, total, turn)
    assert sum(given_) == min(total, sum(wanted))
    assert all(0 <= count <= want for count, want in zip(given_, wanted, strict=True))
    cut = [count for count, want in zip(given_, wanted, strict=True) if count < want]
    assert not cut or max(given_) - min(cut) <= 1


def test_a_burst_computes_its_common_prefix_once() -> None:
    prompt = tuple(range(2000))
    traffic = [Arrival(0.0, prompt, 1) for _ in range(16)]
    world = Simulator(Scheduler(256, 64), 4000, 16)
    assert sum(step.num_tokens for step in world.run(traffic)) == 2000 + 15 * 16


def test_a_burst_behind_one_system_prompt_computes_that_once() -> None:
    common = tuple(range(2000))
    traffic = [Arrival(0.0, (*common, *range(10_000 + 50 * i, 10_050 + 50 * i)), 1) for i in range(16)]
    world = Simulator(Scheduler(256, 64), 4000, 16)
    assert sum(step.num_tokens for step in world.run(traffic)) == 2000 + 16 * 50


def test_who_reaches_the_worker_late_but_arrived_first_does_not_overtake_a_prompt_that_both_have_in_common() -> None:
    common = tuple(range(2000))
    late = Arrival(0.0, (*common, *range(10_000, 10_050)), 1, delay_s=0.01)
    world = Simulator(Scheduler(256, 64), 4000, 16)
    steps = list(world.run([late, Arrival(0.001, (*common, *range(20_000, 20_050)), 1)]))
    assert steps[0].tokens_of(0) == 0, "the other one has begun"
    assert sum(step.num_tokens for step in steps) == 2000 + 2 * 50


@pytest.mark.parametrize("priority", [0, 9])
def test_who_computes_a_block_that_a_better_one_waits_for_goes_on_in_its_place(priority: int) -> None:
    """Else its prompt might never be read on: those between the two would take all of the step."""
    scheduler = Scheduler(8, 8)
    cache = Simulator(scheduler, 100, BLOCK_SIZE).states
    common = tuple(range(16))
    prompts = {"best": (*common, 50), "between": tuple(range(60, 90)), "begun": (*common, 40)}
    priorities = {"best": 0, "between": min(1, priority), "begun": priority}

    def step(*keys: str) -> list[str]:
        cache.begin_step()
        held = {key: cache.want(key, prompts[key], 0, b"", (DECIDED, priorities[key], 0.0, key)) for key in keys}
        requests = [Request(key, len(prompts[key]), 0, 99, held[key]) for key in keys]
        rows = scheduler.schedule(requests, cache)
        for row in rows:
            key, end = keys[row.request], row.num_computed_tokens + row.num_new_tokens
            cache.sequence(key).tokens.extend(prompts[key][row.num_computed_tokens : end])
            cache.keep_prefix(key, end)
        return [keys[row.request] for row in rows]

    assert step("begun") == ["begun"]
    assert step("best", "between", "begun") == ["begun"]
    assert step("best", "between", "begun")[0] == "best"


def test_no_prompt_waits_for_a_worse_one_that_gets_no_part_in_a_step() -> None:
    """The last in the order has begun a prompt that the first has in common with it, then twenty come between them."""
    common = tuple(range(160))
    between = [Arrival(0.001, tuple(range(1000 * i, 1000 * i + 64)), 1, delay_s=0.01) for i in range(10, 30)]
    first = Arrival(0.0, (*common, *range(500, 520)), 1, delay_s=0.01)
    world = Simulator(Scheduler(64, 64), 4000, 16)
    steps = list(world.run([first, *between, Arrival(0.002, (*common, *range(600, 620)), 1)]))
    assert steps[0].tokens_of(21) == 64, "the last has begun"
    ends = {i: n for n, step in enumerate(steps) for i in step.decided}
    assert ends[0] < min(ends[i] for i in range(1, 21)), "the first waits for none of the twenty"
    num_common = sum(step.num_tokens for step in steps) - 20 * 64 - 2 * 20
    assert num_common == 160, "the common part is computed once"


def test_no_prompt_waits_for_a_worse_one_that_has_no_room() -> None:
    class NoRoom(CatchingUp):
        """Its prompts have their next block in common, and the one that has begun finds no room."""

        def find_prefix(self, key: str) -> CachedPrefix:
            return CachedPrefix(4, "block")

        def allocate(self, key: str, num_step_tokens: int) -> int | None:
            return None if key == "begun" else 4

        def blocks(self, key: str, start: int, stop: int) -> tuple[str, ...]:
            return ("block",)

    requests = [Request("better", 40), Request("begun", 40, num_computed_tokens=4)]
    rows = Scheduler(64, 8).schedule(requests, NoRoom())
    assert [row.request for row in rows] == [0]


class FewBlocks(CatchingUp):
    """A cache without room for the prompts in ``large``, which counts what it is asked."""

    def __init__(self, large: set[str]) -> None:
        super().__init__()
        self.large, self.found, self.tried = large, list[str](), list[str]()

    def find_prefix(self, key: str) -> CachedPrefix:
        self.found.append(key)
        return CachedPrefix(0)

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        self.tried.append(key)
        return None if key in self.large else self.num_computed.get(key, 0)

    def step(self, scheduler: Scheduler, keys: list[str]) -> list[str]:
        """The requests of 4 tokens that have a part in a step, and then hold what they want but for one token."""
        self.found, self.tried = [], []
        requests = [Request(key, 4, num_computed_tokens=self.num_computed.get(key, 0)) for key in keys]
        chosen = [keys[row.request] for row in scheduler.schedule(requests, self)]
        self.num_computed |= dict.fromkeys(chosen, 3)
        return chosen


def test_sixteen_smaller_prompts_pass_one_that_has_no_room_then_all_wait_for_it() -> None:
    large = [f"large {i}" for i in range(40)]
    small = [f"small {i}" for i in range(40)]
    scheduler, cache = Scheduler(2048, 256), FewBlocks(set(large))
    keys = ["running", large[0], *small, *large[1:]]
    cache.num_computed["running"] = 3
    passed: list[str] = []
    for _ in range(5):
        passed += [key for key in cache.step(scheduler, keys) if key in small and key not in passed]
    assert passed == small[:16]
    assert cache.step(scheduler, keys) == ["running", *small[:16]]
    assert cache.found == cache.tried[1:2] == ["large 0"], "nothing is looked up for who has to wait"
    cache.large.clear()
    assert cache.step(scheduler, keys)[:2] == ["running", "large 0"], "it has room now"
    assert len(cache.step(scheduler, keys)) == len(keys), "and nobody waits any more"


def test_who_waits_for_room_is_tried_by_few_in_a_step() -> None:
    """Of 240 that have no room, the first and sixteen others: each costs a look at the blocks."""
    keys = [f"large {i}" for i in range(240)]
    scheduler, cache = Scheduler(2048, 256), FewBlocks(set(keys))
    for _ in range(3):
        assert cache.step(scheduler, keys) == []
        assert len(cache.tried) == 17
    assert len(cache.found) == 17
    assert cache.step(scheduler, keys[1:]) == [], "the first has left"
    assert cache.tried[0] == keys[1]


def test_who_waits_for_anothers_block_holds_no_memory_and_goes_on_if_that_one_leaves() -> None:
    prompt = tuple(range(160))
    world = Simulator(Scheduler(64, 8), 100, 16)
    steps = world.run([Arrival(0.0, prompt, 1), Arrival(0.0, prompt, 1)])
    next(steps)
    assert world.pool.num_in_use == 10, "the first prompt's blocks alone"
    world.cancel(0)
    assert sum(step.num_tokens for step in steps) == 160 - 64, "the second goes on where the first has left"


def test_a_long_prompt_holds_up_no_short_one() -> None:
    """32 short prompts behind one of 100k tokens: their first tokens come within a few steps, and it still gets on."""
    shorts = [Arrival(0.0, tuple(range(500 * i, 500 * i + 500)), 4) for i in range(1, 33)]
    world = Simulator(Scheduler(2048, 64), 20_000, 16)
    steps = list(world.run([Arrival(0.0, tuple(range(1_000_000, 1_100_000)), 1), *shorts]))
    first = [min(n for n, step in enumerate(steps) if i in step.decided) for i in range(33)]
    assert max(first[1:]) <= 12, "three quarters of each step are theirs: 32 x 500 tokens"
    assert {step.tokens_of(0) for step in steps[:10]} == {512}
    assert first[0] <= 100_000 // 2048 + 16


def test_prompts_are_read_in_order_of_arrival() -> None:
    world = Simulator(Scheduler(20, 8), 100, 4)
    steps = list(world.run([Arrival(0.0, tuple(range(8 * i, 8 * i + 8)), 1) for i in range(6)]))
    assert [step.decided for step in steps] == [[0, 1], [2, 3, 4], [5]]


def test_windows_take_room_for_the_tokens_of_a_step_and_no_more() -> None:
    world = Simulator(Scheduler(32, 8), 100, 4, windows={16: 100})
    next(world.run([Arrival(0.0, tuple(range(1000 * i, 1000 * i + 30)), 4) for i in range(3)]))
    assert [group.num_in_use for group in world.pool.groups] == [8 + 8, 8 + 1]  # 30 tokens, and 2 of 30


def test_the_last_to_arrive_is_preempted_first_and_ends_all_the_same() -> None:
    """Two sequences that fit each alone: the second loses its blocks to the first, then has them again."""
    world = Simulator(Scheduler(64, 8), 6, 4)
    steps = list(world.run([Arrival(0.0, (1,) * 8, 12), Arrival(0.0, (2,) * 8, 12)]))
    ends = Counter({i: n for n, step in enumerate(steps) for i in step.decided})
    assert ends[0] < ends[1]
    assert world.states.num_evictions >= 1


def test_a_step_that_ran_out_of_memory_is_cut_by_a_quarter_and_grows_slowly(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(64, 64)
    assert scheduler.shrink(64, 0, "no room")
    assert "A step of 64 tokens ran out of memory; trying at most 48" in caplog.text
    assert scheduler.budget == 48
    assert scheduler.shrink(20, 0, "no room")
    assert scheduler.budget == 15
    world = Simulator(scheduler, 1000, 16)
    sizes = [step.num_tokens for step in world.run([Arrival(0.0, tuple(range(12000)), 1)])]
    assert sizes[:64] == [15] * 64
    assert sizes[64:129] == [20] * 65
    assert max(sizes) == 64
    scheduler.shrink(2, 0, "no room")
    assert scheduler.budget == 1
    caplog.clear()
    assert not scheduler.shrink(1, 0, "no room")
    assert "Trying" not in caplog.text, "nothing is tried again"
    assert scheduler.budget == 64, "who ran out of memory alone does not slow down the others"


def test_short_memory_takes_drafts_first_then_prompts_then_rows() -> None:
    scheduler, cache = Scheduler(64, 64), CatchingUp()
    keys = [*(f"row {i}" for i in range(8)), *(f"prompt {i}" for i in range(14))]
    cache.num_tokens = dict.fromkeys(keys, 4)
    cache.num_computed = dict.fromkeys(keys[:8], 3)
    seen: list[tuple[int, int, int]] = []
    while True:
        rows = scheduler.schedule(
            [cache.request(key)._replace(num_draft_tokens=4) for key in keys[:8]]
            + [cache.request(key) for key in keys[8:]],
            cache,
        )
        num_drafted = sum(row.num_draft_tokens for row in rows)
        num_prompt = sum(row.num_new_tokens for row in rows if row.request >= 8)
        num_tokens = sum(row.num_new_tokens for row in rows)
        seen.append((num_tokens - num_prompt, num_prompt, num_drafted))
        if not scheduler.shrink(num_tokens + num_drafted, num_drafted, "no room"):
            break
    assert seen[0] == (8, 28, 28)
    assert seen[1] == (8, 28, 0), "drafts first"
    assert seen[2] == (8, 19, 0), "then a quarter of the step, of its prompts"
    first = next(n for n, step in enumerate(seen) if not step[1])
    assert {num_rows for num_rows, _, _ in seen[:first]} == {8}, "rows last"
    assert [num_rows for num_rows, _, _ in seen[first:]] == [8, 6, 4, 3, 2, 1]
    assert not any(num_prompt or num_drafted for _, num_prompt, num_drafted in seen[first:])


@pytest.mark.parametrize("num_queued", [0, 30])
def test_rows_that_outnumber_the_tokens_of_a_step_take_turns(num_queued: int) -> None:
    """Whoever waits to begin has no turn before those that have begun."""
    scheduler, cache = Scheduler(64, 64), CatchingUp()
    keys = [f"row {i}" for i in range(8)] + [f"queued {i}" for i in range(num_queued)]
    cache.num_tokens = dict.fromkeys(keys, 4)
    cache.num_computed = dict.fromkeys(keys[:8], 3)
    scheduler.shrink(8, 0, "no room")
    assert scheduler.budget == 6
    served: Counter[str] = Counter()
    for _ in range(60):
        rows = scheduler.schedule([cache.request(key) for key in keys], cache)
        assert len(rows) == 6
        assert [row.request for row in rows] == sorted(row.request for row in rows)
        served.update(keys[row.request] for row in rows)
    assert served == dict.fromkeys(keys[:8], 45)


def test_limits_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(0, 1)
    assert Scheduler(4, 100).max_num_seqs == 4
    assert Scheduler(8, 1).schedule([Request("a", 3)], Simulator(Scheduler(8, 1), 4, 4).cache_of({"a": (1, 2, 3)}))


def test_percentiles_are_of_the_sorted_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0, 50, 100)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("budget", "num_before", "num_behind", "num_lacking"),
    [(256, 64, 192, 2), (256, 64, 192, 1), (64, 63, 0, 3), (2048, 256, 64, 7), (8, 6, 3, 4), (2, 1, 1, 2)],
)
def test_sequences_that_catch_up_do_not_starve_a_prompt(
    budget: int, num_before: int, num_behind: int, num_lacking: int
) -> None:
    """A prompt between chains and branches, all of which lack some tokens at each step."""
    scheduler = Scheduler(budget, num_before + num_behind + 1, max_decode_tokens=16)
    cache = CatchingUp()
    keys = [*(f"chain {i}" for i in range(num_before)), "prompt", *(f"branch {i}" for i in range(num_behind))]
    cache.num_tokens = dict.fromkeys(keys, 100) | {"prompt": 500}
    cache.num_computed = {key: 100 - num_lacking for key in keys if key != "prompt"}
    num_steps = 0
    while cache.num_computed.get("prompt", 0) < 500:
        num_steps += 1
        # A quarter of each step is the prompt's; its last 16 tokens are read as by one that catches up.
        assert num_steps <= 500 / max(1, budget // 4) + 16
        rows = scheduler.schedule([cache.request(key) for key in keys], cache)
        assert sum(row.num_new_tokens for row in rows) <= budget
        served = [row.request for row in rows if keys[row.request] != "prompt"]
        first = [index for index, key in enumerate(keys) if key != "prompt"][: len(served)]
        assert served == first, "one that came later had a row before one that came first"
        for row in rows:
            cache.num_computed[keys[row.request]] = row.num_computed_tokens + row.num_new_tokens
        for key in keys:
            if key != "prompt" and cache.num_computed[key] >= cache.num_tokens[key]:
                cache.num_tokens[key] += num_lacking


def test_a_prompt_that_is_read_in_small_parts_leaves_the_rest_to_others() -> None:
    cache = CatchingUp()
    cache.num_tokens = {"small": 500, "other": 500}
    rows = Scheduler(256, 8).schedule([Request("small", 500, max_new_tokens=20), Request("other", 500)], cache)
    assert [row.num_new_tokens for row in rows] == [20, 236]
