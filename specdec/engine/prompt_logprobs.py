"""Log probabilities of a prompt's own tokens, gathered chunk by chunk while it is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.core.backends import VerifyJob
from specdec.core.types import PromptLogprobs, TokenLogprobs
from specdec.engine.scheduler import ScheduledRow
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.slices import max_slice_rows


class PromptReader:
    """Keeps what was reported of prompts that are being read.

    A prompt is read from its beginning for this: cached prefixes of others have no logits any more.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[TokenLogprobs | None]] = {}

    def wants(self, job: VerifyJob) -> bool:
        """Whether all positions of the job's log need logits: it is a prompt, and its request asks for them."""
        return job.spec.sampling.prompt_logprobs is not None and len(job.log) == job.spec.output_start

    def num_read(self, job: VerifyJob) -> int:
        """How many of the prompt's tokens were taken."""
        return len(self._entries.get(job.key, (None,))) - 1

    def bounded(self, rows: Sequence[ScheduledRow], jobs: Sequence[VerifyJob], vocab_size: int) -> list[ScheduledRow]:
        """The rows of a step, those that want logits of a prompt with no more tokens than are sampled at once.

        All of them together get so many; each gets one at least.

        Args:
            rows: As scheduled.
            jobs: Those that the rows name by their numbers.
            vocab_size: Columns of the logits.
        """
        left = max_slice_rows(vocab_size)
        bounded = list(rows)
        for place, row in enumerate(rows):
            if self.wants(jobs[row.request]):
                count = max(1, min(row.num_new_tokens, left))
                left -= count
                if count < row.num_new_tokens:
                    bounded[place] = row._replace(num_new_tokens=count, num_draft_tokens=0)
        return bounded

    def read(self, job: VerifyJob, first: int, logits: Tensor) -> None:
        """Take a chunk.

        Args:
            job: For which ``wants`` holds.
            first: Position of the chunk's first token; 0 begins anew.
            logits: float32 [M, V]: of positions [first, first + M); the last of a prompt says nothing of it.
        """
        entries = self._entries.setdefault(job.key, [None])
        if first == 0:
            entries[:] = [None]
        tokens = job.log.tail(first + 1, first + 1 + logits.shape[0])
        num_top = job.spec.sampling.prompt_logprobs or 0
        entries += token_logprobs(logits[: len(tokens)], tokens, [num_top] * len(tokens))

    def take(self, job: VerifyJob) -> PromptLogprobs | None:
        """All of a prompt's entries, once it is read; None where none were asked for."""
        entries = self._entries.pop(job.key, None)
        return None if entries is None else tuple(entries)

    def release(self, key: str) -> None:
        """Forget a sequence."""
        self._entries.pop(key, None)
