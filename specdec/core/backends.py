"""The borders between the protocol's state machines and the models that do the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from specdec.core.drafts import NO_DRAFT, Draft
from specdec.core.log import TokenLog
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, are_ids
from specdec.core.types import PromptLogprobs, TokenLogprobs, Tokens


class Status(Enum):
    """What a backend did with a job in one step."""

    DECIDED = "decided"
    """It has a result."""
    PREFILLING = "prefilling"
    """It read a part of the sequence's tokens; give the same job again."""
    WAITING = "waiting"
    """There was no room; the sequence holds nothing, or what it held was taken. Give the same job again."""
    FAILED = "failed"
    """It raised an error of its own, and of no other job of the step; it must not be given again."""
    SUSPECT = "suspect"
    """A step failed that nothing else was in; it may be given again once its key is released."""


class UnreadProposals(Protocol):
    """Proposals whose tokens are on a device alone: negative numbers stand for them until they are read."""

    def when_read(self, listener: Callable[[list[Proposal]], None]) -> None:
        """Have a listener called, after those before it, with the proposals as they are once they are read."""
        ...

    def read(self) -> None:
        """Wait for the tokens; nothing where that was done."""
        ...


class VerifyJob(NamedTuple):
    """Bring a sequence's state to ``log``, verify ``draft`` after it, and decide what comes next.

    Attributes:
        key: The sequence; the backend keeps its state under this name until ``release``.
        log: All committed tokens. Must not be changed by the backend.
        draft: Proposed tokens, not longer than the worker wants committed at most, less one. A drafter may say
            anything, so they need not be tokens that the model has.
        source: What the draft is; empty where there is none.
        room: How many tokens a backend that knows without a draft model what comes next may draft by itself.
        parents: Where the draft is a tree, as in :class:`specdec.core.drafts.Draft`. A backend may verify less of
            it, such as a chain.
        max_own_tokens: How many tokens the backend itself may draft: by a draft model beside it, in the place of
            ``draft`` in this step; by heads, for the next one.
        unread: Where the draft's tokens are on the backend's device alone, what they are of: the backend has it read
            once its step is under way.
    """

    key: str
    log: TokenLog
    draft: Tokens
    spec: SequenceSpec
    source: str = ""
    room: int = 0
    parents: Tokens = ()
    max_own_tokens: int = 0
    unread: UnreadProposals | None = None

    @property
    def proposed(self) -> Draft:
        """The draft with all that is known of it."""
        return Draft(self.draft, self.source, self.parents)

    def within(self, vocab_size: int) -> VerifyJob:
        """Cut the draft at the first token outside of [0, vocab_size): a drafter may say anything (rule 9)."""
        tokens = self.draft
        if not tokens or self.unread is not None or (min(tokens) >= 0 and max(tokens) < vocab_size):
            return self
        count = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        draft = self.proposed.only(range(count))
        return self._replace(draft=draft.tokens, parents=draft.parents)


class Verification(NamedTuple):
    """What a target backend decided for one job.

    Attributes:
        run: The accepted draft tokens and the next token (corrected, bonus or plain); empty unless decided.
        num_accepted: How many of them were drafted: ``len(run) - 1``, unless the rule leaves the bonus out.
        num_drafted: How many draft tokens were verified (fewer than offered where memory is short), all of a tree.
        logprobs: One entry per token of ``run``, if the request asked for them.
        prompt_logprobs: With the first output token, if the request asked for them.
        num_cached_tokens: With the first output token, how many of the prompt's tokens were not read for it.
        is_forced: Whether the draft was not the job's but the backend's own.
        reason: What went wrong, if the job has failed.
        next_draft: What the backend itself proposes after ``run``, if anything.
        own: What it drafted itself in the place of the job's draft, of a suspect too; None where it did not.
    """

    status: Status
    run: Tokens = ()
    num_accepted: int = 0
    num_drafted: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    is_forced: bool = False
    reason: str = ""
    next_draft: Draft = NO_DRAFT
    own: Draft | None = None


class TargetBackend(Protocol):
    """The tensor half of a target: caches, forward passes, sampling."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        ...

    def metrics(self) -> dict[str, float]:
        """What it holds now, and what it has done since it started, by the names of the worker's report."""
        ...

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step over a ragged batch; ``jobs`` come in their order, and the last yield first when room is short.

        Returns one entry per job, in their order. A key held by the backend that has no job in this call may lose its
        state where room is short; it is rebuilt from the log when its next job comes.

        Raises:
            DeviceLostError: The backend can no longer be used.
            Exception: The step failed as a whole, and nothing is decided. The backend can be used again once all keys
                of the step are released.
        """
        ...

    def release(self, key: str) -> None:
        """Free everything held for a sequence; unknown keys are ignored."""
        ...


class DraftJob(NamedTuple):
    """Propose the token after ``tokens``.

    Attributes:
        key: The sequence or branch; the backend keeps its state under this name until ``release``.
        tokens: Committed tokens and what is drafted after them so far. The backend must not keep them: the array may
            have other tokens once the step is over.
        agreed: Length up to which ``tokens`` is known to equal the tokens of this key's last job; for the first job of
            a branch, those of the last job of ``fork_of``.
        num_committed: How many of ``tokens`` are committed; what follows is drafted.
        fork_of: For a branch, the key of its sequence: where nothing is held for ``key``, it begins with a copy of what
            is held there. Branches yield to sequences where room is short.
        num_guesses: How many of the likeliest next tokens are wanted beside the one drawn.
        num_tokens: How many tokens in a row are of use.
        may_stay: Whether the step's tokens may stay on the device; see :attr:`Proposal.unread`.
    """

    key: str
    tokens: TokenSequence
    spec: SequenceSpec
    agreed: int = 0
    num_committed: int = 0
    fork_of: str | None = None
    num_guesses: int = 0
    num_tokens: int = 1
    may_stay: bool = False


class Proposal(NamedTuple):
    """What a draft backend did for one job; ``token`` is None unless decided.

    Attributes:
        guesses: Other tokens that may well come at this place, the likeliest first, without ``token``, ranked with
            the noise. At most as many as were wanted.
        likelihoods: How likely it is that the target says ``token``, and each of ``guesses``; empty if that is unknown.
        further: Proposals for the places after it, where the step gave several tokens in a row; none has further ones.
        num_passes: Forward passes that the step made, one after another.
        unread: Where the tokens stay on the device, what they are of. They must be read before the next step, or all
            keys of the step be released.
    """

    status: Status
    token: int | None = None
    guesses: Tokens = ()
    likelihoods: tuple[float, ...] = ()
    further: tuple[Proposal, ...] = ()
    num_passes: int = 1
    unread: UnreadProposals | None = None

    def checked(self) -> Proposal:
        """The proposal, or a failed one if it names a token that can be none: it could not be kept, nor sent."""
        for one in (self, *self.further):
            if not are_ids(one.guesses if one.token is None else (one.token, *one.guesses)):
                return Proposal(Status.FAILED, num_passes=self.num_passes)
        return self


class DraftBackend(Protocol):
    """The tensor half of a drafter."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the draft model can read."""
        ...

    def metrics(self) -> dict[str, float]:
        """What it holds now, and what it has done since it started, by the names of the worker's report."""
        ...

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One step over a ragged batch, in their order: a token or more for each job, or a part of its prefill.

        Branches come after all sequences. A key held by the backend that has no job in this call may lose its state
        where room is short; it is rebuilt from the tokens when its next job comes.

        Raises:
            DeviceLostError: The backend can no longer be used.
            Exception: The step failed as a whole; see :meth:`TargetBackend.verify`.
        """
        ...

    def rest(self) -> None:
        """A step found nothing to draft, or no room: the time until the next one is not spent on drafting."""
        ...

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on; what was held for ``new_key`` is freed.

        Nothing happens where nothing is held for ``key``.
        """
        ...

    def release(self, key: str) -> None:
        """Free everything held for a sequence; unknown keys are ignored."""
        ...
