"""What a target makes of an offer: the draft that is left of it after the log."""

from __future__ import annotations

from specdec.protocol.drafts import NO_DRAFT, Draft
from specdec.protocol.marks import TokenLog
from specdec.protocol.messages import Offer, Outcome
from specdec.types import Tokens

Branches = tuple[tuple[Outcome, Tokens], ...]

OFFERS_KEPT = 4
"""Offers per sequence that a target holds at once."""


def remaining_draft(offer: Offer, log: TokenLog, *, needs_candidates: bool) -> Draft:
    """What an offer still proposes after a log; nothing if it does not fit (rule 6).

    Its chain, or the branch of the outcome that has come, must agree with every token committed since its mark. A
    branch is chosen by tokens that are committed, never by one that is still to be decided. So under the rejection
    rule nothing has been drawn yet at the positions of the draft that is left, and each of its tokens, drawn from its
    candidates without regard to the choice, gets the ratio test it needs (rule 9). So does each of their siblings.

    Args:
        offer: Of the same sequence.
        log: The committed tokens.
        needs_candidates: Under the rejection rule a draft is of no use without what it was drawn from.
    """
    since, chain = log.since(offer.mark), offer.chain
    if since is None:
        return NO_DRAFT
    count = len(since)
    if chain[:count] == since:
        rest, siblings = Draft(chain[count:], offer.candidates[count:], "chain"), offer.siblings[count:]
    else:
        same = 0
        while same < len(chain) and chain[same] == since[same]:
            same += 1
        rest, siblings = _branch(offer, same, since[same], since[same + 1 :])
    return NO_DRAFT if needs_candidates and len(rest.candidates) != len(rest.tokens) else rest.beside(siblings)


def awaits_token(offer: Offer, log: TokenLog) -> bool:
    """Whether a log ends as an offer's chain does, so that a branch of the offer may be left after the next token."""
    length, chain = offer.mark.length, offer.chain
    if length + len(chain) != len(log) or not log.has(offer.mark) or log.tail(length) != chain:
        return False
    return any(outcome.num_accepted == len(chain) for outcome, _ in offer.branches)


def foresees(chain: Tokens, branches: Branches, tokens: Tokens, num_before: int) -> bool | None:
    """Whether the outcome of a round is among those that an offer is prepared for.

    Args:
        chain: Of the offer, whose mark fits the log.
        branches: Of the offer.
        tokens: What was committed since its mark, up to the end of the round.
        num_before: How many of them were there when the round began.

    Returns:
        None where the offer was not made for that round: the log had left its chain before, or it has no branches.
    """
    if not branches or chain[:num_before] != tokens[:num_before]:
        return None
    if chain[: len(tokens)] == tokens:
        return True
    same = next((i for i, (a, b) in enumerate(zip(chain, tokens, strict=False)) if a != b), len(chain))
    return any(outcome == (same, tokens[same]) for outcome, _ in branches)


def _branch(offer: Offer, num_accepted: int, next_token: int, since: Tokens) -> tuple[Draft, tuple[Tokens, ...]]:
    """What is left of the branch of an outcome after the tokens committed since that, and its siblings."""
    outcome = (num_accepted, next_token)
    for i, (foreseen, chain) in enumerate(offer.branches):
        if foreseen == outcome and chain[: len(since)] == since:
            candidates = offer.branch_candidates[i] if i < len(offer.branch_candidates) else ()
            siblings = offer.branch_siblings[i] if i < len(offer.branch_siblings) else ()
            return Draft(chain[len(since) :], candidates[len(since) :], "branch"), siblings[len(since) :]
    return NO_DRAFT, ()
