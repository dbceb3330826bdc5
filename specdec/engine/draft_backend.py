"""The draft model behind the drafter's state machine: one more token for every chain, in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.device_errors import device_losses
from specdec.engine.rules import propose
from specdec.engine.states import SequenceStates, prefix_salt, rank_of
from specdec.engine.translator import Translator
from specdec.models.runner import ModelRunner, RowInput
from specdec.protocol.backends import DraftJob, Proposal, Status
from specdec.sampling.pipeline import RowGroup, Sampler

_WAITING = Proposal(Status.WAITING)
_PREFILLING = Proposal(Status.PREFILLING)
_FAILED = Proposal(Status.FAILED)


class ModelDrafter:
    """A :class:`specdec.protocol.backends.DraftBackend` over a causal language model.

    It draws with the same pipeline and the same noise as the target (rule 10), so that its tokens are the target's as
    often as the two distributions allow.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        max_model_len: Longest sequence in tokens that the model can read.
        max_batch_tokens: Most tokens forwarded per step, where no more than half as many have a job: each gets one.
        states: Of the runner, where another backend uses it too; by default there is none.
        translator: Where the model's vocabulary is not the target's, which the sampler and all jobs speak.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        max_model_len: int,
        max_batch_tokens: int,
        states: SequenceStates | None = None,
        translator: Translator | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._states = states if states is not None else SequenceStates(runner)
        self._translator = translator
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the draft model can read."""
        return self._max_model_len

    def last_progress(self) -> float:
        """Monotonic time at which the newest layer of a step was done; from any thread."""
        return self._runner.progress.newest_s

    def gauges(self) -> dict[str, float]:
        """What is held now, for the worker's report."""
        return self._states.gauges()

    def rest(self) -> None:
        """Nothing is to be done."""

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on."""
        self._states.rename(key, new_key)
        if self._translator is not None:
            self._translator.rename(key, new_key)

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._states.release(key)
        if self._translator is not None:
            self._translator.release(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One step over a ragged batch; see :meth:`specdec.protocol.backends.DraftBackend.propose`."""
        with device_losses():
            return self._propose(jobs)

    def _propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        results = [_WAITING] * len(jobs)
        rows: list[RowInput] = []
        deciding: list[int] = []
        # A prompt leaves the others a token each, as a branch that waits is late, and gets half a chunk at the least.
        budget = max(self._max_batch_tokens, len(jobs) - 1 + max(1, self._max_batch_tokens // 2))
        for i, job in enumerate(jobs if self._translator is None else map(self._translator.translated, jobs)):
            if self._translator is not None and len(job.tokens) > self._max_model_len:
                results[i] = _FAILED  # the model's own spelling of it is longer than the model can read
                continue
            num_after = len(jobs) - i - 1
            row = self._place(job, budget - num_after)
            if row is not None:
                budget -= len(row.tokens)
                rows.append(row)
                results[i] = _PREFILLING
                self._states.keep_prefix(job.key, job.num_committed)
                if row.num_logits:
                    deciding.append(i)
        if rows:
            logits = self._runner.forward(rows)
            if self._translator is not None:
                logits = self._translator.logits(logits)
            groups = self._sampler.masked([RowGroup(jobs[i].spec, jobs[i].tokens) for i in deciding])
            num_guesses = max((jobs[i].num_guesses for i in deciding), default=0)
            proposed = propose(self._sampler, logits, groups, num_guesses)
            failures = self._sampler.take_failures()
            for i, group, drawn in zip(deciding, groups, proposed, strict=True):
                if id(group) in failures:
                    results[i] = _FAILED
                    continue
                count = jobs[i].num_guesses
                guesses, likelihoods = drawn.guesses[:count], drawn.likelihoods[: 1 + count]
                results[i] = Proposal(Status.DECIDED, drawn.token, drawn.candidates, guesses, likelihoods)
        return results

    def _place(self, job: DraftJob, budget: int) -> RowInput | None:
        if not self._can_begin(job) or not self._sampler.is_ready(job.spec):
            return None
        rank = rank_of(job.key, job.spec, is_branch=job.fork_of is not None)
        sequence = self._states.prepare(job.key, job.tokens, job.agreed, prefix_salt(job.spec), rank, job.fork_of)
        if sequence is None:
            return None
        num_cached = len(sequence.tokens)
        tokens = job.tokens[num_cached : num_cached + budget]
        finishes = num_cached + len(tokens) == len(job.tokens)
        return RowInput(sequence, tokens, 1 if finishes else 0)

    def _can_begin(self, job: DraftJob) -> bool:
        """A branch begins with what is held for its sequence; no prompt is read again for it."""
        if job.fork_of is None or self._states.length(job.key):
            return True
        return self._states.length(job.fork_of) >= job.num_committed - 1
