"""The cached states of many sequences on one model, brought to their logs before every step."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.models.blocks import CachedSequence
from specdec.models.runner import ModelRunner
from specdec.protocol.marks import common_prefix_length
from specdec.sampling.params import SequenceSpec
from specdec.tokens import TokenSequence
from specdec.types import Adapter

Rank = tuple[bool, float, str]
"""Who goes first where room is short: sequences before branches, then by time of arrival, then by name."""


def rank_of(key: str, spec: SequenceSpec, is_branch: bool = False) -> Rank:
    """The rank of a sequence or branch."""
    return is_branch, spec.arrival_s, key


class SequenceStates:
    """One cached sequence per key, and room made for those that come first.

    There is no rollback call: ``align`` keeps the longest common prefix of what is cached and what is wanted.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequences: dict[str, CachedSequence] = {}
        self._ranks: dict[str, Rank] = {}
        self.num_reused_tokens = 0
        self.num_evictions = 0
        self.num_reread_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def prepare(
        self,
        key: str,
        tokens: TokenSequence,
        agreed: int,
        salt: bytes | None,
        rank: Rank,
        fork_of: str | None = None,
        num_ahead: int = 0,
    ) -> CachedSequence | None:
        """The state of ``key``, cut back so that it is a proper prefix of ``tokens``, with room for all of them.

        At least the last token is left to be read, so that the next forward pass gives its logits. Where blocks are
        short, keys of a higher rank lose theirs, the last first, whether they have work now or not: so the first one
        always gets on. None where even that does not suffice: then nobody loses anything, and ``key`` keeps what it
        held before. None, too, where there is something to copy and no state slot for the copy, or where its state does
        not reach back so far: a copy reads no prompt again.

        Args:
            key: The sequence or branch; a state is begun where there is none.
            tokens: Committed tokens, and what is drafted after them.
            agreed: Length up to which the cached tokens are known to equal ``tokens``, as far as they go.
            salt: A state that is begun takes its first blocks from what others with this salt left; None takes none.
            rank: Of the key.
            fork_of: A state that is begun is a copy of this one, if there is one.
            num_ahead: Positions after all tokens for which there must be room, too.
        """
        sequence = self._sequences.get(key)
        parent = None if fork_of is None else self._sequences.get(fork_of)
        begun = sequence is None
        if sequence is None and parent is not None:
            sequence = self._fork(parent, tokens, agreed)
            if sequence is None:
                return None
        elif sequence is None:
            sequence = self._runner.new_sequence(salt)
            agreed = self._runner.reuse_prefix(sequence, tokens)
        keep = self._cut_back(sequence, tokens, agreed)
        if keep and not sequence.tokens:
            # Recurrent states do not reach back so far, but a copy kept for others may cover a part, or even more.
            self._runner.reuse_prefix(sequence, tokens)
        self.num_reread_tokens += max(0, keep - len(sequence))
        if not self._make_room(sequence, len(tokens) + num_ahead, rank):
            if begun:
                self._runner.free(sequence)
            return None
        if begun and fork_of is None:
            self.num_reused_tokens += agreed
        self._sequences[key], self._ranks[key] = sequence, rank
        return sequence

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

    def _make_room(self, sequence: CachedSequence, length: int, rank: Rank) -> bool:
        if self._runner.reserve(sequence, length):
            return True
        later = sorted(
            (other for other, its_rank in self._ranks.items() if its_rank > rank), key=self._ranks.__getitem__
        )
        if not self._runner.fits(sequence, length, [self._sequences[other] for other in later]):
            return False
        while not self._runner.reserve(sequence, length):
            self.num_evictions += 1
            self.release(later.pop())
        return True

    def rename(self, key: str, new_key: str) -> None:
        """What is held for ``key`` is held for ``new_key`` from now on, in place of what that held."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        rank = self._ranks.pop(key)
        rank = self._ranks.get(new_key, (False, rank[1], new_key))
        self.release(new_key)
        self._sequences[new_key], self._ranks[new_key] = sequence, rank

    def length(self, key: str) -> int:
        """Cached tokens of a sequence; 0 if nothing is held for it."""
        sequence = self._sequences.get(key)
        return 0 if sequence is None else len(sequence.tokens)

    def truncate(self, key: str, length: int) -> None:
        """Keep the first ``length`` cached tokens of a sequence; fewer where its state does not reach back so far."""
        sequence = self._sequences[key]
        self._runner.truncate(sequence, length)
        self.num_reread_tokens += max(0, length - len(sequence))

    def keep_paths(self, paths: Sequence[tuple[str, int, Sequence[int]]]) -> None:
        """Keep one path of each tree that was cached (key, start, path): see :meth:`ModelRunner.keep_paths`."""
        self._runner.keep_paths([(self._sequences[key], start, path) for key, start, path in paths])

    def keep_prefix(self, key: str, verified_length: int) -> None:
        """Offer the full blocks of a sequence's first tokens, which are committed, to others that begin like it."""
        self._runner.keep_prefix(self._sequences[key], verified_length)

    def gauges(self) -> dict[str, float]:
        """What is held now, and counts since the start; what is kept only for prefix reuse counts as free."""
        pool, states = self._runner.pool, self._runner.states
        return {
            "num_cached_sequences": float(len(self._sequences)),
            "num_reused_tokens": float(self.num_reused_tokens),
            "num_evictions": float(self.num_evictions),
            "kv_blocks_in_use": float(pool.num_in_use),
            "kv_blocks_reusable": float(pool.num_reusable),
            "kv_cache_usage_perc": pool.num_in_use / pool.num_blocks,
            "num_state_slots": 0.0 if states is None else float(states.num_free + states.num_in_use),
            "state_slots_in_use": 0.0 if states is None else float(states.num_in_use),
            "state_slots_reusable": 0.0 if states is None else float(states.num_reusable),
            "num_reread_tokens": float(self.num_reread_tokens),
        }

    def release(self, key: str) -> None:
        """Free what is held for a sequence; unknown keys are ignored."""
        self._ranks.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._runner.free(sequence)


def _num_kept(sequence: CachedSequence, tokens: TokenSequence, agreed: int) -> int:
    """Length of what is cached that ``tokens`` go on from, which are known to agree up to ``agreed``."""
    cached = sequence.tokens.array
    keep = common_prefix_length(cached, tokens, min(agreed, len(cached), len(tokens)))
    return min(keep, len(tokens) - 1)


def prefix_salt(spec: SequenceSpec, adapter: Adapter | None) -> bytes | None:
    """With whom a sequence shares cached prefixes; with nobody where every prompt position's logits are wanted."""
    return None if spec.sampling.prompt_logprobs is not None else spec.prefix_group(adapter).encode()
