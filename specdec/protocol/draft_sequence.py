"""A sequence on a drafter: its chain, its branches, and what of both is wanted, due, and known to the target."""

from __future__ import annotations

from collections import deque

from specdec.core.backends import DraftJob, Proposal
from specdec.core.messages import Interval, Offer, Open, Outcome, Plan
from specdec.core.tokens import TokenBuffer, common_prefix_length
from specdec.core.types import Tokens
from specdec.drafting.branches import Likelihoods, foreseen, likely_outcomes
from specdec.protocol.worker import MOST_INTERVALS, WorkerSequence


class Path:
    """Draft tokens, with what is known of each.

    Attributes:
        tokens: The draft tokens.
        proposals: What the backend said of each of them.
    """

    __slots__ = ("proposals", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.proposals: list[Proposal] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, proposal: Proposal) -> None:
        """Add the token that a backend proposed."""
        assert proposal.token is not None, "only what was decided is drafted"
        self.tokens.append(proposal.token)
        self.proposals.append(proposal)

    def drop_first(self, count: int) -> None:
        """Forget the first ``count`` tokens: they are committed."""
        del self.tokens[:count], self.proposals[:count]

    def guesses(self, count: int) -> list[Tokens]:
        """For each of the first ``count``, other tokens that may well stand in its place, the likeliest first."""
        return [proposal.guesses for proposal in self.proposals[:count]]

    def likelihoods(self, count: int) -> list[Likelihoods]:
        """For each of the first ``count``, how likely it is and each of its guesses; empty where that is unknown."""
        return [proposal.likelihoods for proposal in self.proposals[:count]]


class Branch:
    """A chain after an outcome that the target may yet come to.

    Attributes:
        key: Under which the backend holds its state.
        position: Absolute position of the outcome's token: the draft tokens before it are accepted.
        token: The outcome's token.
        path: What would follow it.
        num_wanted: Tokens of ``path`` that make its draft.
        num_useful: One more, where the token after the draft is of use.
        num_offered: Tokens of ``path`` that were offered to the target.
        is_begun: Whether the backend was ever asked for it.
        is_waiting: Whether it found no room when it was asked last.
        tokens: All of its sequence, from the log's first token on; None until it is first asked for.
    """

    __slots__ = (
        *("is_begun", "is_waiting", "key", "num_offered", "num_useful", "num_wanted", "path", "position"),
        *("token", "tokens"),
    )

    def __init__(self, key: str, position: int, token: int) -> None:
        self.key = key
        self.position = position
        self.token = token
        self.path = Path()
        self.num_wanted = self.num_useful = self.num_offered = 0
        self.is_begun = False
        self.is_waiting = False
        self.tokens: TokenBuffer | None = None


class DraftSequence(WorkerSequence):
    """A sequence on a drafter.

    Attributes:
        rank: Those with the least are drafted first, and yield last where room is short.
        path: The chain: draft tokens after the log.
        tokens: Log and chain.
        branches: By position and token of their outcome, in the order in which they were forked.
        num_forks: Branches forked so far; numbers their keys.
        forked_for: Length of the log, number verified and number of guesses for which branches were last forked.
        num_verified: How many of the chain's tokens the target is taken to verify now.
        offered_end: Absolute length, log and chain, up to which the present chain has been offered.
        limit: Absolute length beyond which no draft token is of use: the target decides the last token in any case.
        intervals: Steps since the newest offer, where the request asked for times.
        agreed: Length up to which log and chain are what the backend was given last.
        num_branches: Most branches, by its plan and by its share of those that the drafter holds in all.
        num_guesses: Most guesses that are of use at one place.
        is_skipped: Whether nothing is drafted for it any more.
        ending_token_ids: End the sequence: nothing is drafted after one.
    """

    __slots__ = (
        "_bounds",
        "agreed",
        "branches",
        "ending_token_ids",
        "forked_for",
        "intervals",
        "is_skipped",
        "limit",
        "num_branches",
        "num_forks",
        "num_guesses",
        "num_verified",
        "offered_end",
        "path",
        "rank",
        "tokens",
    )

    def __init__(self, message: Open, max_model_len: int) -> None:
        super().__init__(message)
        self.rank = *self.spec.order, self.seq
        self.path = Path()
        self.tokens = TokenBuffer(self.log.tokens)
        self.branches: dict[tuple[int, int], Branch] = {}
        self.ending_token_ids = message.spec.ending_token_ids
        self.forked_for = 0, 0, 0
        self.num_forks = 0
        self.num_verified = 0
        self.offered_end = len(self.log)
        self.intervals: deque[Interval] = deque(maxlen=MOST_INTERVALS)
        self.is_skipped = False
        self.agreed = 0
        self.limit = min(message.spec.output_start + message.spec.max_tokens - 1, max_model_len)
        self.num_branches = self.num_guesses = 0
        self._bounds: tuple[Plan, int] | None = None

    @property
    def end(self) -> int:
        """Absolute length of log and chain."""
        return len(self.tokens)

    def take(self, branch: Branch | None, proposal: Proposal) -> int:
        """Add to the chain, or to a branch, what a backend proposed, as far as it is of use; gives how many tokens."""
        path = self.path if branch is None else branch.path
        room = (self.num_wanted if branch is None else branch.num_useful) - len(path)
        new: list[int] = []
        for one in (proposal, *proposal.further)[:room]:
            assert one.token is not None, "only what was decided is drafted"
            path.append(one)
            new.append(one.token)
            if one.token in self.ending_token_ids:
                break
        tokens = self.tokens if branch is None else branch.tokens
        if tokens is not None:
            tokens.extend(new)
        return len(new)

    def advance(self, start: int) -> int:
        """Take off the chain, which begins at ``start``, what of it is committed; gives the length to which that is."""
        same = common_prefix_length(self.path.tokens, self.log.tail(start))
        self.path.drop_first(same)
        self.agreed = min(self.agreed, start + same)
        return start + same

    def take_over(self, branch: Branch) -> None:
        """The branch is the chain from now on."""
        position = branch.position
        self.path = branch.path
        self.tokens = self._tokens_of(branch)
        self.offered_end = position + 1 + branch.num_offered

    def drop_chain(self, start: int) -> None:
        """Nothing of the chain is left, which agreed with the log up to ``start``."""
        self.path = Path()
        self.tokens.truncate(start)
        self.tokens.extend(self.log.array(start))
        self.offered_end = len(self.tokens)

    def skip(self) -> None:
        """Draft nothing more."""
        self.is_skipped = True
        self._bounds = None

    @property
    def num_offered(self) -> int:
        """Tokens of the chain that were offered to the target."""
        return self.offered_end - len(self.log)

    @property
    def wants_branches(self) -> bool:
        """Whether its plan has any."""
        return self.plan.mode == "outcomes" and not self.is_skipped

    @property
    def has_branches(self) -> bool:
        """Whether its plan has any, and its share too."""
        return self.num_branches > 0

    def bound_branches(self, most: int) -> None:
        """Take the plan's branches, but no more than ``most``.

        At one place half as many guesses again are of use as the first gets where nothing is known: a place in doubt
        may need more, but no place shall take the branches of all others.
        """
        plan = self.plan
        if self._bounds is not None and self._bounds[0] is plan and self._bounds[1] == most:
            return
        self._bounds = plan, most
        self.num_branches = min(plan.num_branches, most) if self.wants_branches else 0
        self.num_guesses = 0
        if self.num_branches:
            usual = 1 + max(j for _, j in foreseen(self.num_branches, plan.num_draft_tokens, plan.acceptance_rate))
            self.num_guesses = min(self.num_branches, usual + (usual + 1) // 2)
        for branch in self.branches.values():
            self._bound_branch(branch)

    def fork(self, outcome: Outcome) -> Branch | None:
        """Begin a branch, unless it is there already or nothing could follow it."""
        position, token = len(self.log) + outcome.num_accepted, outcome.next_token
        if (position, token) in self.branches or token in self.ending_token_ids:
            return None
        # Numbered with leading zeros: names in the order of likelihood are ranks in the order of likelihood.
        branch = Branch(f"{self.seq}#{self.num_forks:010d}", position, token)
        self._bound_branch(branch)
        if not branch.num_wanted:
            return None
        self.branches[position, token] = branch
        self.num_forks += 1
        return branch

    def _bound_branch(self, branch: Branch) -> None:
        """Its draft is as long as the plan's, within the request's and the draft model's lengths.

        The token after a branch's draft names in advance the outcomes that follow when all of that is kept.
        """
        most, num_tokens = self.limit - branch.position - 1, self.plan.num_draft_tokens
        branch.num_wanted = max(0, min(num_tokens, most))
        branch.num_useful = max(0, min(num_tokens + 1, most))

    # What is wanted.

    @property
    def num_wanted(self) -> int:
        """Length the chain should have: by plan, within the request's and the draft model's lengths, up to its end."""
        if self.is_skipped or self._has_ended(self.path):
            return len(self.path)
        num_tokens = self.plan.num_draft_tokens
        if num_tokens and self.plan.mode != "sequential":
            num_tokens += 1 + (self.num_verified if self.num_branches else num_tokens)
        most = self.limit - len(self.log)
        return num_tokens if num_tokens <= most else max(0, most)

    def growing_branches(self) -> list[tuple[Branch, DraftJob]]:
        """The branches of which one more token is of use, in the order in which they were forked, each with its job."""
        return [
            (branch, self.branch_job(branch))
            for branch in self.branches.values()
            if len(branch.path.tokens) < branch.num_useful and not self._has_ended(branch.path)
        ]

    def _has_ended(self, path: Path) -> bool:
        """Whether nothing is drafted after a path: its last token ends the sequence."""
        return bool(path.tokens) and path.tokens[-1] in self.ending_token_ids

    def likely_outcomes(self) -> list[Outcome]:
        """The fan-out over what is verified now, as far as the chain's guesses name it by now."""
        plan, count = self.plan, self.num_verified + 1
        known = self.path.likelihoods(count)
        places = foreseen(self.num_branches, self.num_verified, plan.acceptance_rate, known)
        return likely_outcomes(places, self.path.guesses(count))

    def chain_job(self) -> DraftJob:
        """To propose what comes next in the chain."""
        num_tokens = self.num_wanted - len(self.path)
        return DraftJob(
            self.seq, self.tokens.array, self.spec, self.agreed, len(self.log), None, self.num_guesses, num_tokens
        )

    def branch_job(self, branch: Branch) -> DraftJob:
        """To propose what comes next in a branch.

        Up to the outcome its tokens are the sequence's. Nothing further is said to agree: where the backend has lost
        the branch, it begins again with a copy of the sequence.
        """
        if branch.tokens is None:
            branch.tokens = self._tokens_of(branch)
        tokens, agreed, num_tokens = branch.tokens.array, min(self.agreed, branch.position), branch.num_useful
        num_tokens -= len(branch.path)
        return DraftJob(branch.key, tokens, self.spec, agreed, len(self.log), self.seq, self.num_guesses, num_tokens)

    def _tokens_of(self, branch: Branch) -> TokenBuffer:
        """All of a branch's sequence."""
        if branch.tokens is not None:
            return branch.tokens
        tokens = TokenBuffer(self.tokens.array[: branch.position])
        tokens.extend((branch.token, *branch.path.tokens))
        return tokens

    # What is offered.

    @property
    def has_news(self) -> bool:
        """Whether anything was drafted that has not been offered; a branch's token beyond its draft is no news."""
        if self.end > self.offered_end:
            return True
        for branch in self.branches.values():
            if len(branch.path.tokens) > branch.num_offered < branch.num_wanted:
                return True
        return False

    @property
    def is_complete(self) -> bool:
        """Whether chain and branches are as long as they should be, but for branches that find no room."""
        if len(self.path.tokens) < self.num_wanted:
            return False
        for branch in self.branches.values():
            is_growing = not branch.is_waiting and not self._has_ended(branch.path)
            if is_growing and len(branch.path.tokens) < branch.num_wanted:
                return False
        return True

    @property
    def is_due(self) -> bool:
        """Whether to offer what there is now: all that is new, but in turn nothing before the chain is done.

        Nobody knows here when the target's next step begins, and what comes after that is late.
        """
        is_early = self.plan.mode == "sequential" and not self.is_complete
        return self.plan.num_draft_tokens > 0 and self.has_news and not is_early

    def take_offer(self) -> Offer:
        """All that is drafted, but for what branches have beyond their drafts; it counts as offered from now on."""
        self.offered_end = self.end
        intervals = tuple(self.intervals)
        self.intervals.clear()
        length = len(self.log)
        branches: list[tuple[Outcome, Tokens]] = []
        for branch in self.branches.values():
            if branch.path.tokens:
                drafted = tuple(branch.path.tokens[: branch.num_wanted])
                branch.num_offered = len(drafted)
                branches.append((Outcome(branch.position - length, branch.token), drafted))
        offered = tuple(self.path.tokens), tuple(branches), intervals
        return Offer(self.seq, self.epoch, self.log.prefix_hash(), *offered)
