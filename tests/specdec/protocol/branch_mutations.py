"""What drafter and target promise of branches, switched off in the real machines; see ``mutations.py``."""

from __future__ import annotations

import pytest

from specdec.core.backends import DraftJob
from specdec.core.drafts import NO_DRAFT, Draft, remaining_draft
from specdec.core.log import TokenLog
from specdec.core.messages import Offer, Open
from specdec.protocol import target
from specdec.protocol.draft_sequence import Branch, DraftSequence
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.worker import WorkerMachine
from tests.specdec.protocol.mutations import Mutation

BRANCH_MUTATIONS: dict[str, Mutation] = {}


def mutation(mutate: Mutation) -> Mutation:
    BRANCH_MUTATIONS[mutate.__name__] = mutate
    return mutate


@mutation
def right_branch(patch: pytest.MonkeyPatch) -> None:
    """The branch of the outcome that came is promoted. Off: one of its siblings."""
    follow = DrafterMachine._follow

    def mix_up(self: DrafterMachine, sequence: DraftSequence, old_length: int) -> None:
        places, branches = list(sequence.branches), list(sequence.branches.values())
        for (position, token), branch in zip(places, branches[1:] + branches[:1], strict=True):
            sequence.branches[position, token] = branch
            branch.position, branch.token = position, token
        follow(self, sequence, old_length)

    patch.setattr(DrafterMachine, "_follow", mix_up)


@mutation
def branch_prefix_hash(patch: pytest.MonkeyPatch) -> None:
    """A branch counts from its offer's prefix hash. Off: it is used wherever its token came."""

    def anywhere(offer: Offer, log: TokenLog) -> Draft:
        for (_, token), chain in offer.branches:
            if log.tokens[-1] == token:
                return Draft(chain)
        return remaining_draft(offer, log)

    patch.setattr(target, "remaining_draft", anywhere)


@mutation
def decided_outcome(patch: pytest.MonkeyPatch) -> None:
    """A branch is used once its outcome is decided. Off: its token is a draft token."""

    def through_a_guess(offer: Offer, log: TokenLog) -> Draft:
        if offer.prefix_hash == log.prefix_hash() and offer.branches:
            (n, token), chain = offer.branches[0]
            return Draft((*offer.chain[:n], token, *chain))
        return remaining_draft(offer, log)

    patch.setattr(target, "remaining_draft", through_a_guess)


@mutation
def chosen_branch(patch: pytest.MonkeyPatch) -> None:
    """The target picks the branch of the outcome that it decided. Off: of as many accepted, and any token."""

    def any_token(offer: Offer, log: TokenLog) -> Draft:
        since = log.tail(offer.prefix_hash.length) if log.has(offer.prefix_hash) else ()
        for (n, _), chain in offer.branches:
            if len(since) == n + 1 and since[:n] == offer.chain[:n] != since:
                return Draft(chain)
        return remaining_draft(offer, log) if log.has(offer.prefix_hash) else NO_DRAFT

    patch.setattr(target, "remaining_draft", any_token)


@mutation
def freed_siblings(patch: pytest.MonkeyPatch) -> None:
    """What is held for a branch goes with it."""
    drop = DrafterMachine._drop_branches

    def drop_and_keep(self: DrafterMachine, sequence: DraftSequence, before: int | None = None) -> None:
        for branch in sequence.branches.values():
            branch.is_begun = False
        drop(self, sequence, before)

    patch.setattr(DrafterMachine, "_drop_branches", drop_and_keep)


@mutation
def freed_when_opened_anew(patch: pytest.MonkeyPatch) -> None:
    """A newer epoch keeps what is cached of the sequence, and frees its branches."""

    def open_only(self: DrafterMachine, message: Open, now_s: float) -> None:
        WorkerMachine._on_open(self, message, now_s)

    patch.setattr(DrafterMachine, "_on_open", open_only)


@mutation
def renamed(patch: pytest.MonkeyPatch) -> None:
    """The backend is told which branch became the sequence."""
    promote = DrafterMachine._promote

    def promote_silently(self: DrafterMachine, sequence: DraftSequence, branch: Branch) -> None:
        branch.is_begun = False
        promote(self, sequence, branch)

    patch.setattr(DrafterMachine, "_promote", promote_silently)


@mutation
def branch_agreed(patch: pytest.MonkeyPatch) -> None:
    """A branch that was taken begins again from its sequence, and is said to agree only as far as that does."""
    branch_job = DraftSequence.branch_job

    def agreed_to_its_end(self: DraftSequence, branch: Branch) -> DraftJob:
        job = branch_job(self, branch)
        return job._replace(agreed=len(job.tokens) - 1)

    patch.setattr(DraftSequence, "branch_job", agreed_to_its_end)


@mutation
def bounded(patch: pytest.MonkeyPatch) -> None:
    """Branches that outlive a verdict count among those of the next verification."""
    branch_out = DrafterMachine._branch_out

    def branch_out_anew(self: DrafterMachine, sequence: DraftSequence) -> None:
        held, sequence.branches = sequence.branches, {}
        branch_out(self, sequence)
        sequence.branches = held | sequence.branches

    patch.setattr(DrafterMachine, "_branch_out", branch_out_anew)
