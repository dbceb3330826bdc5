"""The draft model behind the drafter's state machine: more tokens for every chain and branch, in one batch.

A draft model of another vocabulary reads and proposes tokens through a :class:`VocabularyMapper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specdec.checkpoint.compat import VocabularyMapping
from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.params import SamplingParams
from specdec.core.tokens import TokenBuffer, TokenSequence, as_list, common_prefix_length, followed
from specdec.engine.backend import ModelBackend
from specdec.engine.chained import Chained, ChainRow, UnreadChains, begin_chained, recorded_chains
from specdec.engine.scheduler import Request, ScheduledRow
from specdec.engine.sequences import BRANCH, DRAFTED, SequenceStates, prefix_salt, rank_of
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Downloads
from specdec.kernels.device_errors import device_losses
from specdec.sampling.acceptance import Drawn, propose
from specdec.sampling.pipeline import RowGroup, Sampler

_NOT_SHARED = -1e4
"""Logit of a token that the draft lacks: never drawn, unless a grammar allows no token that both have."""


@dataclass(slots=True)
class _Text:
    """A sequence in both vocabularies: ``ends[i]`` tokens of the draft's spell the first ``i`` of the target's."""

    tokens: TokenBuffer
    in_draft: list[int]
    ends: list[int]

    def first(self, length: int) -> _Text:
        return _Text(TokenBuffer(self.tokens[:length]), self.in_draft[: self.ends[length]], self.ends[: length + 1])


class VocabularyMapper:
    """Maps jobs to the vocabulary of the draft model; each token is mapped once."""

    def __init__(self, mapping: VocabularyMapping) -> None:
        self._mapping = mapping
        self._shared = torch.from_numpy(mapping.shared), torch.from_numpy(mapping.shared_in_draft)
        self._empty = _Text(TokenBuffer(), [*mapping.beginning], [len(mapping.beginning)])
        self._texts: dict[str, _Text] = {}

    def logits(self, draft_logits: Tensor) -> Tensor:
        """The draft's logits [N, its width] as float32 [N, vocab_size], in the order of the target's tokens.

        The maps are uploaded at the first call.
        """
        device = draft_logits.device
        if self._shared[0].device != device:
            self._shared = self._shared[0].to(device), self._shared[1].to(device)
        logits = torch.full((len(draft_logits), self._mapping.vocab_size), _NOT_SHARED, device=device)
        shared, shared_in_draft = self._shared
        logits[:, shared] = draft_logits[:, shared_in_draft].float()
        return logits

    def mapped(self, job: DraftJob) -> DraftJob:
        """The same job in the draft's tokens, lengths too."""
        text = self._texts.get(job.key) or self._texts.get(job.fork_of or "") or self._empty
        kept = common_prefix_length(text.tokens.array, job.tokens)
        new = as_list(job.tokens[kept:])
        if kept < len(text.tokens) or text is not self._texts.get(job.key):
            text = self._texts[job.key] = text.first(kept)
        for token in new:
            text.in_draft.extend(self._mapping.spelled[token])
            text.ends.append(len(text.in_draft))
        text.tokens.extend(new)
        agreed, num_committed = (text.ends[min(length, len(job.tokens))] for length in (job.agreed, job.num_committed))
        return job._replace(tokens=text.in_draft, agreed=agreed, num_committed=num_committed)

    def rename(self, key: str, new_key: str) -> None:
        """What is known of a branch is its sequence's from now on."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._texts[new_key] = text

    def release(self, key: str) -> None:
        """Forget a sequence; unknown keys are ignored."""
        self._texts.pop(key, None)


_MAX_CATCH_UP_TOKENS = 16
"""A chain that lacks so many tokens, or fewer, is not read like a prompt: after a rejected draft it lacks a few."""
_WAITING = Proposal(Status.WAITING)
_PREFILLING = Proposal(Status.PREFILLING)
_FAILED = Proposal(Status.FAILED)
_SUSPECT = Proposal(Status.SUSPECT)


@dataclass(slots=True)
class _Deciding:
    """A job whose tokens are all read, and what is drawn for it.

    Attributes:
        place: Of the job among all.
        tokens: The job's, and what was drawn after them.
        start: Of its first row among the logits.
        num_tokens: Rows, each of which gives a token.
        has_failed: Whether an error of its own has ended the drawing.
    """

    place: int
    job: DraftJob
    tokens: TokenSequence
    start: int
    num_tokens: int
    has_failed: bool = False
    drawn: list[Proposal] = field(default_factory=list)

    def append(self, drawn: Drawn) -> None:
        count = self.job.num_guesses
        guesses, likelihoods = drawn.guesses[:count], drawn.likelihoods[: 1 + count]
        if self.num_tokens > 1:
            self.tokens = followed(self.tokens, (drawn.token,))
        self.drawn.append(Proposal(Status.DECIDED, drawn.token, guesses, likelihoods))

    def proposal(self) -> Proposal:
        """What was drawn; of an error after the first token nothing is said, as it may never come to that place."""
        if not self.drawn:
            return _FAILED
        return self.drawn[0]._replace(further=tuple(self.drawn[1:])) if self.num_tokens > 1 else self.drawn[0]


class UnreadDrafts:
    """The :class:`specdec.core.backends.UnreadProposals` of recorded chains.

    Args:
        chains: Under way.
        take: Makes proposals of what they gave.

    Attributes:
        tokens: int32 [D], on the device, what they draw; see :func:`specdec.executor.steps.unread`.
    """

    def __init__(self, chains: UnreadChains, take: Callable[[Chained], list[Proposal]]) -> None:
        self.tokens = chains.launched.tokens
        self._chains, self._take = chains, take
        self._listeners: list[Callable[[list[Proposal]], None]] = []
        self._is_read = False

    def proposal(self, row: int) -> Proposal:
        """A row's, with what stands for its tokens."""
        num_passes = self._chains.num_passes
        first, *others = (
            Proposal(Status.DECIDED, number, unread=self, num_passes=num_passes)
            for number in self._chains.launched.unread(row)
        )
        return first._replace(further=tuple(others))

    def when_read(self, listener: Callable[[list[Proposal]], None]) -> None:
        """Have a listener called, after those before it, with the proposals as they are once they are read."""
        self._listeners.append(listener)

    def read(self) -> None:
        """Wait for the tokens; nothing where that was done."""
        if self._is_read:
            return
        self._is_read = True
        with device_losses():
            proposals = self._take(self._chains.collect())
        for listener in self._listeners:
            listener(proposals)


class ModelDrafter(ModelBackend):
    """A :class:`specdec.core.backends.DraftBackend` over a causal language model.

    It draws with the same pipeline and the same noise as the target (rule 10), so that its tokens are the target's as
    often as the two distributions allow. A token that a grammar forces costs it no forward pass.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        max_model_len: Longest sequence in tokens that the model can read.
        max_num_batched_tokens: Most tokens in a forward pass.
        max_num_seqs: Most chains and branches in a forward pass; by default as many as it may have tokens.
        states: Of the runner, where another backend uses it too; by default there is none.
        mapper: Where the model's vocabulary is not the target's, which the sampler and all jobs speak.
        mask_token_id: Of a model that was taught to give several tokens in one pass, as PARD does (An et al. 2025,
            "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation"): what stands in the place
            of each token but the first. None drafts a token a step.
        num_step_tokens: How many tokens such a model gives in a pass, at most.
        num_chained_passes: How many tokens another model gives in a step, at most: a pass for each is launched before
            the token of the one before is known here.
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
        mapper: VocabularyMapper | None = None,
        mask_token_id: int | None = None,
        num_step_tokens: int = 1,
        num_chained_passes: int = 1,
    ) -> None:
        super().__init__(
            runner,
            sampler,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_decode_tokens=_MAX_CATCH_UP_TOKENS,
            states=states,
        )
        self._mapper = mapper
        self._mask = [] if mask_token_id is None else [mask_token_id]
        self._num_step_tokens = num_step_tokens if self._mask else 1
        self._num_chained_passes = 1 if self._mask or mapper is not None else num_chained_passes
        self._downloads = Downloads(runner.output_device)
        self._recorded = None if mapper is not None else recorded_chains(runner, sampler)
        self._num_chained: dict[str, int] = {}  # tokens of each row of the step that is scheduled

    @property
    def chain_device(self) -> torch.device | None:
        """Where recorded chains are; None where there are none."""
        return None if self._recorded is None else self._runner.output_device

    @property
    def num_chained_tokens(self) -> int:
        """Tokens of a draft that one step draws at most."""
        return self._num_step_tokens if self._mask else self._num_chained_passes

    @property
    def vocab_size(self) -> int:
        """All tokens that are drawn are less."""
        return self._sampler.vocab_size

    def metrics(self) -> dict[str, float]:
        """What is held now, and how many tokens a step gives, for the worker's report."""
        held = self._states.metrics() | self._runner.adapters.metrics()
        is_recorded = float(self._runner.is_recorded)
        return held | {"num_step_tokens": float(self._num_step_tokens), "executor_recorded": is_recorded}

    def rest(self) -> None:
        """Nothing is to be done."""

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on."""
        self._states.rename(key, new_key)
        if self._mapper is not None:
            self._mapper.rename(key, new_key)

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._states.release(key)
        if self._mapper is not None:
            self._mapper.release(key)
        self._runner.adapters.release(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One step over a ragged batch; see :meth:`specdec.core.backends.DraftBackend.propose`."""
        return self._in_parts(self._propose, jobs, waiting=_WAITING, suspect=lambda _: _SUSPECT)

    def _propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        adapters = self._runner.adapters
        for job in jobs:
            if job.fork_of is None:
                adapters.hold(job.key, job.spec.draft_adapter, job.spec.order)
        adapters.prepare()
        results = [_FAILED if adapters.failure(job.spec.draft_adapter) else _WAITING for job in jobs]
        placed = self._schedule(jobs, results)
        if not placed:
            return results
        step, chains = [row for _, _, row in placed], self._chains(placed)
        begun = None
        if chains:
            begun = begin_chained(self._runner, self._sampler, step, chains, self._downloads, self._recorded)
        if begun is not None:
            take = partial(self._take_chained, results, placed, 1 if self._mask else chains[0].num_tokens)
            if isinstance(begun, Chained):
                return take(begun)
            if not all(job.may_stay for job in jobs):
                return take(begun.collect())
            found, unread = list(results), UnreadDrafts(begun, take)
            for number, (i, *_) in enumerate(placed):
                found[i] = unread.proposal(number) if number < len(chains) else _PREFILLING
            return found
        logits = self._runner.forward(step)
        self._note_read(results, placed, frozenset(self._runner.spoilt_rows()))
        deciding: list[_Deciding] = []
        num_logits = 0
        for i, _, row in placed:
            if row.num_logits and results[i] is not _FAILED:
                deciding.append(_Deciding(i, jobs[i], jobs[i].tokens, num_logits, row.num_logits))
            num_logits += row.num_logits
        if self._mapper is not None:
            logits = self._mapper.logits(logits)
        self._draw(logits, deciding)
        for one in deciding:
            results[one.place] = one.proposal()
        return results

    def _note_read(
        self, results: list[Proposal], placed: Sequence[tuple[int, DraftJob, RowInput]], spoilt: frozenset[int]
    ) -> None:
        """Fill in the results of a step's rows, of which those with these numbers are spoilt."""
        for number, (i, job, _) in enumerate(placed):
            results[i] = _FAILED if number in spoilt else _PREFILLING
            if number not in spoilt:
                self._states.keep_prefix(job.key, job.num_committed)

    def _take_chained(
        self,
        results: list[Proposal],
        placed: Sequence[tuple[int, DraftJob, RowInput]],
        num_passes: int,
        chained: Chained,
    ) -> list[Proposal]:
        """The results of a step of so many passes."""
        self._note_read(results, placed, chained.spoilt_rows)
        for (i, job, _), own in zip(placed, chained.drawn, strict=False):
            one = _Deciding(i, job, job.tokens, 0, len(own))
            for drawn in own:
                one.append(drawn)
            results[i] = one.proposal()._replace(num_passes=num_passes)
        return results

    def _chains(self, placed: Sequence[tuple[int, DraftJob, RowInput]]) -> list[ChainRow]:
        """The rows that draw; they come first."""
        if not self._num_chained:
            return []
        return [
            ChainRow(
                *(row.sequence, job.spec, job.tokens, self._num_chained[job.key], job.num_guesses, row.adapter),
                is_parallel=bool(self._mask),
            )
            for _, job, row in placed
            if row.num_logits
        ]

    def _plan_chains(self, placed: Sequence[tuple[int, DraftJob, RowInput]]) -> dict[str, int]:
        """How many tokens each row that draws gets in this step, with room made for all but the last.

        Several only where all of them can get several: a row that gets one would have to wait for the others' passes.
        None where they are drawn once the logits are there.
        """
        jobs = [job for _, job, row in placed if row.num_logits]
        num_passes = self._num_chained_passes
        can_chain = not any(self._sampler.depends_on_tokens(job.spec.sampling) for job in jobs)
        if self._mask:
            is_recorded = can_chain and self._recorded is not None
            return {job.key: row.num_logits for _, job, row in placed if row.num_logits} if is_recorded else {}
        if not can_chain:
            num_passes = 1
        if num_passes == 1 and not self._is_laid_out_before([job.spec.sampling for job in jobs]):
            return {}
        counts = {}
        for job in jobs:
            count = min(job.num_tokens, num_passes, self._max_model_len + 1 - len(job.tokens))
            has_room = count > 1 and self._states.extend(job.key, len(job.tokens) + count - 1)
            counts[job.key] = count if has_room else 1
        return counts

    def _is_laid_out_before(self, params: Sequence[SamplingParams]) -> bool:
        """Whether kernels draw a token for each row, none of which fails: what they need then travels with the pass."""
        if self._mask or self._mapper is not None or self._sampler.kernels(self._runner.output_device) is None:
            return False
        return all(one.grammar is None for one in params)

    def _draw(self, logits: Tensor, deciding: Sequence[_Deciding]) -> None:
        """Draw all tokens, place by place: those before it count for what may be drawn."""
        self._sampler.take_failures()  # of a step that ran out of memory: its groups are gone
        for ahead in range(max((one.num_tokens for one in deciding), default=0)):
            drawing = [one for one in deciding if one.num_tokens > ahead and not one.has_failed]
            rows = logits
            if len(drawing) < len(logits):  # also where rows that are not finite are left out
                rows = logits[[one.start + ahead for one in drawing]]
            groups = self._sampler.masked([RowGroup(one.job.spec, one.tokens) for one in drawing])
            num_guesses = max((one.job.num_guesses for one in drawing), default=0)
            proposed = propose(self._sampler, rows, groups, num_guesses)
            failures = self._sampler.take_failures()
            for one, group, drawn in zip(drawing, groups, proposed, strict=True):
                if id(group) in failures:
                    one.has_failed = True
                else:
                    one.append(drawn)

    def _schedule(self, jobs: Sequence[DraftJob], results: list[Proposal]) -> list[tuple[int, DraftJob, RowInput]]:
        """What is forwarded: index, job in the model's own vocabulary, row. Fills in results that need none."""
        self._states.begin_step()
        able: list[tuple[int, DraftJob]] = []
        requests: list[Request] = []
        for i, job in enumerate(jobs):
            job = job if self._mapper is None else self._mapper.mapped(job)
            if self._mapper is not None and len(job.tokens) > self._max_model_len:
                results[i] = _FAILED  # the model's own spelling of it is longer than the model can read
            elif self._can_begin(job):
                num_held = self._want(job)
                forced = self._sampler.forced(job.spec, jobs[i].tokens, 1)
                if forced:  # it is read with the first token that is not
                    results[i] = Proposal(Status.DECIDED, forced[0])
                    continue
                able.append((i, job))
                num_ahead = self._num_ahead(job)
                requests.append(
                    Request(
                        *(job.key, len(job.tokens), num_ahead),
                        num_computed_tokens=num_held,
                        is_branch=job.fork_of is not None,
                    )
                )
        chosen = self._scheduler.schedule(requests, self._states)
        placed = [(*able[row.request], self._row(able[row.request][1], row)) for row in chosen]
        self._step = {job.key: len(row.tokens) for _, job, row in placed}
        self._num_step_drafts = sum(row.num_draft_tokens for row in chosen)
        chained = self._num_chained = self._plan_chains(placed)
        # The longest chains come first; among others rows with the same adapter lie behind one another.
        placed.sort(key=lambda one: (-chained.get(one[1].key, 0), -1 if one[2].adapter is None else one[2].adapter))
        return placed

    def _want(self, job: DraftJob) -> int:
        rank = rank_of(job.key, job.spec, DRAFTED if job.fork_of is None else BRANCH)
        salt = prefix_salt(job.spec, job.spec.draft_adapter)
        return self._states.want(
            *(job.key, job.tokens, job.agreed, salt, rank), fork_of=job.fork_of, num_committed=job.num_committed
        )

    def _num_ahead(self, job: DraftJob) -> int:
        """Mask tokens after a job's own: each gives one more token in the same pass."""
        return max(0, min(job.num_tokens, self._num_step_tokens, self._max_model_len + 1 - len(job.tokens)) - 1)

    def _row(self, job: DraftJob, scheduled: ScheduledRow) -> RowInput:
        start = scheduled.num_computed_tokens
        tokens = as_list(job.tokens[start : start + scheduled.num_new_tokens])
        num_logits = 1 + scheduled.num_draft_tokens if start + len(tokens) == len(job.tokens) else 0
        # The next step's tokens are none of the masks: what is cached of these is cut off then.
        tokens = tokens + scheduled.num_draft_tokens * self._mask
        slot = self._runner.adapters.slot(job.spec.draft_adapter)
        return RowInput(self._states.sequence(job.key), tokens, num_logits, adapter=slot)

    def _can_begin(self, job: DraftJob) -> bool:
        """Whether a job can have a part in a step. A branch begins with what its sequence holds: it reads no prompt."""
        if not self._sampler.is_ready(job.spec) or self._runner.adapters.must_wait(job.spec.draft_adapter):
            return False
        if job.fork_of is None or self._states.num_computed_tokens(job.key):
            return True
        return self._states.num_computed_tokens(job.fork_of) >= job.num_committed - 1
