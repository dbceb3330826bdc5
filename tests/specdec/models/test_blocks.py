"""The block pool against a simulated memory: what a sequence reads back is what it was given."""

import random
from copy import deepcopy

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.models.blocks import BlockPool, CachedSequence

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few tokens, so that prefixes meet


class PoolMachine(RuleBasedStateMachine):
    """Sequences that grow, shrink, fork and share prefixes in a pool that is nearly always short of blocks."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.memory = [-1] * (num_blocks * block_size)
        self.live: list[tuple[CachedSequence, list[int]]] = []

    def _slot(self, sequence: CachedSequence, position: int) -> int:
        size = self.pool.block_size
        return sequence.block_ids[position // size] * size + position % size

    def _copy(self, memory: list[int], waves: list[list[tuple[int, int]]]) -> None:
        size = self.pool.block_size
        for wave in waves:
            assert len({destination for _, destination in wave}) == len(wave), "written in no particular order"
            contents = [memory[source * size : (source + 1) * size] for source, _ in wave]
            for (_, destination), content in zip(wave, contents, strict=True):
                memory[destination * size : (destination + 1) * size] = content

    def _prepare(self, memory: list[int], pool: BlockPool) -> None:
        """Carry out the copies, then clear the blocks that have a new owner."""
        self._copy(memory, pool.take_copies())
        for block in pool.take_uncleared():
            memory[block * pool.block_size : (block + 1) * pool.block_size] = [-1] * pool.block_size

    def _forward(self, writes: list[tuple[CachedSequence, list[int], list[int]]]) -> None:
        """Prepare the blocks, then write the new tokens of several sequences."""
        self._prepare(self.memory, self.pool)
        for sequence, expected, tokens in writes:
            for token in tokens:
                expected.append(token)
                self.memory[self._slot(sequence, len(sequence.tokens))] = hash(tuple(expected))
                sequence.tokens.append(token)

    @rule(salt=st.sampled_from([b"", b"other", None]))
    def add(self, salt: bytes | None) -> None:
        self.live.append((CachedSequence(salt=salt), []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=TOKENS, lookahead=st.integers(0, 5))
    def grow(self, data: st.DataObject, tokens: list[int], lookahead: int) -> None:
        writes, taken = [], set[int]()
        for index in data.draw(st.sets(st.integers(0, len(self.live) - 1), min_size=1, max_size=3)):
            sequence, expected = self.live[index]
            length = len(sequence.tokens) + len(tokens) + lookahead
            before = (list(sequence.block_ids), self.pool.num_free)
            if self.pool.reserve(sequence, length):
                writes.append((sequence, expected, tokens))
                taken |= {*sequence.block_ids[len(before[0]) :]}
            else:
                assert (sequence.block_ids, self.pool.num_free) == before
                # One more than these is lacking where the tail is shared, and has to be copied.
                assert self.pool.num_free <= max(0, self.pool.blocks_for(length) - len(sequence.block_ids))
        for sequence, _, new in writes:
            assert self.pool.is_reserved(sequence, len(sequence.tokens) + len(new))
        self._forward(writes)
        written = {self._slot(sequence, i) for sequence, expected, _ in writes for i in range(len(expected))}
        size = self.pool.block_size
        slots = {block * size + i for block in taken for i in range(size)}
        assert all(self.memory[slot] == -1 for slot in slots - written), "a new owner finds what another left"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        sequence, expected = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(expected)))
        self.pool.truncate(sequence, length)
        del expected[length:]
        assert len(sequence.block_ids) == self.pool.blocks_for(length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, expected = data.draw(st.sampled_from(self.live))
        num_free = self.pool.num_free
        self.live.append((self.pool.fork(sequence), list(expected)))
        assert self.pool.num_free == num_free

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.free(sequence)
        assert not sequence.tokens
        assert not sequence.block_ids

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        sequence, expected = data.draw(st.sampled_from(self.live))
        self.pool.keep_prefix(sequence, data.draw(st.integers(0, len(expected))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), salt=st.sampled_from([b"", b"other", None]), more=TOKENS)
    def reuse(self, data: st.DataObject, salt: bytes | None, more: list[int]) -> None:
        tokens = [*data.draw(st.sampled_from(self.live))[1], *more]
        sequence = CachedSequence(salt=salt)
        length = self.pool.reuse_prefix(sequence, tokens)
        assert length < len(tokens)
        assert length % self.pool.block_size == 0
        self.live.append((sequence, tokens[:length]))

    @invariant()
    def accounts_balance(self) -> None:
        held = {block for sequence, _ in self.live for block in sequence.block_ids}
        assert self.pool.num_in_use == len(held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.pool.num_reusable <= self.pool.num_free

    @invariant()
    def everybody_reads_their_own(self) -> None:
        memory = list(self.memory)  # as the next step will see it: outstanding copies and clearing come first
        self._prepare(memory, deepcopy(self.pool))
        for sequence, expected in self.live:
            assert sequence.tokens == expected
            # What is cached at a position depends on all tokens up to it.
            for i in range(len(expected)):
                assert memory[self._slot(sequence, i)] == hash(tuple(expected[: i + 1]))


PoolMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
TestBlockPool = PoolMachine.TestCase


def grown(pool: BlockPool, tokens: list[int], salt: bytes | None = b"") -> CachedSequence:
    sequence = CachedSequence(salt=salt)
    assert pool.reserve(sequence, len(tokens))
    sequence.tokens.extend(tokens)
    return sequence


def test_copies_of_copies_come_in_waves() -> None:
    pool = BlockPool(8, 4)
    first = grown(pool, [1, 2])
    second = pool.fork(first)
    assert pool.reserve(second, 3)
    third = pool.fork(second)
    assert pool.reserve(third, 3)
    assert [len(wave) for wave in pool.take_copies()] == [1, 1]
    assert pool.take_copies() == []


def test_a_block_is_written_once_in_a_wave() -> None:
    pool = BlockPool(2, 4)
    first = grown(pool, [1, 2])
    for _ in range(2):
        other = pool.fork(first)
        assert pool.reserve(other, 3)
        pool.free(other)
    assert [len(wave) for wave in pool.take_copies()] == [1, 1]


def test_only_the_writer_of_a_shared_block_gets_a_copy() -> None:
    pool = BlockPool(8, 4)
    first = grown(pool, [1, 2, 3, 4, 5])
    second = pool.fork(first)
    assert pool.num_in_use == 2
    assert not pool.is_reserved(first, 6)
    assert pool.reserve(first, 6)
    assert pool.reserve(second, 6)  # now its only user
    assert pool.take_copies() == [[(second.block_ids[1], first.block_ids[1])]]
    assert pool.num_in_use == 3
    assert first.block_ids[0] == second.block_ids[0]


def test_a_copy_that_finds_no_block_is_refused_with_nothing_changed() -> None:
    pool = BlockPool(3, 4)
    first = grown(pool, [1, 2])
    second = pool.fork(first)
    grown(pool, [7] * 8)
    before = list(second.block_ids)
    assert pool.num_free == 0
    assert not pool.reserve(second, 3)
    assert second.block_ids == before
    assert pool.take_copies() == []
    pool.free(first)
    assert pool.reserve(second, 3)


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


def test_only_blocks_that_another_has_held_are_cleared_and_copies_are_not() -> None:
    pool = BlockPool(3, 4)
    first = grown(pool, [1, 2, 3, 4, 5])
    assert pool.take_uncleared() == []  # nobody has held them before
    left = list(first.block_ids)
    pool.free(first)
    second = grown(pool, [1, 2, 3, 4, 5, 6])
    assert pool.take_uncleared() == sorted(left)
    third = pool.fork(second)
    assert pool.reserve(third, 8)  # copies the tail to the last block
    assert pool.take_uncleared() == []
    copy = third.block_ids[1]
    pool.free(third)
    assert grown(pool, [7]).block_ids == [copy]
    assert pool.take_uncleared() == [copy]  # after the copies


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


def test_sequences_grow_into_consecutive_blocks() -> None:
    pool = BlockPool(64, 4)
    sequences = [CachedSequence() for _ in range(4)]
    for length in range(1, 49):
        for sequence in sequences:
            assert pool.reserve(sequence, length)
            sequence.tokens.append(0)
    for sequence in sequences:
        assert sequence.block_ids == list(range(sequence.block_ids[0], sequence.block_ids[0] + 12))


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
        pool.take_copies()
