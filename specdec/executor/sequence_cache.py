"""What is cached of sequences, without a model: blocks of attention layers, and recurrent states beside them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from specdec.cache.blocks import BlockPool, CachedSequence
from specdec.cache.recurrent.opaque import SnapshotPool
from specdec.cache.recurrent.pool import StatePool
from specdec.core.tokens import TokenSequence


class SequenceCache:
    """Room for sequences, which grow, are cut back, fork, and share what they begin with.

    Args:
        pool: The blocks.
        states: The recurrent states; None where the model has none.

    Attributes:
        pool: As given.
        states: As given.
    """

    def __init__(self, pool: BlockPool, states: StatePool | SnapshotPool | None = None) -> None:
        self.pool, self.states = pool, states

    @property
    def max_rollback(self) -> int | None:
        """Most tokens that can be taken back for sure without reading others anew; None: any number."""
        limits = [self.pool.max_rollback, None if self.states is None else self.states.window.num_tokens]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def shares_prefixes(self) -> bool:
        """Whether what is cached of one prompt serves others that begin like it."""
        return self.states is None or (isinstance(self.states, StatePool) and self.states.prefixes.most > 0)

    def keep_prefix(self, sequence: CachedSequence, verified_length: int) -> None:
        """Offer the full blocks of the first ``verified_length`` tokens, whose state is final, for reuse."""
        self.pool.keep_prefix(sequence, verified_length)
        if isinstance(self.states, StatePool) and sequence.state is not None:
            self.states.keep_prefix(sequence.state, sequence.block_digests, self.pool.block_size)

    def keep_prefixes(self, verified: Sequence[tuple[CachedSequence, int]]) -> None:
        """:meth:`keep_prefix` of several sequences; most of them have no new full block."""
        size, has_states = self.pool.block_size, self.states is not None
        for sequence, length in verified:
            if has_states or length // size > len(sequence.block_digests):
                self.keep_prefix(sequence, length)

    def find_prefix(
        self, digests: list[bytes], salt: bytes, tokens: TokenSequence, num_blocks: int, num_known: int = 0
    ) -> int:
        """How many of the first ``num_blocks`` blocks of ``tokens`` :meth:`reuse_prefix` would find.

        Recurrent layers go as far as a copy of their state was kept. For the arguments see
        :meth:`BlockPool.find_prefix`.
        """
        return self.pool.find_prefix(digests, salt, tokens, num_blocks, self._prefix_ends, num_known)

    def reuse_prefix(self, sequence: CachedSequence, tokens: TokenSequence, digests: list[bytes] | None = None) -> int:
        """Fill an empty sequence with the longest kept prefix of ``tokens``, in full blocks.

        At least one token is left over. Recurrent layers go as far as a copy of their state was kept.

        Args:
            sequence: Holds nothing.
            tokens: What it will hold.
            digests: Of the first blocks of ``tokens``, where some are known.

        Returns:
            Number of tokens now cached.
        """
        length = self.pool.reuse_prefix(sequence, tokens, digests, self._prefix_ends)
        if length and isinstance(self.states, StatePool):
            sequence.state = self.states.reuse_prefix(sequence.block_digests[-1], length)
            if sequence.state is None:  # no slot is free
                self.pool.truncate(sequence, 0)
        return len(sequence)

    @property
    def _prefix_ends(self) -> Container[bytes] | None:
        """Blocks after which recurrent layers can go on; None where there are no such layers."""
        return self.states.prefixes if isinstance(self.states, StatePool) else None

    def new_sequence(self, salt: bytes | None = b"") -> CachedSequence:
        """An empty sequence; see :class:`CachedSequence` for ``salt``."""
        return self.pool.new_sequence(salt if self.shares_prefixes else None)

    def reserve(self, sequence: CachedSequence, length: int, num_step_tokens: int | None = None) -> bool:
        """Make room for ``length`` positions in all, and for a recurrent state.

        False, with nothing changed, where there is none. For the arguments see :meth:`BlockPool.reserve`.
        """
        if self.states is None or sequence.state is not None:
            return self.pool.reserve(sequence, length, num_step_tokens)
        if not self.states.num_free or not self.pool.reserve(sequence, length, num_step_tokens):
            return False
        sequence.state = self.states.take()
        return True

    def fits(
        self,
        sequence: CachedSequence,
        length: int,
        others: Sequence[CachedSequence],
        num_step_tokens: int | None = None,
    ) -> bool:
        """Whether room for ``length`` positions, and a state, could be made by freeing ``others``."""
        can_have_state = sequence.state is not None or any(other.state is not None for other in others)
        if self.states is not None and not (can_have_state or self.states.num_free):
            return False
        return self.pool.fits(sequence, length, others, num_step_tokens)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget what is cached from position ``length`` on, and give back reserved room.

        A sequence whose recurrent states or windows do not reach back to ``length`` is cut to 0: look at its length
        afterwards.
        """
        if sequence.state is not None and length < sequence.state.oldest:
            length = 0
        self.pool.truncate(sequence, length)
        if len(sequence.tokens.array):
            return
        self._forget(sequence)
        if self.states is not None and sequence.state is not None:
            self.states.give_back(sequence.state)
            sequence.state = None

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A sequence with the same past; the two share their blocks until one of them writes.

        Recurrent states are copied; where no slot is free for them the fork is empty.
        """
        if self.states is None or sequence.state is None:
            return self.pool.fork(sequence)
        state = self.states.copy(sequence.state)
        if state is None:
            return self.new_sequence(sequence.salt)
        fork = self.pool.fork(sequence)
        fork.state = state
        return fork

    def free(self, sequence: CachedSequence) -> None:
        """Forget a sequence and give back its blocks and its state."""
        self.truncate(sequence, 0)

    def _forget(self, sequence: CachedSequence) -> None:
        """Called when nothing of a sequence is cached any more, for what a subclass keeps beside it."""
