"""Which offer each verified draft came from, told afterwards from what was offered and what was decided."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from specdec.protocol.messages import Outcome
from specdec.protocol.offers import OFFERS_KEPT, foresees
from specdec.types import Tokens


class Offered(NamedTuple):
    """An offer as a target received it.

    Attributes:
        length: Length of the log that it follows.
    """

    at_ns: int
    seq: str
    length: int
    chain: Tokens
    branches: tuple[tuple[Outcome, Tokens], ...]


class _Log:
    """What is known of a sequence's log: its tokens from ``start`` on, and where its newest round began."""

    def __init__(self, start: int) -> None:
        self.begin(start)
        self.offers: deque[Offered] = deque(maxlen=OFFERS_KEPT)
        self.was_missed = False

    def __len__(self) -> int:
        return self.start + len(self.tokens)

    def begin(self, start: int) -> None:
        """Nothing is known of what came before ``start``."""
        self.start = self.round_start = start
        self.tokens: list[int] = []

    def since(self, length: int) -> Tokens | None:
        """Tokens after the first ``length``; None if some of them are not known."""
        return tuple(self.tokens[length - self.start :]) if self.start <= length <= len(self) else None

    def foreseen_by(self, offered: Offered, since: Tokens | None) -> bool | None:
        """Whether the newest round's outcome is among those of an offer; None where it was not made for that round."""
        num_before = self.round_start - offered.length
        if since is None or num_before < 0 or not self.tokens:
            return None
        return foresees(offered.chain, offered.branches, since, num_before)

    def keep(self, offered: Offered) -> None:
        """As :class:`specdec.protocol.target.TargetMachine` does: in place of an earlier part, and if it is of use."""
        since = self.since(offered.length)
        if since and not _may_be_used(offered, since):
            self.was_missed |= self.foreseen_by(offered, since) is False
            self.offers = deque((kept for kept in self.offers if not _is_part(kept, offered)), OFFERS_KEPT)
            return
        for i, kept in enumerate(self.offers):
            if _is_part(kept, offered):
                self.offers[i] = offered
                return
        self.offers.append(offered)


class Foresight:
    """Follows a target's rounds and offers, in their order: a draft is chosen, a step made of it, and a run decided."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    def take(self, offered: Offered) -> bool:
        """An offer came; True if it is late: the round that it foresaw has been followed by another."""
        log = self._logs.setdefault(offered.seq, _Log(offered.length))
        log.keep(offered)
        return offered.length < log.round_start

    def judge(self, seq: str, base: int, *, has_draft: bool) -> tuple[str, str, bool]:
        """A step begins: what a row's draft is taken from, and whether the outcome before had been foreseen.

        Args:
            seq: The sequence.
            base: Length of its log before the step.
            has_draft: Whether a draft is verified.

        Returns:
            Source, outcome, and whether it was ahead, as :class:`specdec.engine.trace.VerifiedRow` has them.
        """
        log = self._logs.setdefault(seq, _Log(base))
        if len(log) != base:  # what came before was dropped, or was another life of the sequence
            log.begin(base)
        source, outcome, is_ahead, best = "", "miss" if log.was_missed else "", False, 0
        log.was_missed = False
        for offered in tuple(log.offers):
            since = log.since(offered.length)
            kind, left = _left(offered, since)
            if (is_foreseen := log.foreseen_by(offered, since)) is not None and outcome != "hit":
                outcome = "hit" if is_foreseen else "miss"
            if not _may_be_used(offered, since):
                log.offers.remove(offered)
            elif left > best:
                best, source, is_ahead = left, kind, bool(log.tokens) and offered.length <= log.round_start
        return (source if has_draft else ""), outcome, has_draft and is_ahead

    def decided(self, seq: str, base: int, run: Tokens) -> None:
        """The step has ended; ``run`` follows the first ``base`` tokens of the sequence's log."""
        log = self._logs.setdefault(seq, _Log(base))
        log.round_start = base
        log.tokens.extend(run)


def _is_part(kept: Offered, offered: Offered) -> bool:
    return kept.length == offered.length and kept.chain == offered.chain[: len(kept.chain)]


def _may_be_used(offered: Offered, since: Tokens | None) -> bool:
    """Whether anything is left of an offer, or may be after the next token."""
    awaits = since == offered.chain and any(n == len(offered.chain) for (n, _), _ in offered.branches)
    return awaits or _left(offered, since)[1] > 0


def _left(offered: Offered, since: Tokens | None) -> tuple[str, int]:
    """What is left of an offer after the tokens decided ``since``, and of what; see ``specdec.protocol.offers``."""
    if since is None:
        return "", 0
    same = next((i for i, (a, b) in enumerate(zip(offered.chain, since, strict=False)) if a != b), None)
    same = min(len(offered.chain), len(since)) if same is None else same
    if same == len(since):
        return "chain", len(offered.chain) - same
    for foreseen, chain in offered.branches:
        rest = since[same + 1 :]
        if foreseen == (same, since[same]) and chain[: len(rest)] == rest:
            return "branch", len(chain) - len(rest)
    return "", 0
