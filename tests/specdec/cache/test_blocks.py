"""The block pool against a simulated memory: what a sequence reads back is what it was given."""

import random
from contextlib import suppress
from copy import deepcopy

import pytest

from specdec.cache.blocks import BlockPool, CachedSequence

Pairs = list[tuple[int, int]]


class Walk:
    """Sequences that grow, shrink, fork and share prefixes at random in a pool that is often short of blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.sample(range(1, 10), rng.randint(0, 2))
        self.lookahead = rng.randint(0, 4)
        self.num_step_tokens = rng.choice([None, 9])
        self.pool = BlockPool(
            rng.randint(4, 24),
            rng.randint(1, 4),
            {window: rng.randint(4, 24) for window in sorted(windows)},
            rng.random() < 0.7 or not windows,
            self.lookahead,
        )
        self.memory = [[-1] * (group.num_blocks * self.pool.block_size) for group in self.pool.groups]
        self.live: list[tuple[CachedSequence, list[int]]] = []
        self.peaks: dict[int, int] = {}
        self.num_copies = 0
        self.num_failures = 0

    def step(self) -> None:
        rules = [self.add]
        if self.live:
            rules += [self.grow] * 6 + [self.fork] * 3 + [self.cut, self.free, self.keep, self.reuse]
        self.rng.choice(rules)()
        self.accounts_balance()
        self.everybody_reads_their_own()
        self.windows_bound_what_a_sequence_holds()

    def _tokens(self) -> list[int]:
        return self.rng.choices((0, 1), k=self.rng.randint(1, 9))  # few different ones, so that prefixes meet

    def _slot(self, table: list[int], position: int) -> int:
        size = self.pool.block_size
        return table[position // size] * size + position % size

    def _prepare(self, memories: list[list[int]], pool: BlockPool, failing: str = "") -> None:
        """Carry out the copies, then clear the blocks that have a new owner; what fails does so when half is done."""
        size = pool.block_size
        for memory, group in zip(memories, pool.groups, strict=True):

            def copy(pairs: list[tuple[int, int]], memory: list[int] = memory) -> None:
                self.num_copies += len(pairs) if memories is self.memory else 0
                contents = [memory[source * size : (source + 1) * size] for source, _ in pairs]
                assert len({destination for _, destination in pairs}) == len(pairs), "written in no particular order"
                if failing == "copy":
                    pairs = pairs[::-1][: len(pairs) // 2]
                    contents = contents[::-1]
                for (_, destination), content in zip(pairs, contents, strict=False):
                    memory[destination * size : (destination + 1) * size] = content
                if failing == "copy":
                    self.num_failures += 1
                    raise MemoryError

            def clear(blocks: list[int], memory: list[int] = memory) -> None:
                for block in blocks[: len(blocks) // 2] if failing == "clear" else blocks:
                    memory[block * size : (block + 1) * size] = [-1] * size
                if failing == "clear":
                    self.num_failures += 1
                    raise MemoryError

            with suppress(MemoryError):
                group.prepare(copy, clear)

    def _forward(self, writes: list[tuple[CachedSequence, list[int], list[int]]]) -> None:
        """Prepare the blocks, then write the new tokens of several sequences."""
        self._prepare(self.memory, self.pool)
        for sequence, expected, tokens in writes:
            for token in tokens:
                expected.append(token)
                for memory, table in zip(self.memory, sequence.tables, strict=True):
                    memory[self._slot(table, len(sequence.tokens))] = hash(tuple(expected))
                sequence.tokens.append(token)
            self.peaks[id(sequence)] = max(self.peaks[id(sequence)], len(expected))

    def _add(self, sequence: CachedSequence, expected: list[int], peak: int) -> None:
        self.live.append((sequence, expected))
        self.peaks[id(sequence)] = peak

    def add(self) -> None:
        self._add(self.pool.new_sequence(self.rng.choice([b"", b"other", None])), [], 0)

    def grow(self) -> None:
        """A step; it may run out of memory before it writes, and be tried again, or given up."""
        rng, tokens, lookahead = self.rng, self._tokens(), self.rng.randint(0, 5)
        failing = rng.choice(["", "", "copy", "clear"])
        writes = []
        taken: list[set[int]] = [set() for _ in self.pool.groups]
        for sequence, expected in rng.sample(self.live, rng.randint(1, min(3, len(self.live)))):
            length = len(sequence.tokens) + len(tokens) + lookahead
            fits = self.pool.fits(sequence, length, [], self.num_step_tokens)
            before = [list(table) for table in sequence.tables], self.pool.num_free
            assert self.pool.reserve(sequence, length, self.num_step_tokens) == fits
            if fits:
                writes.append((sequence, expected, tokens))
                for of_group, table, old in zip(taken, sequence.tables, before[0], strict=True):
                    of_group |= {*table[len(old) :]}
            else:
                assert (list(sequence.tables), self.pool.num_free) == (before[0], before[1])
        for sequence, _, new in writes:
            assert self.pool.is_reserved(sequence, len(sequence.tokens) + len(new))
        if failing:
            self._prepare(self.memory, self.pool, failing)
            if rng.random() < 0.5:
                return
        self._forward(writes)
        size = self.pool.block_size
        for number, (memory, blocks) in enumerate(zip(self.memory, taken, strict=True)):
            written = {
                self._slot(sequence.tables[number], i) for sequence, expected, _ in writes for i in range(len(expected))
            }
            slots = {block * size + i for block in blocks for i in range(size)}
            assert all(memory[slot] == -1 for slot in slots - written), "a new owner finds what another left"

    def cut(self) -> None:
        sequence, expected = self.rng.choice(self.live)
        length = self.rng.randint(0, len(expected))
        self.pool.truncate(sequence, length)
        if len(sequence) != length:
            assert len(sequence) == 0
            assert length < self.peaks[id(sequence)] - self.lookahead
            self.peaks[id(sequence)] = 0
        del expected[len(sequence) :]
        assert all(len(table) == self.pool.blocks_for(len(sequence)) for table in sequence.tables)

    def fork(self) -> None:
        sequence, expected = self.rng.choice(self.live)
        num_free = self.pool.num_free
        self._add(self.pool.fork(sequence), list(expected), self.peaks[id(sequence)])
        assert self.pool.num_free == num_free

    def free(self) -> None:
        sequence, _ = self.live.pop(self.rng.randrange(len(self.live)))
        self.pool.free(sequence)
        assert not sequence.tokens
        assert not any(sequence.tables)

    def keep(self) -> None:
        sequence, expected = self.rng.choice(self.live)
        self.pool.keep_prefix(sequence, self.rng.randint(0, len(expected)))

    def reuse(self) -> None:
        tokens = [*self.rng.choice(self.live)[1], *self._tokens()]
        sequence = self.pool.new_sequence(self.rng.choice([b"", b"other", None]))
        length = self.pool.reuse_prefix(sequence, tokens)
        assert length < len(tokens)
        assert length % self.pool.block_size == 0
        self._add(sequence, tokens[:length], length + self.lookahead)  # it cannot be cut back at all for sure

    def accounts_balance(self) -> None:
        for number, group in enumerate(self.pool.groups):
            held = {block for sequence, _ in self.live for block in sequence.tables[number]} - {group.null_block}
            assert group.num_in_use == len(held)
            assert group.num_free == group.num_blocks - len(held)
            assert group.num_reusable <= group.num_free

    def everybody_reads_their_own(self) -> None:
        memories = deepcopy(self.memory)  # as the next step will see it: outstanding copies and clearing come first
        self._prepare(memories, deepcopy(self.pool))
        for sequence, expected in self.live:
            assert sequence.tokens == expected
            for memory, group, table in zip(memories, self.pool.groups, sequence.tables, strict=True):
                # What is cached at a position depends on all tokens up to it.
                for i in range(group.first_read(len(expected)), len(expected)):
                    assert memory[self._slot(table, i)] == hash(tuple(expected[: i + 1]))

    def windows_bound_what_a_sequence_holds(self) -> None:
        for sequence, expected in self.live:
            for group, table in zip(self.pool.groups, sequence.tables, strict=True):
                if group.window is not None and self.pool.reserve(sequence, len(expected)):
                    held = sum(block != group.null_block for block in table)
                    assert held <= self.pool.blocks_for(group.window + self.lookahead) + 1 + self.pool.blocks_for(9 + 5)


def test_each_reads_what_it_was_given_and_blocks_are_conserved() -> None:
    num_copies = num_failures = 0
    for seed in range(40):
        walk = Walk(seed)
        for _ in range(60):
            walk.step()
        num_copies += walk.num_copies
        num_failures += walk.num_failures
    assert min(num_copies, num_failures) > 50, "the walks get nowhere"


def prepared(pool: BlockPool) -> tuple[list[Pairs], list[int]]:
    """What is copied, call by call, and what is cleared in the first group before a step writes."""
    copies: list[Pairs] = []
    cleared: list[int] = []
    pool.groups[0].prepare(copies.append, cleared.extend)
    return copies, cleared


def grown(pool: BlockPool, tokens: list[int], salt: bytes | None = b"") -> CachedSequence:
    sequence = pool.new_sequence(salt)
    assert pool.reserve(sequence, len(tokens))
    sequence.tokens.extend(tokens)
    return sequence


def test_kept_blocks_are_taken_least_recently_used_first() -> None:
    pool = BlockPool(4, 2)
    for tokens in ([1, 1], [2, 2], [3, 3], [4, 4]):
        sequence = grown(pool, tokens)
        pool.keep_prefix(sequence, 2)
        pool.free(sequence)
    assert pool.num_free == pool.num_reusable == 4
    again = CachedSequence()
    assert pool.reuse_prefix(again, [1, 1, 0]) == 2
    pool.free(again)
    grown(pool, [5, 5, 5, 5])  # takes the blocks of 2 and 3
    found = {first: pool.reuse_prefix(CachedSequence(), [first, first, 0]) for first in (1, 2, 3, 4)}
    assert found == {1: 2, 2: 0, 3: 0, 4: 2}


def test_a_prefix_outlives_what_continues_it() -> None:
    pool = BlockPool(3, 2)
    sequence = grown(pool, [1, 2, 3, 4, 5, 6])
    pool.keep_prefix(sequence, 6)
    pool.free(sequence)
    grown(pool, [9])
    assert pool.reuse_prefix(CachedSequence(), [1, 2, 3, 4, 5, 6, 7]) == 4


def test_prefixes_are_not_shared_beyond_verified_length_salt_or_bypass() -> None:
    pool = BlockPool(16, 2)
    prompt = [1, 2, 3, 4, 5, 6]
    pool.keep_prefix(grown(pool, prompt), 5)
    pool.keep_prefix(grown(pool, [7, 7], salt=None), 2)
    assert pool.reuse_prefix(CachedSequence(), [*prompt, 7]) == 4
    assert pool.reuse_prefix(CachedSequence(), prompt[:4]) == 2  # one token is left over
    assert pool.reuse_prefix(CachedSequence(salt=b"other"), [*prompt, 7]) == 0
    assert pool.reuse_prefix(CachedSequence(salt=None), [*prompt, 7]) == 0
    assert pool.reuse_prefix(CachedSequence(), [7, 7, 7]) == 0
    assert pool.reuse_prefix(CachedSequence(), [0, 2, 3, 4, 5, 6, 7]) == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_bad_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)


def test_truncate_and_reuse_refuse_bad_calls() -> None:
    pool = BlockPool(4, 2)
    sequence = grown(pool, [1, 2, 3])
    with pytest.raises(ValueError, match=r"\[0, 3\]"):
        pool.truncate(sequence, 4)
    with pytest.raises(ValueError, match="empty"):
        pool.reuse_prefix(sequence, [1, 2, 3])


@pytest.mark.parametrize("seed", range(40))
def test_fits_says_what_reserving_after_freeing_does(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(8, block_size=4)
    held: list[CachedSequence] = []
    for _ in range(60):
        if held and rng.random() < 0.3:
            held.append(pool.fork(rng.choice(held)))
        elif len(held) > 1 and rng.random() < 0.3:
            pool.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(CachedSequence())
        sequence = rng.choice(held)
        length = len(sequence) + rng.randint(1, 12)
        others = [other for other in held if other is not sequence and rng.random() < 0.5]
        told = pool.fits(sequence, length, others)
        trial, trial_sequence, trial_others = deepcopy((pool, sequence, others))
        for other in trial_others:
            trial.free(other)
        assert trial.reserve(trial_sequence, length) == told
        if pool.reserve(sequence, length):
            sequence.tokens.extend(rng.randrange(9) for _ in range(length - len(sequence)))
        prepared(pool)


def test_a_prefix_is_reused_if_the_windows_blocks_are_there() -> None:
    """Those that the window has passed are needed by nobody; without its last ones there is nothing to go on from."""
    pool = BlockPool(40, 2, {5: 6}, lookahead_tokens=2)
    full, windowed = pool.groups
    sequence, tokens = pool.new_sequence(), list(range(30))
    for i, token in enumerate(tokens):
        assert pool.reserve(sequence, i + 1)
        sequence.tokens.append(token)
        pool.keep_prefix(sequence, i + 1)
    assert (full.num_in_use, windowed.num_in_use) == (15, 4)
    pool.free(sequence)
    assert windowed.num_reusable == 6
    again = pool.new_sequence()
    assert pool.reuse_prefix(again, [*tokens, 99]) == 30
    assert again.tables[1][:13] == [windowed.null_block] * 13
    assert windowed.num_in_use == 2  # positions 26 to 29: with the next query's own, a window of 5
    pool.free(again)
    other = pool.new_sequence(b"other")
    for length, reused in ((8, 30), (10, 0)):  # takes the window's blocks that were used longest ago
        assert pool.reserve(other, length)
        assert pool.reuse_prefix(again, [*tokens, 99]) == reused
        pool.free(again)


def test_room_in_windows_is_for_one_step_however_long_a_prompt_is() -> None:
    pool = BlockPool(40, 2, {3: 8}, lookahead_tokens=2)
    sequence = pool.new_sequence()
    most = 0
    while len(sequence) < 60:
        assert pool.reserve(sequence, 60, 8)
        most = max(most, pool.groups[1].num_in_use)
        assert pool.is_reserved(sequence, len(sequence) + 4)
        sequence.tokens.extend(range(4))
    assert most == (8 + 2 + 2) // 2  # a step, the lookahead, and what else the window reads


def test_a_prefix_ends_where_it_may() -> None:
    """Recurrent layers go on after some blocks only."""
    pool, prompt = BlockPool(8, 2), [1, 2, 3, 4, 5, 6]
    sequence = CachedSequence()
    assert pool.reserve(sequence, 6)
    sequence.tokens.extend(prompt)
    pool.keep_prefix(sequence, 6)
    second = sequence.block_digests[1]
    found = [pool.reuse_prefix(CachedSequence(), [*prompt, 7], ends=ends) for ends in (None, {second}, set())]
    assert found == [6, 4, 0]


def test_copies_of_copies_come_one_after_another() -> None:
    pool = BlockPool(8, 4)
    first = grown(pool, [1, 2])
    second = pool.fork(first)
    assert pool.reserve(second, 3)
    third = pool.fork(second)
    assert pool.reserve(third, 3)
    assert [len(pairs) for pairs in prepared(pool)[0]] == [1, 1]
    assert prepared(pool) == ([], [])


def test_copies_that_are_repeated_find_their_sources_as_they_were() -> None:
    """A block that is copied, then given to another as a copy, is written in a later call."""
    pool = BlockPool(3, 4)
    first, other = grown(pool, [1, 2]), grown(pool, [3, 4])
    fork = pool.fork(first)
    assert pool.reserve(fork, 3)
    pool.free(first)
    assert pool.reserve(pool.fork(other), 3)
    assert prepared(pool)[0] == [[(0, 2)], [(1, 0)]]


def test_a_kept_block_that_is_written_again_is_not_found() -> None:
    pool = BlockPool(4, 2)
    sequence = grown(pool, [1, 2])
    pool.keep_prefix(sequence, 2)
    pool.truncate(sequence, 1)
    assert pool.reserve(sequence, 2)
    sequence.tokens.append(3)
    assert pool.reuse_prefix(CachedSequence(), [1, 2, 0]) == 0


def test_what_follows_a_rewritten_block_is_kept_under_its_new_prefix() -> None:
    pool = BlockPool(8, 2)
    sequence = grown(pool, [1, 1])
    pool.keep_prefix(sequence, 2)
    pool.truncate(sequence, 0)
    assert pool.reserve(sequence, 4)
    sequence.tokens.extend([5, 5, 6, 6])
    pool.keep_prefix(sequence, 4)
    assert pool.reuse_prefix(CachedSequence(), [1, 1, 6, 6, 0]) == 2
    assert pool.reuse_prefix(CachedSequence(), [5, 5, 6, 6, 0]) == 4
