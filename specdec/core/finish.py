"""When a sequence ends; applied token by token, so that nothing after its end is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.params import SequenceSpec
from specdec.core.types import Finish


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a sequence ends.

    Attributes:
        token_ids: What ends it with ``stop``.
        exempt_length: Length of the log, prompt and output, up to which its tokens end nothing.
        most_length: Length of the log at which it ends with ``length``.
    """

    token_ids: frozenset[int]
    exempt_length: int
    most_length: int

    @classmethod
    def of(cls, spec: SequenceSpec, max_model_len: int) -> Ending:
        """Of a sequence on a model whose longest log has ``max_model_len`` tokens."""
        exempt_length = spec.output_start + spec.sampling.min_tokens
        return cls(spec.ending_token_ids, exempt_length, min(spec.output_start + spec.max_tokens, max_model_len))

    def walk(self, tokens_before: int, run: Sequence[int]) -> tuple[int, Finish | None]:
        """How much of a run is committed, and how the sequence ends there: by an ending token first, then by length.

        Args:
            tokens_before: Length of the log before the run; the sequence is not finished there.
            run: Decided tokens.

        Returns:
            Number of the run's tokens to commit, the finishing one included, and the reason, None if it goes on:
            ``stop`` for an end-of-sequence or stop token with at least ``min_tokens`` output tokens before it;
            ``length`` at ``max_tokens`` or ``max_model_len``.
        """
        if tokens_before + len(run) < self.most_length and self.token_ids.isdisjoint(run):
            return len(run), None
        for num_committed, token in enumerate(run, start=1):
            if token in self.token_ids and tokens_before + num_committed > self.exempt_length:
                return num_committed, "stop"
            if tokens_before + num_committed >= self.most_length:
                return num_committed, "length"
        return len(run), None

    def of_log(self, output_start: int, output: Sequence[int]) -> Finish | None:
        """How a log that was opened is finished already, if it is; the prompt's tokens end nothing.

        A prompt that leaves no room for a token is finished by ``length``.
        """
        _, finish = self.walk(output_start, output)
        if finish is None and output_start + len(output) >= self.most_length:
            return "length"
        return finish
