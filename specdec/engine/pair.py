"""A target with a draft model in its process: one call drafts for every sequence, then verifies all drafts.

No message carries a draft, and nothing of a draft outlives the step that it is made for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from specdec.core.backends import (
    DraftBackend,
    DraftJob,
    Proposal,
    Status,
    TargetBackend,
    UnreadProposals,
    Verification,
    VerifyJob,
)
from specdec.core.drafts import OFFERED, Draft
from specdec.core.errors import DeviceLostError
from specdec.core.tokens import TokenBuffer, common_prefix_length
from specdec.engine.backend import ModelBackend
from specdec.engine.drafter import ModelDrafter
from specdec.engine.observed import ObservedDrafter, ObservedTarget
from specdec.engine.target import ModelTarget

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    """What the draft model was given of a sequence.

    Attributes:
        tokens: Committed tokens, and what was drafted after them.
        agreed: How many of them its last job had.
        is_decoding: Whether the target decided it in its last step: before that nothing is drafted.
        is_suspect: Whether a draft step failed that it was in, or a step of the target that verified its draft.
        is_barred: Whether nothing more is drafted for it.
    """

    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    agreed: int = 0
    is_decoding: bool = False
    is_suspect: bool = False
    is_barred: bool = False

    def forget(self) -> None:
        """The draft model holds nothing of it."""
        self.tokens.truncate(0)
        self.agreed = 0


@dataclass(slots=True, eq=False)
class _Drafting:
    """A job that is drafted for.

    Attributes:
        place: Of the job in the step.
        num_tokens: How long its draft is to be.
        is_handed: Whether it is verified before it is known here.
        drawn: The draft so far.
    """

    place: int
    job: VerifyJob
    sequence: _Sequence
    num_tokens: int
    is_handed: bool = False
    drawn: list[Proposal] = field(default_factory=list)

    def next_job(self, may_stay: bool) -> DraftJob:
        """To propose what comes next in the draft, which may stay on the device."""
        sequence, num_missing = self.sequence, self.num_tokens - len(self.drawn)
        tokens, committed = sequence.tokens.array, len(self.job.log)
        return DraftJob(
            self.job.key,
            tokens,
            self.job.spec,
            sequence.agreed,
            num_committed=committed,
            num_tokens=num_missing,
            may_stay=may_stay,
        )

    def take(self, proposal: Proposal) -> bool:
        """Take what was proposed; whether the draft goes on after it.

        It ends with a token that ends the text, if that is known.
        """
        if proposal.status is not Status.DECIDED:
            return False
        last = frozenset[int]() if self.is_handed else self.job.spec.ending_token_ids
        for one in (proposal, *proposal.further)[: self.num_tokens - len(self.drawn)]:
            self.drawn.append(one)
            if one.token is not None:
                self.sequence.tokens.extend([one.token])
            if one.token in last:
                return False
        return len(self.drawn) < self.num_tokens

    def take_back(self) -> None:
        """Nothing was drawn."""
        self.drawn.clear()
        self.sequence.tokens.truncate(len(self.job.log))

    def draft(self) -> Draft:
        """What was drawn."""
        tokens = tuple(one.token for one in self.drawn if one.token is not None)
        return Draft(tokens, "chain") if tokens else Draft()


class PairedTarget:
    """A :class:`specdec.core.backends.TargetBackend` that drafts for its own steps by a draft model beside it.

    A job says how much may be drafted for it (``VerifyJob.max_own_tokens``). Nothing is drafted for a sequence before
    its first token, or while it is read again: the draft model reads its prompt after that, a chunk beside each pass of
    those that draw. What goes wrong in the draft model, or in a step that verifies its drafts, costs drafts, and no
    token.

    Args:
        target: Decides.
        drafter: Drafts, over caches of its own.
        num_draft_tokens: Length of a draft where the request names none, at most.
        drafts_first: Whether a sequence's first token may have a draft too: it comes later, and others sooner.
    """

    def __init__(
        self,
        target: TargetBackend,
        drafter: DraftBackend,
        num_draft_tokens: int,
        *,
        drafts_first: bool = False,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._drafts_first = drafts_first
        self._most_unread = most_unread(target, drafter)
        limits = [most for one in (target, drafter) if (most := _max_rollback(one)) is not None]
        self._max_rollback = min(limits, default=None)
        self._sequences: dict[str, _Sequence] = {}
        self._num_failed_steps = 0

    @property
    def max_model_len(self) -> int:
        """Of the target: a draft model that reads less drafts as far as it reads."""
        return self._target.max_model_len

    def metrics(self) -> dict[str, float]:
        """What the target holds now, and how many steps of the draft model failed."""
        return self._target.metrics() | {"num_failed_draft_steps": float(self._num_failed_steps)}

    def release(self, key: str) -> None:
        """Free everything held for a sequence, by both models."""
        self._target.release(key)
        self._drafter.release(key)
        self._sequences.pop(key, None)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """Draft, and verify; see :meth:`specdec.core.backends.TargetBackend.verify`."""
        drafting, unread = self._drafting(jobs)
        drafts = _drafts_of(drafting)
        try:
            results = self._verify_drafts(jobs, drafts, unread)
        except DeviceLostError:
            raise
        except Exception as error:
            if not drafts:
                raise
            self._contain(drafting, error, [one for one in drafting if one.place in drafts])
            for job in jobs:
                self._target.release(job.key)
            drafting, drafts, unread = [], {}, None
            results = self._target.verify(jobs)
        finally:
            self._drafter.rest()
        for one in drafting:
            if results[one.place].num_drafted:
                one.sequence.is_suspect = False
        if unread is not None:
            # Nothing is left of one that had no finite numbers, though as many tokens were verified.
            known = _drafts_of(drafting)
            drafts = {place: known.get(place, Draft(source="chain")) for place in drafts}
        for place, (job, result) in enumerate(zip(jobs, results, strict=True)):
            if place in drafts and not result.is_forced and result.status in (Status.DECIDED, Status.SUSPECT):
                results[place] = result._replace(own=drafts[place])
            if result.status is Status.DECIDED:
                self._sequences.setdefault(job.key, _Sequence()).is_decoding = True
            elif job.key in self._sequences:
                self._sequences[job.key].is_decoding = False
        return results

    def _verify_drafts(
        self, jobs: Sequence[VerifyJob], drafts: dict[int, Draft], unread: UnreadProposals | None
    ) -> list[Verification]:
        """A step of the target with some drafts in the place of the jobs' own."""
        if drafts:
            jobs = [
                job._replace(
                    draft=draft.tokens,
                    source=draft.source,
                    parents=(),
                    unread=unread,
                )
                if (draft := drafts.get(place))
                else job
                for place, job in enumerate(jobs)
            ]
        results = self._target.verify(jobs)
        if unread is not None:
            unread.read()  # where the target has come to none of them
        return results

    def _drafting(self, jobs: Sequence[VerifyJob]) -> tuple[list[_Drafting], UnreadProposals | None]:
        """What is drafted in this step, and, where it is not known yet, what has it read."""
        wanted = [one for place, job in enumerate(jobs) if (one := self._wanted(place, job)) is not None]
        if not wanted:
            return [], None
        for one in wanted:
            _bring_to_log(one.sequence, one.job)
        # Those whose step failed are tried apart, one in a step.
        suspect = next((one for one in wanted if one.sequence.is_suspect), None)
        sound = [one for one in wanted if not one.sequence.is_suspect]
        may_stay = suspect is None and all(one.num_tokens <= self._most_unread for one in sound)
        unread = self._draw(sound, may_stay)
        if suspect is not None:
            self._draw([suspect])
        return wanted, unread

    def _wanted(self, place: int, job: VerifyJob) -> _Drafting | None:
        """How much is to be drafted for a job; None for nothing. An offer stays."""
        if job.source in OFFERED:
            return None
        bound = job.spec.num_speculative_tokens
        count = min(job.max_own_tokens, self._num_draft_tokens if bound is None else bound)
        count = min(count, self._drafter.max_model_len + 1 - len(job.log))
        if self._max_rollback is not None:
            count = min(count, self._max_rollback)
        if count <= 0:
            return None
        sequence = self._sequences.setdefault(job.key, _Sequence(is_decoding=self._drafts_first))
        if not sequence.is_decoding or sequence.is_barred:
            return None
        return _Drafting(place, job, sequence, count)

    def _draw(self, going: list[_Drafting], may_stay: bool = False) -> UnreadProposals | None:
        """Draw all tokens, a pass for each; prompts are read beside those that draw, and a chunk of them alone.

        How many passes a draft gets depends on lengths and on room, and on nothing that was drawn. Where its tokens may
        stay on the device, and do, it gets one step, and what has it read is given.
        """
        for number in range(max((one.num_tokens for one in going), default=0)):
            jobs = [one.next_job(may_stay and not number) for one in going]
            try:
                proposals = self._drafter.propose(jobs)
            except DeviceLostError:
                raise
            except Exception as error:
                self._contain(going, error, going)
                return None
            for one, job in zip(going, jobs, strict=True):
                one.sequence.agreed = len(job.tokens)
            unread = next((one.unread for one in proposals if one.unread is not None), None)
            if unread is not None:
                for one in going:
                    one.is_handed = True
                unread.when_read(partial(self._take_read, going))
            drawing, reading = self._take(going, proposals)
            going = [one for one in going if one in drawing or one in reading] if drawing else []
            if unread is not None or not going:
                return unread
        return None

    def _take(
        self, going: Sequence[_Drafting], proposals: Sequence[Proposal]
    ) -> tuple[list[_Drafting], list[_Drafting]]:
        """Take what was proposed; gives those whose drafts go on after it, and those whose prompts do."""
        drawing: list[_Drafting] = []
        reading: list[_Drafting] = []
        for one, proposed in zip(going, proposals, strict=True):
            proposal = proposed if proposed.unread is not None else proposed.checked()
            if one.take(proposal):
                drawing.append(one)
            elif proposal.status is Status.PREFILLING:
                reading.append(one)
            elif proposal.status in (Status.FAILED, Status.SUSPECT):
                self._drafter.release(one.job.key)
                one.sequence.forget()
                one.sequence.is_barred = proposal.status is Status.FAILED or one.sequence.is_suspect
                one.sequence.is_suspect = True
        return drawing, reading

    def _take_read(self, going: Sequence[_Drafting], proposals: Sequence[Proposal]) -> None:
        """The tokens that others have stood for are known."""
        for one in going:
            one.take_back()
        self._take(going, proposals)

    def _contain(self, drafting: Sequence[_Drafting], error: Exception, suspects: Sequence[_Drafting]) -> None:
        """A step has failed that drafted, or verified drafts: nobody in it has a draft.

        Of those whose drafts may be at fault, one that was under suspicion has none from now on.
        """
        self._num_failed_steps += 1
        logger.error("A step failed that drafted for %d sequences, or verified it", len(drafting), exc_info=error)
        for one in drafting:
            self._drafter.release(one.job.key)
            one.sequence.forget()
            one.drawn.clear()
        for one in suspects:
            one.sequence.is_barred = one.sequence.is_suspect
            one.sequence.is_suspect = True


def most_unread(target: TargetBackend, drafter: DraftBackend) -> int:
    """How many tokens of a draft can go to a target on their device, without being known here first; 0 for none."""
    decides, drafts = _model_of(target), _model_of(drafter)
    if not isinstance(decides, ModelTarget) or not isinstance(drafts, ModelDrafter):
        return 0
    return drafts.num_chained_tokens if decides.takes_unread(drafts) else 0


def _max_rollback(backend: TargetBackend | DraftBackend) -> int | None:
    model = _model_of(backend)
    return model.max_rollback if isinstance(model, ModelBackend) else None


def _model_of(backend: TargetBackend | DraftBackend) -> object:
    return backend.inner if isinstance(backend, (ObservedTarget, ObservedDrafter)) else backend


def _drafts_of(drafting: Sequence[_Drafting]) -> dict[int, Draft]:
    """What was drafted, by the place of its job."""
    drafts = {one.place: one.draft() for one in drafting}
    return {place: draft for place, draft in drafts.items() if draft.tokens}


def _bring_to_log(sequence: _Sequence, job: VerifyJob) -> None:
    """What was drafted and refused goes, and what was committed comes."""
    tokens, log = sequence.tokens, job.log.tokens
    start = min(len(tokens), len(log), job.spec.output_start)
    same = common_prefix_length(tokens.array, log, start)
    tokens.truncate(same)
    tokens.extend(log[same:])
    sequence.agreed = min(sequence.agreed, same)
