"""The cached states of many sequences on one model, brought to their logs before every step."""

from __future__ import annotations

from collections.abc import Container, Iterable

from specdec.models.blocks import CachedSequence
from specdec.models.runner import ModelRunner
from specdec.protocol.marks import common_prefix_length
from specdec.sampling.params import SequenceSpec


class SequenceStates:
    """One cached sequence per key, and room made for those that come first.

    There is no rollback call: ``align`` keeps the longest common prefix of what is cached and what is wanted.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequences: dict[str, CachedSequence] = {}
        self.num_reused_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def align(self, key: str, tokens: list[int], agreed: int = 0, salt: bytes | None = b"") -> CachedSequence:
        """The state of ``key``, cut back so that it is a proper prefix of ``tokens``.

        At least the last token is left to be read, so that the next forward pass gives its logits.

        Args:
            key: The sequence; a state is begun where there is none.
            tokens: Committed tokens, and what is drafted after them.
            agreed: Length up to which the cached tokens are known to equal ``tokens``, as far as they go.
            salt: A state that is begun takes its first blocks from what others with this salt left; None takes none.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = self._runner.new_sequence(salt)
            agreed = self._runner.pool.reuse_prefix(sequence, tokens)
            self.num_reused_tokens += agreed
        cached = sequence.tokens
        keep = common_prefix_length(cached, tokens, min(agreed, len(cached), len(tokens)))
        keep = min(keep, len(tokens) - 1)
        if keep < len(cached):
            self._runner.truncate(sequence, keep)
        return sequence

    def make_room(self, key: str, length: int, yielding: Iterable[str]) -> bool:
        """Reserve blocks for ``length`` tokens of ``key``; if need be of ``yielding``'s, first to last."""
        sequence = self._sequences[key]
        if self._runner.reserve(sequence, length):
            return True
        for other in yielding:
            if other in self._sequences:
                self.release(other)
                if self._runner.reserve(sequence, length):
                    return True
        return False

    def length(self, key: str) -> int:
        """Cached tokens of a sequence; 0 if nothing is held for it."""
        sequence = self._sequences.get(key)
        return 0 if sequence is None else len(sequence.tokens)

    def idle(self, active: Container[str]) -> list[str]:
        """Keys held that are not among ``active``."""
        return [key for key in self._sequences if key not in active]

    def truncate(self, key: str, length: int) -> None:
        """Keep the first ``length`` cached tokens of a sequence."""
        self._runner.truncate(self._sequences[key], length)

    def keep_prefix(self, key: str, verified_length: int) -> None:
        """Offer the full blocks of a sequence's first tokens, which are committed, to others that begin like it."""
        self._runner.pool.keep_prefix(self._sequences[key], verified_length)

    def gauges(self) -> dict[str, float]:
        """What is held now; blocks kept only for prefix reuse count as free."""
        pool = self._runner.pool
        return {
            "num_cached_sequences": float(len(self._sequences)),
            "num_reused_tokens": float(self.num_reused_tokens),
            "kv_blocks_in_use": float(pool.num_in_use),
            "kv_cache_usage_perc": pool.num_in_use / pool.num_blocks,
        }

    def release(self, key: str) -> None:
        """Free what is held for a sequence; unknown keys are ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._runner.free(sequence)


def prefix_salt(spec: SequenceSpec) -> bytes | None:
    """With whom a sequence shares cached prefixes; with nobody where every prompt position's logits are wanted."""
    return None if spec.sampling.prompt_logprobs is not None else spec.cache_salt.encode()
