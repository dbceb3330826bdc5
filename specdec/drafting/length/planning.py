"""When the controller is told and asked: so that no verdict's commit waits for it."""

from __future__ import annotations

from specdec.core.messages import Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.drafting.length.plans import PlanController

_REVIEW_S = 0.25
"""Period of the controller's reviews: short beside a sequence, long beside a step."""
_SOON_S = 0.05
"""Time after a sequence has come in which no other came, until a review: its first plan may be another load's."""
_QUIET_TURN = 2
"""Of the turns since a verdict came: its commit has left by then, and what is offered after it has time yet."""


class Planning:
    """A controller beside a relay.

    A review may take as long as some draft steps do, and what is relayed in its turn waits. So both wait for the second
    turn after a verdict, in which little is, reviews at most for another period.

    Args:
        controller: Of the relay's sequences.
    """

    def __init__(self, controller: PlanController) -> None:
        self._controller = controller
        self._decided: list[tuple[str, Notes, float]] = []
        self._reviewed_s = float("-inf")
        self._turns = 0
        self._has_opened = False
        self._opened_s: float | None = None

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan, which is soon reviewed."""
        self._has_opened = True
        return self._controller.opened(seq, spec)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come; the controller hears of them later."""
        self._decided.append((seq, notes, now_s))
        self._turns = 0

    def closed(self, seq: str) -> None:
        """A sequence has ended."""
        self._hand_over()
        self._controller.closed(seq)

    def take_turn(self, now_s: float) -> bool:
        """Once in every turn of the relay; True if the controller is to be asked in this one."""
        self._turns += 1
        is_quiet, waited_s = self._turns == _QUIET_TURN, now_s - self._reviewed_s
        is_due = waited_s >= 2 * _REVIEW_S or (is_quiet and waited_s >= _REVIEW_S)
        if self._has_opened:
            self._has_opened, self._opened_s = False, now_s
        is_due |= self._opened_s is not None and now_s - self._opened_s >= _SOON_S
        if is_due or is_quiet:
            self._hand_over()
        if is_due:
            self._reviewed_s, self._opened_s = now_s, None
        return is_due

    def _hand_over(self) -> None:
        for seq, notes, then_s in self._decided:
            self._controller.decided(seq, notes, then_s)
        self._decided.clear()
