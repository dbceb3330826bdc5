"""The target model behind the target's state machine: schedule a ragged batch, forward it, decide.

Log probabilities of a prompt's own tokens, gathered chunk by chunk while it is read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.backends import Status, Verification, VerifyJob
from specdec.core.drafts import NO_DRAFT, Draft
from specdec.core.errors import NOT_FINITE, DeviceLostError, reason_of
from specdec.core.log import TokenLog
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, followed
from specdec.core.types import PromptLogprobs, TokenLogprobs, Tokens
from specdec.drafting.heads import HeadDrafter, HeadRow
from specdec.engine.backend import ModelBackend
from specdec.engine.drafter import ModelDrafter, UnreadDrafts
from specdec.engine.scheduler import Request, ScheduledRow
from specdec.engine.sequences import DECIDED, Rank, SequenceStates, prefix_salt, rank_of
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.device_errors import device_losses, is_out_of_memory
from specdec.sampling.acceptance import Decision
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rows import max_slice_rows

logger = logging.getLogger(__name__)


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


class _Row(NamedTuple):
    """A job's part in a step.

    Attributes:
        place: Of the job.
        row: What is forwarded.
        draft: The draft in it.
        length: Of the job's log.
        decides: Whether it reads the last of the log, so that what follows is decided.
        reads_prompt: Whether its request asks for log probabilities of a prompt, of which this is a part.
    """

    place: int
    row: RowInput
    draft: Draft
    length: int
    decides: bool
    reads_prompt: bool


@dataclass(slots=True)
class _Known:
    """What is worked out once for a sequence, and what is known of its cache.

    Attributes:
        spec: Of the sequence.
        salt: With whom it shares prefixes.
        rank: Who goes first.
        is_plain: Whether it has no grammar and no adapter, and does not ask for log probabilities of its prompt.
        log: What the cached tokens were read from; None before the first step.
        num_read: Up to where.
        run: What was decided after that, in a step that decided.
        has_heads_off: Whether heads draft nothing for it, because they failed with it.
    """

    spec: SequenceSpec
    salt: bytes | None
    rank: Rank
    is_plain: bool
    log: TokenLog | None = None
    num_read: int = 0
    run: Tokens = ()
    has_heads_off: bool = False


_HEADS_REST_STEPS = 64
"""So many steps heads draft nothing after they have run out of memory."""
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
        self._known: dict[str, _Known] = {}
        self._num_cached: dict[str, int] = {}
        self._max_draft = 0 if runner.no_speculation is not None else runner.max_rollback
        self._num_fallbacks = 0
        self._prompts = PromptReader()
        self._heads = heads
        self._heads_rest = 0
        self._num_failed_heads = 0

    def metrics(self) -> dict[str, float]:
        """What is held now, for the worker's report."""
        figures = self._states.metrics() | self._runner.adapters.metrics()
        figures["executor_recorded"] = float(self._runner.is_recorded)
        if self._sampler.matchers is not None:
            figures["num_forbidden_draft_tokens"] = float(self._sampler.matchers.num_forbidden_draft_tokens)
        if self._runner.no_speculation is not None:
            figures[f"num_fallbacks/{self._runner.no_speculation}"] = float(self._num_fallbacks)
        if self._heads is not None:
            figures["num_failed_draft_steps"] = float(self._num_failed_heads)
        return figures

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._states.release(key)
        self._runner.adapters.release(key)
        self._known.pop(key, None)
        self._num_cached.pop(key, None)
        self._prompts.release(key)

    def takes_unread(self, drafter: ModelDrafter) -> bool:
        """Whether a drafter's tokens can be verified before they are known here: see :attr:`VerifyJob.unread`.

        They go from one model to the other on a device, and kernels decide there.
        """
        runner, device = self._runner, drafter.chain_device
        can_read = device is not None and runner.loaded.device == runner.output_device == device
        can_read &= runner.loaded.opaque_state is None and drafter.vocab_size <= runner.loaded.vocab_size
        return can_read and self._sampler.kernels(runner.output_device) is not None

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step over a ragged batch; see :meth:`specdec.core.backends.TargetBackend.verify`."""
        jobs = [job.within(self._sampler.vocab_size) for job in jobs]
        jobs = [job if job.spec.sampling.grammar is None else with_allowed_draft(self._sampler, job) for job in jobs]
        return self._in_parts(
            self._verify, jobs, waiting=_WAITING, suspect=lambda why: Verification(Status.SUSPECT, reason=why)
        )

    def _verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = self._prepare_adapters(jobs)
        step = self._schedule(jobs)
        if not step:
            return results
        self._sampler.take_failures()  # of a step that ran out of memory: its groups are gone
        deciding = [one for one in step if one.decides]
        decision = self._decision(jobs, deciding) if deciding else None
        unread = next((job.unread for job in jobs if job.unread is not None), None)
        drawn = unread.tokens if isinstance(unread, UnreadDrafts) else None
        extra = () if decision is None else decision.arrays
        logits = self._runner.forward([one.row for one in step], drawn=drawn, extra=extra)
        if self._sampler.kernels(logits.device) is None:  # kernels tell what is not finite, and wait once a step
            logits = self._runner.finite(logits)
        kept = self._read_prompts(jobs, step, logits)
        if kept is not None:
            logits = logits[kept]
        if decision is not None:
            decision.launch(logits, self._runner.is_finite, self._runner.extra, drawn)
        self._note_read(jobs, step)  # while the device decides
        if unread is not None:
            unread.read()
        decided, paths, is_finite = ([], {}, None) if decision is None else self._results(jobs, deciding, decision)
        spoilt = self._runner.spoilt_rows(is_finite)
        sound = step if not spoilt else [one for number, one in enumerate(step) if number not in spoilt]
        self._runner.keep_prefixes([(row.sequence, length) for _, row, _, length, *_ in sound])
        for place, *_ in step if len(deciding) < len(step) else ():
            results[place] = _PREFILLING
        known_of, refused = self._known, list[tuple[str, int]]()
        for (place, _, draft, length, *_), result in zip(deciding, decided, strict=True):
            results[place], key = result, jobs[place].key
            known_of[key].run = result.run
            if jobs[place].unread is not None and draft.tokens:
                known = result.run[: result.num_accepted]
                self._runner.set_tokens(self._states.sequence(key), length, [*known, *draft.tokens[len(known) :]])
            if result.num_accepted < len(draft.tokens):
                refused.append((key, length + result.num_accepted))
        for key, length in refused:
            self._states.truncate(key, length)
        for one in (step[number] for number in spoilt):
            # A draft may overflow what the sequence's own tokens do not. It is released next either way.
            results[one.place] = Verification(Status.SUSPECT if one.draft.tokens else Status.FAILED, reason=NOT_FINITE)
        if self._heads is not None and not self._heads_rest:
            self._draft_next(jobs, step, results, paths)
        self._heads_rest = max(0, self._heads_rest - 1)
        return results

    def _prepare_adapters(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """Have the jobs' adapters read; gives a result for each, which is all that one gets whose adapter cannot be."""
        adapters = self._runner.adapters
        using = [(i, job) for i, job in enumerate(jobs) if job.spec.adapter is not None]
        for _, job in using:
            adapters.hold(job.key, job.spec.adapter, job.spec.order)
        adapters.prepare()
        results = [_WAITING] * len(jobs)
        for i, job in using:
            if reason := adapters.failure(job.spec.adapter):
                results[i] = Verification(Status.FAILED, reason=reason)
        return results

    def _read_prompts(self, jobs: Sequence[VerifyJob], step: Sequence[_Row], logits: torch.Tensor) -> list[int] | None:
        """Read the rows that only tell of prompts; gives the numbers of those that decide, in order, None for all."""
        if not any(one.reads_prompt for one in step):
            return None
        kept: list[int] = []
        start = 0
        for one in step:
            rows = range(start, start + one.row.num_logits)
            start += one.row.num_logits
            if one.reads_prompt:
                num_prompt_tokens = one.row.num_logits - len(one.draft.tokens)
                first = len(one.row.sequence) - len(one.row.tokens)
                self._prompts.read(jobs[one.place], first, logits[rows.start : rows.start + num_prompt_tokens])
                rows = rows[num_prompt_tokens - 1 :] if one.decides else rows[:0]
            kept += rows
        return kept

    def _schedule(self, jobs: Sequence[VerifyJob]) -> list[_Row]:
        """What is forwarded in this step; jobs that wait for their grammar or their adapter are left out."""
        step = self._schedule_decoding(jobs)
        if step is None:
            step = self._schedule_any(jobs)
        self._step = {jobs[one.place].key: len(one.row.tokens) for one in step}
        self._num_step_drafts = sum([len(one.draft.tokens) for one in step])
        return step

    def _schedule_decoding(self, jobs: Sequence[VerifyJob]) -> list[_Row] | None:
        """A step in which every sequence goes on from what was decided in the step before, and all of it has room.

        It is what :meth:`_schedule_any` gives, found with less for each row. None for any other step.
        """
        if self._runner.states is not None:
            return None
        most = sys.maxsize if self._max_draft is None else self._max_draft
        known_of, sequence_of = self._known.get, self._states.get
        step: list[_Row] = []
        keys: list[str] = []
        lengths: list[int] = []
        for place, (key, log, tokens, spec, source, _, parents, *_) in enumerate(jobs):
            known, sequence = known_of(key), sequence_of(key)
            if known is None or sequence is None or known.log is not log or known.spec is not spec:
                return None
            new, count = log.tail(known.num_read), len(tokens)
            if new != known.run or not new or not known.is_plain or parents or count > most:
                return None
            length = known.num_read + len(new)
            if len(sequence.tokens.array) != length - 1:  # others have taken its room, or a step has failed
                return None
            draft = Draft(tokens, source) if count else NO_DRAFT
            step.append(_Row(place, RowInput(sequence, (new[-1], *tokens), 1 + count), draft, length, True, False))
            keys.append(key)
            lengths.append(length + count)
        num_draft_tokens = sum([len(one.draft.tokens) for one in step])
        return step if self._scheduler.schedule_decoding(keys, lengths, num_draft_tokens, self._states) else None

    def _schedule_any(self, jobs: Sequence[VerifyJob]) -> list[_Row]:
        """As :meth:`_schedule`, whatever sequences lack."""
        states, prompts = self._states, self._prompts
        states.begin_step()
        places: list[int] = []
        drafts: list[Draft] = []
        requests: list[Request] = []
        takes_turns = any(job.spec.owner for job in jobs)
        for i, job in enumerate(jobs):
            known, most = self._known_of(job), sys.maxsize
            if not known.is_plain:
                if not self._is_ready(job):
                    continue
                if prompts.wants(job):
                    most = max_slice_rows(self._sampler.vocab_size)
            # A log only grows: as far as it was read, it is not compared with what is cached.
            agreed = known.num_read if known.log is job.log else 0
            tokens = job.log.tokens
            rank = (DECIDED, i, *known.rank[2:]) if takes_turns else known.rank  # the jobs' order is that of the turns
            num_held = states.want(job.key, tokens, agreed, known.salt, rank)
            draft = self._draft(job, num_held == len(tokens) - 1) if job.draft else NO_DRAFT
            places.append(i)
            drafts.append(draft)
            requests.append(Request(job.key, len(tokens), len(draft.tokens), most, num_held, owner=job.spec.owner))
        chosen = self._scheduler.schedule(requests, states)
        chosen = prompts.bounded(chosen, [jobs[i] for i in places], self._sampler.vocab_size)
        step = [self._row(jobs, places[row.request], row, drafts[row.request]) for row in chosen]
        if any(one.row.adapter is not None for one in step):  # rows with the same adapter lie behind one another
            step.sort(key=lambda one: -1 if one.row.adapter is None else one.row.adapter)
        return step

    def _known_of(self, job: VerifyJob) -> _Known:
        known = self._known.get(job.key)
        if known is None or known.spec is not job.spec:
            spec, params = job.spec, job.spec.sampling
            is_plain = params.grammar is None and params.prompt_logprobs is None and spec.adapter is None
            salt, rank = prefix_salt(spec, spec.adapter), rank_of(job.key, spec, DECIDED)
            known = self._known[job.key] = _Known(spec, salt, rank, is_plain)
        return known

    def _is_ready(self, job: VerifyJob) -> bool:
        """Whether a sequence's grammar is compiled, and its adapter is on the device."""
        if not self._sampler.is_ready(job.spec) or self._runner.adapters.must_wait(job.spec.adapter):
            return False
        if self._prompts.wants(job) and self._states.num_computed_tokens(job.key) != self._prompts.num_read(job):
            self._states.release(job.key)  # a step failed after it had cached a part of the prompt
        return True

    def _draft(self, job: VerifyJob, is_read: bool) -> Draft:
        """A job's draft, as far as the model can take it back.

        A tree is verified after a single token, by layers that attend: where all but its log's last ``is_read``.
        Elsewhere its chain is.
        """
        draft = job.proposed
        if job.parents and not (self._runner.takes_trees and is_read):
            draft = draft.chain()
        return draft if self._max_draft is None else draft.only(range(min(len(draft.tokens), self._max_draft)))

    def _row(self, jobs: Sequence[VerifyJob], place: int, scheduled: ScheduledRow, draft: Draft) -> _Row:
        """A job's row, with the part of its draft that is in it."""
        _, num_cached, num_new, num_drafted = scheduled
        job = jobs[place]
        length, end = len(job.log), num_cached + num_new
        tokens = job.log.tail(num_cached, end)
        if num_drafted:
            draft = draft.only(range(num_drafted))
            tokens += draft.tokens
        else:
            draft = NO_DRAFT
        num_logits = 1 + num_drafted if end == length else 0
        adapter, reads_prompt = None, False
        if not self._known[job.key].is_plain:
            adapter, reads_prompt = self._runner.adapters.slot(job.spec.adapter), self._prompts.wants(job)
            num_logits = len(tokens) if reads_prompt else num_logits
        row = RowInput(self._states.sequence(job.key), tokens, num_logits, draft.parents, adapter)
        return _Row(place, row, draft, length, end == length, reads_prompt)

    def _note_read(self, jobs: Sequence[VerifyJob], step: Sequence[_Row]) -> None:
        """Note what the step has read of each log."""
        known_of = self._known
        for place, row, draft, length, *_ in step:
            job = jobs[place]
            known = known_of[job.key]
            num_read = len(row.sequence.tokens.array) - len(draft.tokens)
            if known.log is None:
                if self._runner.no_speculation is not None and job.spec.num_speculative_tokens != 0:
                    self._num_fallbacks += 1
                if length == job.spec.output_start:
                    self._num_cached[job.key] = len(row.sequence) - len(row.tokens)
            known.log, known.num_read, known.run = job.log, num_read, ()

    def _decision(self, jobs: Sequence[VerifyJob], deciding: Sequence[_Row]) -> Decision:
        """The acceptance rule over all rows that have logits, in the order in which they are forwarded."""
        groups = [
            RowGroup(jobs[place].spec, jobs[place].log.tokens, draft.tokens, None, draft.parents)
            for place, _, draft, *_ in deciding
        ]
        return Decision(self._sampler, groups, self._runner.output_device)

    def _results(
        self, jobs: Sequence[VerifyJob], deciding: Sequence[_Row], decision: Decision
    ) -> tuple[list[Verification], dict[int, Tokens], NDArray[np.bool_]]:
        """Wait for what was decided.

        Returns:
            A result for each; of those with trees, by their jobs' places, the tokens that were kept; and what is finite
            of the whole step, downloaded with them.
        """
        verified, logprobs, is_finite = decision.collect()
        failures = self._sampler.take_failures()
        self._states.keep_paths(
            [
                (jobs[one.place].key, one.length, result.path)
                for one, result in zip(deciding, verified, strict=True)
                if one.draft.parents
            ]
        )
        results: list[Verification] = []
        num_cached, decided = self._num_cached.pop, Status.DECIDED
        for (place, _, draft, _, _, reads_prompt), (run, num_accepted, _), reported in zip(
            deciding, verified, logprobs, strict=True
        ):
            job, num_drafted = jobs[place], len(draft.tokens)
            prompt_logprobs, is_forced = None if not reads_prompt else self._prompts.take(job), False
            if num_drafted:
                is_forced = job.source == ""
            known = num_cached(job.key, 0), is_forced
            results.append(Verification(decided, run, num_accepted, num_drafted, reported, prompt_logprobs, *known))
        for i, group in enumerate(decision.groups if failures else ()):
            if id(group) in failures:
                results[i] = Verification(Status.FAILED, reason=reason_of(failures[id(group)]))
        paths = {one.place: run.path for one, run in zip(deciding, verified, strict=True) if one.draft.parents}
        return results, paths, is_finite

    def _draft_next(
        self,
        jobs: Sequence[VerifyJob],
        step: Sequence[_Row],
        results: list[Verification],
        paths: Mapping[int, Tokens],
    ) -> None:
        """Have the heads read what the step has read for good, and draft for the next one where that is wanted."""
        assert self._heads is not None
        rows: list[HeadRow] = []
        places: list[int] = []
        first = 0
        for place, row, draft, *_ in step:
            numbers = range(first, first + len(row.tokens))
            first = numbers.stop
            job, result = jobs[place], results[place]
            if self._known[job.key].has_heads_off:
                continue
            if result.status is Status.DECIDED:
                num_own = len(row.tokens) - len(draft.tokens)
                kept = paths.get(place, range(result.num_accepted))
                read = [*numbers[:num_own], *(numbers[num_own + node] for node in kept)]
                text: TokenSequence = followed(job.log.tokens, result.run)
                count = self._heads.count(job.spec) if job.max_own_tokens else 0
            elif result.status is Status.PREFILLING:
                read, text, count = list(numbers), job.log.tokens, 0
            else:
                continue
            start = len(row.sequence) - len(read)
            # Where recurrent states do not reach back, a refused draft leaves nothing, and all is read again.
            if start >= 0 if self._heads.has_cache else count > 0:
                tokens = text[start + 1 : start + 1 + len(read)]
                rows.append(HeadRow(row.sequence, start, read, tokens, job.spec, text, count))
                places.append(place)
        for place, draft in zip(places, self._head_drafts([jobs[place].key for place in places], rows), strict=True):
            if draft.tokens:
                results[place] = results[place]._replace(next_draft=draft)

    def _head_drafts(self, keys: Sequence[str], rows: Sequence[HeadRow]) -> list[Draft]:
        """What heads draft for some sequences. What the step has decided stands, whatever they raise (rule 9).

        If they fail, they are tried with each sequence alone, and are switched off for those that they fail with again.
        """
        drafts = self._try_heads(rows)
        if drafts is not None:
            return drafts
        found = [NO_DRAFT] * len(rows)
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            drafts = self._try_heads([row]) if len(rows) > 1 and not self._heads_rest else None
            if self._heads_rest:
                break
            if drafts is None:
                self._known[key].has_heads_off = True
            else:
                found[i] = drafts[0]
        return found

    def _try_heads(self, rows: Sequence[HeadRow]) -> list[Draft] | None:
        """None if the heads have failed. For want of memory, which is nobody's fault, they rest for some steps."""
        assert self._heads is not None
        try:
            with device_losses():
                return self._heads.drafts(self._runner.hidden, rows)
        except DeviceLostError:
            raise
        except Exception as error:
            self._num_failed_heads += 1
            logger.error("Heads failed that draft for %d sequences", len(rows), exc_info=error)
            if is_out_of_memory(error):
                self._heads_rest = _HEADS_REST_STEPS
        if self._heads_rest:  # after the block, whose traceback holds the tensors
            torch.cuda.empty_cache()
        return None


def as_chain(job: VerifyJob) -> VerifyJob:
    """The job with a chain in the place of a draft that is a tree."""
    if not job.parents:
        return job
    chain = job.proposed.chain()
    return job._replace(draft=chain.tokens, parents=())


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
    return job._replace(draft=forced, source="")
