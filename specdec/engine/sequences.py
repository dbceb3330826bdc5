"""The cached states of many sequences on one model, brought to their logs before every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.cache.blocks import CachedSequence
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenArray, TokenSequence, as_array, common_prefix_length
from specdec.core.types import Adapter
from specdec.engine.scheduler import CachedPrefix
from specdec.executor.runner import ModelRunner

Rank = tuple[int, int, float, str]
"""Who goes first where room is short: by one of the three below, then by priority, time of arrival and name."""
DECIDED, DRAFTED, BRANCH = range(3)
"""A model that both decides and drafts has room for what it decides first."""


def rank_of(key: str, spec: SequenceSpec, place: int) -> Rank:
    """The rank of a sequence or branch, ``place`` being ``DECIDED``, ``DRAFTED`` or ``BRANCH``."""
    return place, *spec.order, key


@dataclass(slots=True)
class _Wanted:
    """What a sequence should hold after the step, and how it may come by it; see :meth:`SequenceStates.want`."""

    tokens: TokenSequence
    agreed: int
    salt: bytes | None
    rank: Rank
    fork_of: str | None
    num_shared: int
    num_held: int = 0
    num_lost: int = 0


@dataclass(slots=True)
class _Prefix:
    """What a waiting sequence has found in the prefix cache, so that it looks and hashes no more than it has to.

    Attributes:
        source: What it wanted when it looked last. The same array has the same tokens.
        tokens: Those of the hashed blocks.
        digests: Of its first blocks.
        num_blocks: How many it would reuse.
        num_found: How many of them there were.
        version: Of the pool at that time; None if it has to look again.
    """

    source: TokenSequence = ()
    tokens: TokenArray = field(default_factory=lambda: as_array(()))
    digests: list[bytes] = field(default_factory=list)
    num_blocks: int = 0
    num_found: int = 0
    version: int | None = None

    def is_of(self, tokens: TokenSequence) -> bool:
        """Check whether the hashed tokens are the first of ``tokens``."""
        is_same = isinstance(tokens, np.ndarray) and tokens is self.source
        return is_same or common_prefix_length(self.tokens, tokens) == len(self.tokens)


class SequenceStates:
    """One cached sequence per key: a :class:`specdec.engine.scheduler.KVCache` over a model's blocks and states.

    Before each step :meth:`want` says what every sequence should hold: the longest common prefix of what is cached and
    what is wanted stays. After a verification :meth:`truncate` takes back what was refused. Room is taken when the
    scheduler allocates it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequences: dict[str, CachedSequence] = {}
        self._ranks: dict[str, Rank] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._prefixes: dict[str, _Prefix] = {}  # of sequences that wait
        self.num_reused_tokens = 0
        self.num_evictions = 0
        self.num_reread_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def begin_step(self) -> None:
        """Forget what the last step wanted. What waiting sequences have found stays."""
        self._wanted.clear()

    def want(
        self,
        key: str,
        tokens: TokenSequence,
        agreed: int,
        salt: bytes | None,
        rank: Rank,
        *,
        fork_of: str | None = None,
        num_committed: int | None = None,
    ) -> int:
        """Say what a sequence should hold. What it holds already is cut back to a proper prefix of that.

        At least the last token is left to be computed, so that the next forward pass gives its logits.

        Args:
            key: The sequence or branch.
            tokens: Committed tokens, and what is drafted after them. Must not change until the next step.
            agreed: Length up to which the cached tokens are known to equal ``tokens``, as far as they go.
            salt: A sequence that holds nothing takes its first blocks from what others with this salt left; None
                takes none.
            rank: Of the key. Where blocks are short, keys of a higher rank lose theirs.
            fork_of: A branch begins as a copy of this sequence. It reads no prompt.
            num_committed: How many of ``tokens`` are committed; all by default.

        Returns:
            How many tokens it holds now.
        """
        num_shared = len(tokens) if num_committed is None else min(num_committed, len(tokens))
        wanted = self._wanted[key] = _Wanted(tokens, agreed, salt, rank, fork_of, num_shared)
        sequence = self._sequences.get(key)
        if sequence is None:
            return 0
        self._ranks[key] = rank
        keep = self._cut_back(sequence, tokens, agreed)
        num_left = wanted.num_held = len(sequence)
        if num_left:
            self.num_reread_tokens += keep - num_left
        else:
            # Recurrent states do not reach back so far. A copy kept for others may cover a part, or even more.
            wanted.num_lost = keep
            self.release(key)
        return num_left

    def num_computed_tokens(self, key: str) -> int:
        """Cached tokens of a sequence; 0 if nothing is held for it."""
        sequence = self._sequences.get(key)
        return 0 if sequence is None else len(sequence)

    def find_prefix(self, key: str) -> CachedPrefix:
        """What a sequence that holds nothing would begin with: a copy of its parent, or a cached prefix."""
        wanted = self._wanted[key]
        if wanted.fork_of is not None:
            parent = self._sequences.get(wanted.fork_of)
            return CachedPrefix(0 if parent is None else _num_kept(parent, wanted.tokens, wanted.agreed))
        if wanted.salt is None or not self._runner.shares_prefixes:
            return CachedPrefix(0)
        pool = self._runner.pool
        num_blocks = min(wanted.num_shared, len(wanted.tokens) - 1) // pool.block_size
        prefix = self._prefix(key, wanted)
        if prefix.version != pool.version or prefix.num_blocks != num_blocks or self._runner.states is not None:
            digests, num_known = prefix.digests, min(prefix.num_found, num_blocks)
            num_hashed = len(digests)
            prefix.num_found = self._runner.find_prefix(
                *(digests, wanted.salt, wanted.tokens, num_blocks), num_known=num_known
            )
            if len(digests) > num_hashed:
                prefix.tokens = as_array(wanted.tokens[: len(digests) * pool.block_size]).copy()
            prefix.num_blocks, prefix.version = num_blocks, pool.version
        next_block = prefix.digests[prefix.num_found] if prefix.num_found < num_blocks else None
        return CachedPrefix(prefix.num_found * pool.block_size, next_block)

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        """Make room for all that a sequence wants; see :class:`specdec.engine.scheduler.KVCache`.

        None, too, if a branch has no sequence to begin with, finds no state slot, or its sequence's state does not
        reach back to where it leaves it.
        """
        wanted = self._wanted[key]
        sequence = self._sequences.get(key)
        if sequence is not None:
            has_room = self._make_room(sequence, len(wanted.tokens), num_step_tokens, wanted.rank)
            return len(sequence) if has_room else None
        if wanted.num_held or not self._may_fit(key, wanted):
            return None
        sequence = self._begin(key, wanted)
        if sequence is None:
            return None
        if not self._make_room(sequence, len(wanted.tokens), num_step_tokens, wanted.rank):
            self._runner.free(sequence)
            return None
        if wanted.fork_of is None:
            self.num_reused_tokens += len(sequence)
            self.num_reread_tokens += max(0, wanted.num_lost - len(sequence))
            self._prefixes.pop(key, None)
        self._sequences[key], self._ranks[key] = sequence, wanted.rank
        return len(sequence)

    def extend(self, key: str, length: int) -> bool:
        """Make room for ``length`` tokens of a sequence in all, taking it from nobody."""
        return self._runner.reserve(self._sequences[key], length)

    def extend_all(self, keys: Sequence[str], lengths: Sequence[int]) -> bool:
        """Make room for so many tokens of each sequence, or for none: see :class:`specdec.engine.scheduler.KVCache`."""
        sequences = self._sequences
        return self._runner.pool.reserve_all([sequences[key] for key in keys], lengths)

    def blocks(self, key: str, start: int, stop: int) -> list[bytes]:
        """Digests of the full, committed blocks of a sequence that positions [start, stop) lie in."""
        wanted, sequence = self._wanted[key], self._sequences[key]
        if wanted.salt is None or wanted.fork_of is not None or not self._runner.shares_prefixes:
            return []
        block_size = self._runner.pool.block_size
        num_blocks = min(-(-stop // block_size), wanted.num_shared // block_size)
        digests = list(sequence.block_digests)
        self._runner.pool.extend_digests(digests, wanted.salt, wanted.tokens, num_blocks)
        return digests[start // block_size : num_blocks]

    def get(self, key: str) -> CachedSequence | None:
        """What a key holds, if anything."""
        return self._sequences.get(key)

    def sequence(self, key: str) -> CachedSequence:
        """What a key holds. Raises KeyError if that is nothing."""
        return self._sequences[key]

    def _begin(self, key: str, wanted: _Wanted) -> CachedSequence | None:
        """A sequence that holds what it need not compute; None if it is a branch and cannot begin."""
        if wanted.fork_of is not None:
            parent = self._sequences.get(wanted.fork_of)
            return None if parent is None else self._fork(parent, wanted.tokens, wanted.agreed)
        sequence = self._runner.new_sequence(wanted.salt)
        self._runner.reuse_prefix(sequence, wanted.tokens, self._prefix(key, wanted).digests)
        return sequence

    def _may_fit(self, key: str, wanted: _Wanted) -> bool:
        """Check whether there may be room for a sequence that holds nothing, before it takes references to blocks."""
        prefix = self._prefixes.get(key)
        if wanted.fork_of is not None or prefix is None:
            return True
        later = [self._sequences[other] for other, rank in self._ranks.items() if rank > wanted.rank]
        return self._runner.pool.may_fit(len(wanted.tokens), prefix.digests[: prefix.num_found], later)

    def _prefix(self, key: str, wanted: _Wanted) -> _Prefix:
        """Get what a waiting sequence has found so far, if its first tokens are still the same."""
        prefix = self._prefixes.get(key)
        if prefix is None or not prefix.is_of(wanted.tokens):
            prefix = self._prefixes[key] = _Prefix()
        prefix.source = wanted.tokens
        return prefix

    def _fork(self, parent: CachedSequence, tokens: TokenSequence, agreed: int) -> CachedSequence | None:
        """A copy, as far as ``tokens`` go; None without a slot for its state, or where that does not reach back."""
        if parent.state is not None and parent.state.oldest > _num_kept(parent, tokens, agreed):
            return None
        fork = self._runner.fork(parent)
        self._cut_back(fork, tokens, agreed)
        return fork if fork.tokens or not parent.tokens else None

    def _cut_back(self, sequence: CachedSequence, tokens: TokenSequence, agreed: int) -> int:
        """Forget what is not in ``tokens`` before the last; gives the length to keep, if the state reaches so far."""
        keep = _num_kept(sequence, tokens, agreed)
        is_spoilt = sequence.state is not None and sequence.state.oldest > keep  # a failed step has half moved it
        if keep < len(sequence) or is_spoilt:
            self._runner.truncate(sequence, keep)
        return keep

    def _make_room(self, sequence: CachedSequence, length: int, num_step_tokens: int, rank: Rank) -> bool:
        if self._runner.reserve(sequence, length, num_step_tokens):
            return True
        later = sorted(
            (other for other, its_rank in self._ranks.items() if its_rank > rank), key=self._ranks.__getitem__
        )
        if not self._runner.fits(sequence, length, [self._sequences[other] for other in later], num_step_tokens):
            return False
        while not self._runner.reserve(sequence, length, num_step_tokens):
            self.num_evictions += 1
            self.release(later.pop())
        return True

    def rename(self, key: str, new_key: str) -> None:
        """What is held for ``key`` is held for ``new_key`` from now on, in place of what that held."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        rank = self._ranks.pop(key)
        rank = self._ranks.get(new_key, (DRAFTED, *rank[1:3], new_key))
        self.release(new_key)
        self._sequences[new_key], self._ranks[new_key] = sequence, rank

    def truncate(self, key: str, length: int) -> None:
        """Keep the first ``length`` cached tokens of a sequence; fewer where its state does not reach back so far."""
        sequence = self._sequences[key]
        self._runner.truncate(sequence, length)
        self.num_reread_tokens += max(0, length - len(sequence.tokens.array))

    def keep_paths(self, paths: Sequence[tuple[str, int, Sequence[int]]]) -> None:
        """Keep one path of each tree that was cached (key, start, path): see :meth:`ModelRunner.keep_paths`."""
        self._runner.keep_paths([(self._sequences[key], start, path) for key, start, path in paths])

    def keep_prefix(self, key: str, verified_length: int) -> None:
        """Offer the full blocks of a sequence's first tokens, which are committed, to others that begin like it."""
        self._runner.keep_prefix(self._sequences[key], verified_length)

    def metrics(self) -> dict[str, float]:
        """What is held now, and counts since the start; what is kept only for prefix reuse counts as free."""
        pool, states = self._runner.pool, self._runner.states
        return {
            "num_cached_sequences": float(len(self._sequences)),
            "num_reused_tokens": float(self.num_reused_tokens),
            "num_evictions": float(self.num_evictions),
            "kv_blocks_in_use": float(pool.num_in_use),
            "kv_blocks_reusable": float(pool.num_reusable),
            "kv_cache_usage_perc": pool.usage,
            "num_state_slots": 0.0 if states is None else float(states.num_free + states.num_in_use),
            "state_slots_in_use": 0.0 if states is None else float(states.num_in_use),
            "state_slots_reusable": 0.0 if states is None else float(states.num_reusable),
            "num_reread_tokens": float(self.num_reread_tokens),
        }

    def release(self, key: str) -> None:
        """Free what is held for a sequence; unknown keys are ignored."""
        self._ranks.pop(key, None)
        self._prefixes.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._runner.free(sequence)


def _num_kept(sequence: CachedSequence, tokens: TokenSequence, agreed: int) -> int:
    """Length of what is cached that ``tokens`` go on from, which are known to agree up to ``agreed``."""
    cached = sequence.tokens.array
    end = min(len(cached), len(tokens))
    keep = end if agreed >= end else common_prefix_length(cached, tokens, agreed)
    return min(keep, len(tokens) - 1)


def prefix_salt(spec: SequenceSpec, adapter: Adapter | None) -> bytes | None:
    """With whom a sequence shares cached prefixes; with nobody where every prompt position's logits are wanted."""
    return None if spec.sampling.prompt_logprobs is not None else spec.prefix_group(adapter).encode()
