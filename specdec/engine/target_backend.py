"""The target model behind the target's state machine: schedule a ragged batch, forward it, decide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as joined

import torch

from specdec.device_errors import device_losses
from specdec.engine.heads import HeadDrafter
from specdec.engine.prompt_logprobs import PromptReader
from specdec.engine.rules import tree_rows, verify
from specdec.engine.states import SequenceStates, prefix_salt, rank_of
from specdec.errors import NOT_FINITE, reason_of
from specdec.models.blocks import CachedSequence
from specdec.models.runner import ModelRunner, RowInput
from specdec.protocol.backends import Status, Verification, VerifyJob
from specdec.protocol.drafts import NO_DRAFT, Draft
from specdec.protocol.lookup import point_masses
from specdec.protocol.marks import Mark
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rows import Rows, VerifiedRun
from specdec.tokens import followed

Scheduled = list[tuple[int, RowInput, Draft]]
"""Rows of a step: index of the job, row, draft that is in it."""

_MOST_FORCED = 8
"""Most tokens drafted from a grammar alone, where a request does not say how many it takes."""
_WAITING = Verification(Status.WAITING)
_PREFILLING = Verification(Status.PREFILLING)


class ModelTarget:
    """A :class:`specdec.protocol.backends.TargetBackend` over a causal language model.

    Every sequence brings its own past and its own number of new tokens: a part of its prefill, one token, or 1 + K to
    verify. All that decode do so in every step, however many they are. What the budget has beyond that, or half of it
    where that is more, is for drafts and prompts: a half each where both have need of it, so that neither keeps the
    other waiting; drafts share theirs evenly, prompts in order of arrival. Where blocks are short drafts shrink first,
    then whoever came last yields.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        max_model_len: Longest sequence in tokens; the runner's pool must hold one.
        max_batch_tokens: Most tokens forwarded per step, where no more than half as many sequences decode.
        states: Of the runner, where another backend uses it too; by default there is none.
        heads: Draft for the next round in this process; by default there are none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        max_model_len: int,
        max_batch_tokens: int,
        states: SequenceStates | None = None,
        heads: HeadDrafter | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._states = states if states is not None else SequenceStates(runner)
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._marks: dict[str, Mark] = {}
        self._num_cached: dict[str, int] = {}
        self._max_draft = 0 if runner.no_speculation is not None else runner.max_rollback
        self._num_fallbacks = self._num_steps = 0
        self._prompts = PromptReader()
        self._heads = heads
        if heads is not None:
            runner.keep_hidden()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._max_model_len

    def last_progress(self) -> float:
        """Monotonic time at which the newest layer of a step was done; from any thread."""
        return self._runner.progress.newest_s

    def gauges(self) -> dict[str, float]:
        """What is held now, for the worker's report."""
        figures = self._states.gauges() | self._runner.adapters.gauges()
        figures["takes_trees"] = float(self._runner.takes_trees)
        if self._sampler.matchers is not None:
            figures["num_forbidden_draft_tokens"] = float(self._sampler.matchers.num_forbidden_draft_tokens)
        if self._runner.no_speculation is not None:
            figures[f"num_fallbacks/{self._runner.no_speculation}"] = float(self._num_fallbacks)
        return figures

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._states.release(key)
        self._runner.adapters.release(key)
        self._marks.pop(key, None)
        self._num_cached.pop(key, None)
        self._prompts.release(key)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step over a ragged batch; see :meth:`specdec.protocol.backends.TargetBackend.verify`."""
        with device_losses():
            return self._verify([with_allowed_draft(self._sampler, job) for job in jobs])

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
        hidden = self._runner.hidden
        if self._runner.spoilt_rows:
            spoilt, scheduled, logits, hidden = _without_spoilt(self._runner.spoilt_rows, scheduled, logits, hidden)
            for i in spoilt:
                results[i] = Verification(Status.FAILED, reason=NOT_FINITE)  # it is released next
        kept = self._read_prompts(jobs, scheduled, firsts, logits)
        if kept is not None:
            logits, hidden = logits[kept], None if hidden is None else hidden[kept]
        for i, _, _ in scheduled:
            results[i] = _PREFILLING
            self._states.keep_prefix(jobs[i].key, len(jobs[i].log))
        deciding = [entry for entry in scheduled if self._states.length(jobs[entry[0]].key) >= len(jobs[entry[0]].log)]
        for (i, _, _), result in zip(deciding, self._decide(jobs, deciding, logits, hidden), strict=True):
            results[i] = result
            if result.status is Status.FAILED:
                continue  # it is released next
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
        """Choose what is forwarded in this step: room by order of arrival, the budget as the class says."""
        rooms = [self._make_room(job) for job in jobs]
        # What an earlier job took from a later one was taken before the later one's turn came.
        able = [(i, sequence) for i, sequence in enumerate(rooms) if sequence is not None]
        num_unread = {i: len(jobs[i].log) - len(sequence) for i, sequence in able}
        decoding = [entry for entry in able if num_unread[entry[0]] == 1]
        reading = [entry for entry in able if num_unread[entry[0]] > 1]
        left = max(self._max_batch_tokens - len(decoding), self._max_batch_tokens // 2, 1)
        for_drafts = left - min((left + 1) // 2, sum(num_unread[i] for i, _ in reading))
        scheduled: Scheduled = []
        # What a short draft leaves is for the longer ones; where there is less than a token each, they take turns.
        self._num_steps += 1
        decoding.sort(key=lambda entry: (len(jobs[entry[0]].draft), (entry[0] + self._num_steps) % len(jobs)))
        for place, (i, sequence) in enumerate(decoding):
            row, draft = self._row(jobs[i], sequence, 1 + for_drafts // (len(decoding) - place))
            scheduled.append((i, row, draft))
            for_drafts -= len(draft.tokens)
            left -= len(draft.tokens)
        for i, sequence in reading:
            if left <= 0:
                break
            row, draft = self._row(jobs[i], sequence, left)
            scheduled.append((i, row, draft))
            left -= len(row.tokens)
        # Rows with the same adapter lie behind one another.
        scheduled.sort(key=lambda entry: -1 if entry[1].adapter is None else entry[1].adapter)
        return scheduled

    def _make_room(self, job: VerifyJob) -> CachedSequence | None:
        """The state of a job with blocks for its whole log; None if it must wait for them, its grammar or its adapter.

        A prompt is not begun that could not be finished.
        """
        if not self._sampler.is_ready(job.spec) or self._runner.adapters.must_wait(job.spec.adapter):
            return None
        rank = rank_of(job.key, job.spec)
        salt = prefix_salt(job.spec, job.spec.adapter)
        return self._states.prepare(job.key, job.log.tokens, self._agreed(job), salt, rank)

    def _row(self, job: VerifyJob, sequence: CachedSequence, budget: int) -> tuple[RowInput, Draft]:
        """A row for one job within ``budget`` tokens, with its draft as far as blocks are free for that.

        A tree is verified after a single token, by layers that attend; else its chain is.
        """
        num_cached, length = len(sequence), len(job.log)
        draft = Draft(job.draft, job.candidates[: len(job.draft)], job.source, job.parents)
        if job.parents and not (self._runner.takes_trees and num_cached == length - 1):
            draft = draft.chain()
        count = min(len(draft.tokens), max(0, budget - (length - num_cached)))
        count = count if self._max_draft is None else min(count, self._max_draft)
        while count and not self._runner.reserve(sequence, length + count):
            count -= 1
        draft = draft.only(range(count))
        tokens = job.log.tail(num_cached, num_cached + budget)
        finishes = num_cached + len(tokens) == length
        if self._runner.no_speculation is not None and job.key not in self._marks:
            self._num_fallbacks += 1 if job.spec.num_speculative_tokens != 0 else 0
        if job.key not in self._marks and length == job.spec.output_start:
            self._num_cached[job.key] = num_cached
        self._marks[job.key] = job.log.mark(num_cached)
        num_drafted = len(draft.tokens)
        num_logits = len(tokens) + num_drafted if self._prompts.wants(job) else 1 + num_drafted if finishes else 0
        slot = self._runner.adapters.slot(job.spec.adapter)
        return RowInput(sequence, tokens + draft.tokens, num_logits, draft.parents, slot), draft

    def _agreed(self, job: VerifyJob) -> int:
        """Length up to which the cached tokens are the log's, told by their mark without comparing them."""
        mark = self._marks.get(job.key)
        return mark.length if mark is not None and job.log.has(mark) else 0

    def _decide(
        self, jobs: Sequence[VerifyJob], scheduled: Scheduled, logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> list[Verification]:
        """Run the acceptance rule over all rows that have logits, in the order in which they were forwarded."""
        groups = [RowGroup(jobs[i].spec, jobs[i].log.tokens, draft.tokens) for i, _, draft in scheduled]
        groups = self._sampler.masked(groups)
        trees = {
            number: tree_rows(group, draft.parents)
            for number, (group, (_, _, draft)) in enumerate(zip(groups, scheduled, strict=True))
            if draft.parents
        }
        verified = verify(self._sampler, logits, groups, [draft.candidates for _, _, draft in scheduled], trees)
        failures = self._sampler.take_failures()
        for number, tree in trees.items():
            failures |= {id(groups[number]): failures[id(node)] for node in tree.nodes if id(node) in failures}
        with_trees = [(jobs[scheduled[number][0]], verified[number].path) for number in trees]
        self._states.keep_paths([(job.key, len(job.log), path) for job, path in with_trees])
        told, rows = _without_refused(groups, verified) if trees else (groups, None)
        logprobs = self._sampler.logprobs(
            logits if rows is None else logits[rows], told, [result.run for result in verified]
        )
        drafts = self._next_drafts([jobs[i].wants_own for i, _, _ in scheduled], groups, verified, hidden)
        return [
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
        rows = _rows_kept(groups, verified)
        decided = [(groups[i].spec, followed(groups[i].tokens, verified[i].run)) for i in places]
        for i, draft in zip(places, self._heads.drafts(hidden[[rows[i][-1] for i in places]], decided), strict=True):
            drafts[i] = draft
        return drafts


def _without_spoilt(
    spoilt_rows: Sequence[int], scheduled: Scheduled, logits: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[list[int], Scheduled, torch.Tensor, torch.Tensor | None]:
    """Take out rows that are not finite: gives the indices of their jobs, then the other rows with their logits."""
    spoilt = frozenset(spoilt_rows)
    kept: list[int] = []
    start = 0
    for number, (_, row, _) in enumerate(scheduled):
        if number not in spoilt:
            kept += range(start, start + row.num_logits)
        start += row.num_logits
    others = [entry for number, entry in enumerate(scheduled) if number not in spoilt]
    failed = [scheduled[number][0] for number in spoilt_rows]
    return failed, others, logits[kept], None if hidden is None else hidden[kept]


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


def _rows_kept(groups: Sequence[RowGroup], verified: Sequence[VerifiedRun]) -> list[list[int]]:
    """The rows that the tokens of each run were chosen in."""
    return [
        [start, *(start + 1 + node for node in result.path or range(result.num_accepted))]
        for start, result in zip(Rows(groups).starts, verified, strict=True)
    ]


def _without_refused(groups: Sequence[RowGroup], verified: Sequence[VerifiedRun]) -> tuple[list[RowGroup], list[int]]:
    """The groups with what was accepted for a draft, and their rows."""
    accepted = [result.run[: result.num_accepted] for result in verified]
    kept = [RowGroup(group.spec, group.tokens, draft) for group, draft in zip(groups, accepted, strict=True)]
    return kept, list(joined.from_iterable(_rows_kept(groups, verified)))
