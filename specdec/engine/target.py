"""The target model behind the target's state machine: schedule a ragged batch, forward it, decide.

Log probabilities of a prompt's own tokens, gathered chunk by chunk while it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.backends import Status, Verification, VerifyJob
from specdec.core.drafts import NO_DRAFT, Draft
from specdec.core.errors import NOT_FINITE, reason_of
from specdec.core.log import TokenLog
from specdec.core.tokens import followed
from specdec.core.types import PromptLogprobs, TokenLogprobs
from specdec.drafting.medusa import HeadDrafter
from specdec.drafting.ngram import point_masses
from specdec.engine.backend import ModelBackend
from specdec.engine.scheduler import Request, ScheduledRow
from specdec.engine.sequences import SequenceStates, prefix_salt, rank_of
from specdec.executor.runner import ModelRunner, RowInput
from specdec.sampling.acceptance import decide
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rows import Rows, VerifiedRun, max_slice_rows


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


Scheduled = list[tuple[int, RowInput, Draft]]
"""Rows of a step: index of the job, row, draft that is in it."""

_MOST_FORCED = 8
"""Most tokens drafted from a grammar alone, where a request does not say how many it takes."""
_WAITING = Verification(Status.WAITING)
_PREFILLING = Verification(Status.PREFILLING)


class ModelTarget(ModelBackend):
    """A :class:`specdec.core.backends.TargetBackend` over a causal language model.

    Every sequence brings its own past and its own number of new tokens: a part of its prompt, one token, or 1 + K to
    verify. The :class:`Scheduler` chooses what a step takes of each.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        max_model_len: Longest sequence in tokens; the runner's pool must hold one.
        max_num_batched_tokens: Most tokens in a forward pass.
        max_num_seqs: Most sequences in a forward pass; by default as many as it may have tokens.
        states: Of the runner, where another backend uses it too; by default there is none.
        heads: Draft for the next round in this process; by default there are none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int | None = None,
        states: SequenceStates | None = None,
        heads: HeadDrafter | None = None,
    ) -> None:
        super().__init__(
            runner,
            sampler,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_decode_tokens=1,
            states=states,
        )
        self._logs: dict[str, tuple[TokenLog, int]] = {}  # what the cached tokens were read from, and up to where
        self._num_cached: dict[str, int] = {}
        self._max_draft = 0 if runner.no_speculation is not None else runner.max_rollback
        self._num_fallbacks = 0
        self._prompts = PromptReader()
        self._heads = heads
        if heads is not None:
            runner.keep_hidden()

    def metrics(self) -> dict[str, float]:
        """What is held now, for the worker's report."""
        figures = self._states.metrics() | self._runner.adapters.metrics()
        if self._sampler.matchers is not None:
            figures["num_forbidden_draft_tokens"] = float(self._sampler.matchers.num_forbidden_draft_tokens)
        if self._runner.no_speculation is not None:
            figures[f"num_fallbacks/{self._runner.no_speculation}"] = float(self._num_fallbacks)
        return figures

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._states.release(key)
        self._runner.adapters.release(key)
        self._logs.pop(key, None)
        self._num_cached.pop(key, None)
        self._prompts.release(key)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step over a ragged batch; see :meth:`specdec.core.backends.TargetBackend.verify`."""
        jobs = [with_allowed_draft(self._sampler, job) for job in jobs]
        return self._in_parts(
            self._verify, jobs, waiting=_WAITING, suspect=lambda why: Verification(Status.SUSPECT, reason=why)
        )

    def _verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        adapters = self._runner.adapters
        for job in jobs:
            adapters.hold(job.key, job.spec.adapter, job.spec.arrival_s)
        adapters.prepare()
        reasons = (adapters.failure(job.spec.adapter) for job in jobs)
        results = [Verification(Status.FAILED, reason=reason) if reason else _WAITING for reason in reasons]
        scheduled = self._schedule(jobs)
        if not scheduled:
            return results
        firsts = {i: len(row.sequence.tokens) for i, row, _ in scheduled}
        logits = self._runner.forward([row for _, row, _ in scheduled])
        if self._sampler.kernels(logits.device) is None:  # kernels tell what is not finite, and wait once a step
            logits = self._runner.finite(logits)
        hidden = self._runner.hidden
        kept = self._read_prompts(jobs, scheduled, firsts, logits)
        if kept is not None:
            logits, hidden = logits[kept], None if hidden is None else hidden[kept]
        deciding = [
            entry
            for entry in scheduled
            if self._states.num_computed_tokens(jobs[entry[0]].key) >= len(jobs[entry[0]].log)
        ]
        decided, is_finite = self._decide(jobs, deciding, logits, hidden) if deciding else ([], None)
        spoilt = {scheduled[number][0] for number in self._runner.spoilt_rows(is_finite)}
        for i, _, draft in scheduled:
            if i in spoilt:
                # A draft may overflow what the sequence's own tokens do not. It is released next either way.
                results[i] = Verification(Status.SUSPECT if draft.tokens else Status.FAILED, reason=NOT_FINITE)
            else:
                results[i] = _PREFILLING
                self._states.keep_prefix(jobs[i].key, len(jobs[i].log))
        for (i, _, _), result in zip(deciding, decided, strict=True):
            if i in spoilt:
                continue
            results[i] = result
            if result.status is not Status.FAILED:  # else it is released next
                self._states.truncate(jobs[i].key, len(jobs[i].log) + result.num_accepted)
        return results

    def _read_prompts(
        self, jobs: Sequence[VerifyJob], scheduled: Scheduled, firsts: dict[int, int], logits: torch.Tensor
    ) -> list[int] | None:
        """Read the rows that only tell of prompts; gives the numbers of those that decide, in order, None for all."""
        if not any(self._prompts.wants(jobs[i]) for i, _, _ in scheduled):
            return None
        kept: list[int] = []
        start = 0
        for i, row, draft in scheduled:
            rows = range(start, start + row.num_logits)
            start += row.num_logits
            if self._prompts.wants(jobs[i]):
                num_prompt_tokens = row.num_logits - len(draft.tokens)
                self._prompts.read(jobs[i], firsts[i], logits[rows.start : rows.start + num_prompt_tokens])
                finishes = firsts[i] + num_prompt_tokens == len(jobs[i].log)
                rows = rows[num_prompt_tokens - 1 :] if finishes else rows[:0]
            kept += rows
        return kept

    def _schedule(self, jobs: Sequence[VerifyJob]) -> Scheduled:
        """What is forwarded in this step; jobs that wait for their grammar or their adapter are left out."""
        able = [
            i
            for i, job in enumerate(jobs)
            if self._sampler.is_ready(job.spec) and not self._runner.adapters.must_wait(job.spec.adapter)
        ]
        self._states.begin_step()
        requests, drafts = [], []
        for i in able:
            job = jobs[i]
            if self._prompts.wants(job) and self._states.num_computed_tokens(job.key) != self._prompts.num_read(job):
                self._states.release(job.key)  # a step failed after it had cached a part of the prompt
            salt = prefix_salt(job.spec, job.spec.adapter)
            self._states.want(job.key, job.log.tokens, self._agreed(job), salt, rank_of(job.key, job.spec))
            drafts.append(self._draft(job))
            most = max_slice_rows(self._sampler.vocab_size) if self._prompts.wants(job) else sys.maxsize
            requests.append(Request(job.key, len(job.log), len(drafts[-1].tokens), most))
        chosen = self._scheduler.schedule(requests, self._states)
        chosen = self._prompts.bounded(chosen, [jobs[i] for i in able], self._sampler.vocab_size)
        scheduled = [
            (able[row.request], *self._row(jobs[able[row.request]], row, drafts[row.request])) for row in chosen
        ]
        self._step = {jobs[i].key: len(row.tokens) for i, row, _ in scheduled}
        # Rows with the same adapter lie behind one another.
        scheduled.sort(key=lambda entry: -1 if entry[1].adapter is None else entry[1].adapter)
        return scheduled

    def _draft(self, job: VerifyJob) -> Draft:
        """A job's draft, as far as the model can take it back.

        A tree is verified after a single token, by layers that attend. Elsewhere its chain is.
        """
        draft = Draft(job.draft, job.candidates[: len(job.draft)], job.source, job.parents)
        if job.parents and not (
            self._runner.takes_trees and self._states.num_computed_tokens(job.key) == len(job.log) - 1
        ):
            draft = draft.chain()
        return draft if self._max_draft is None else draft.only(range(min(len(draft.tokens), self._max_draft)))

    def _row(self, job: VerifyJob, scheduled: ScheduledRow, draft: Draft) -> tuple[RowInput, Draft]:
        """The row of a job, and the part of its draft that is in it."""
        num_cached, length = scheduled.num_computed_tokens, len(job.log)
        draft = draft.only(range(scheduled.num_draft_tokens))
        tokens = job.log.tail(num_cached, num_cached + scheduled.num_new_tokens)
        finishes = num_cached + len(tokens) == length
        if self._runner.no_speculation is not None and job.key not in self._logs:
            self._num_fallbacks += 1 if job.spec.num_speculative_tokens != 0 else 0
        if job.key not in self._logs and length == job.spec.output_start:
            self._num_cached[job.key] = num_cached
        self._logs[job.key] = job.log, num_cached + len(tokens)
        num_drafted = len(draft.tokens)
        num_logits = len(tokens) + num_drafted if self._prompts.wants(job) else 1 + num_drafted if finishes else 0
        row = RowInput(
            self._states.sequence(job.key),
            tokens + draft.tokens,
            num_logits,
            draft.parents,
            self._runner.adapters.slot(job.spec.adapter),
        )
        return row, draft

    def _agreed(self, job: VerifyJob) -> int:
        """Length up to which the cached tokens are the log's without comparing them: a log only grows."""
        log, length = self._logs.get(job.key, (None, 0))
        return length if log is job.log else 0

    def _decide(
        self, jobs: Sequence[VerifyJob], scheduled: Scheduled, logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[list[Verification], NDArray[np.bool_]]:
        """Run the acceptance rule over all rows that have logits, in the order in which they were forwarded.

        Returns:
            A result for each, and what is finite of the whole step, downloaded with them.
        """
        self._sampler.take_failures()  # of a step that ran out of memory: its groups are gone
        groups = [
            RowGroup(jobs[i].spec, jobs[i].log.tokens, draft.tokens, parents=draft.parents) for i, _, draft in scheduled
        ]
        groups = self._sampler.masked(groups)
        candidates = [draft.candidates for _, _, draft in scheduled]
        verified, logprobs, is_finite = decide(self._sampler, logits, groups, candidates, self._runner.is_finite)
        failures = self._sampler.take_failures()
        self._states.keep_paths(
            [
                (jobs[i].key, len(jobs[i].log), result.path)
                for (i, _, draft), result in zip(scheduled, verified, strict=True)
                if draft.parents
            ]
        )
        drafts = self._next_drafts([jobs[i].wants_own for i, _, _ in scheduled], groups, verified, hidden)
        results = [
            Verification(
                Status.DECIDED,
                result.run,
                result.num_accepted,
                len(group.draft),
                reported,
                self._prompts.take(jobs[i]),
                self._num_cached.pop(jobs[i].key, 0),
                is_forced=jobs[i].source == "" and len(group.draft) > 0,
                next_draft=next_draft,
            )
            if id(group) not in failures
            else Verification(Status.FAILED, reason=reason_of(failures[id(group)]))
            for (i, _, _), result, group, reported, next_draft in zip(
                scheduled, verified, groups, logprobs, drafts, strict=True
            )
        ]
        return results, is_finite

    def _next_drafts(
        self,
        wanted: Sequence[bool],
        groups: Sequence[RowGroup],
        verified: Sequence[VerifiedRun],
        hidden: torch.Tensor | None,
    ) -> list[Draft]:
        """What the heads propose after each run, where wanted, from the row that its last token was chosen in."""
        drafts = [NO_DRAFT] * len(groups)
        places = [i for i, is_wanted in enumerate(wanted) if is_wanted]
        if self._heads is None or hidden is None or not places:
            return drafts
        starts = Rows(groups).starts
        rows = [starts[i] + verified[i].rows[-1] for i in places]
        decided = [(groups[i].spec, followed(groups[i].tokens, verified[i].run)) for i in places]
        for i, draft in zip(places, self._heads.drafts(hidden[rows], decided), strict=True):
            drafts[i] = draft
        return drafts


def as_chain(job: VerifyJob) -> VerifyJob:
    """The job with a chain in the place of a draft that is a tree."""
    if not job.parents:
        return job
    chain = job.proposed.chain()
    return job._replace(draft=chain.tokens, candidates=chain.candidates, parents=())


def with_allowed_draft(sampler: Sampler, job: VerifyJob) -> VerifyJob:
    """The job with a draft that begins with what its grammar forces, and has nothing that it forbids.

    What is forced costs no draft model, and is verified like any draft; the job's own goes on after it, or is shorter.
    """
    if job.spec.sampling.grammar is None or not sampler.is_ready(job.spec):
        return job  # one without a grammar, or one that has to wait
    job = as_chain(job)  # masks follow one
    spec, tokens, bound = job.spec, job.log.tokens, job.spec.num_speculative_tokens
    draft = sampler.allowed(spec, tokens, job.draft)
    forced = sampler.forced(spec, tokens, min(job.room, _MOST_FORCED if bound is None else bound))
    if draft[: len(forced)] == forced:
        return job._replace(draft=draft)
    return job._replace(draft=forced, candidates=point_masses(spec, forced), source="")
