"""Probes: when a few sequences of a group that is off draft a little, so that better times are noticed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.control.limits import Conditions
from specdec.control.settings import Settings


@dataclass
class Probes:
    """The probes of one group while it is off.

    The next is due after an interval by the clock, and after so much time under load that the last one is paid for. A
    probe lasts its rounds under load. So a pause neither counts as a probe nor makes it a larger share of the
    time that is left.

    Attributes:
        interval_s: Between probes; 0 until the first is planned.
        due_s: When the next is due, by the clock.
        paid_s: When the last is paid for, in time under load.
        began_s: When the one that runs began, in time under load; None between probes.
    """

    settings: Settings
    interval_s: float = 0.0
    due_s: float = math.inf
    paid_s: float = 0.0
    began_s: float | None = None

    def plan(self, now_s: float, load_s: float, conditions: Conditions) -> None:
        """The group goes off: the next probe is due an interval from now."""
        self.interval_s = self.interval_s or self.settings.probe_first_s
        self.began_s = None
        self._schedule(now_s, load_s, self._rest_s(conditions, self.settings.probe_rounds, conditions.num_rows))

    def reset(self) -> None:
        """Drafting is worthwhile: once the group is off again, the intervals begin anew."""
        self.interval_s = 0.0

    def is_on(self, now_s: float, load_s: float, conditions: Conditions, num_sequences: int) -> bool:
        """Whether some of so many sequences probe now, until the next time this is asked."""
        if self.began_s is None:
            if now_s >= self.due_s and load_s >= self.paid_s:
                self.began_s = load_s
            return self.began_s is not None
        lasted_s, step_s = load_s - self.began_s, conditions.target_s(0)
        if lasted_s < self.settings.probe_rounds * step_s:
            return True
        self.began_s = None
        self.interval_s = min(2 * self.interval_s, self.settings.probe_last_s)
        # Reviews may be further apart than a probe is to last: it costs what it took.
        num_rounds = max(self.settings.probe_rounds, lasted_s / step_s)
        self._schedule(now_s, load_s, self._rest_s(conditions, num_rounds, num_sequences))
        return False

    def some_of(self, seqs: Sequence[str]) -> Sequence[str]:
        """The sequences that probe, others each time."""
        turn = int(self.due_s * 1000) % len(seqs) if math.isfinite(self.due_s) else 0
        return [*seqs[turn:], *seqs[:turn]][: self._num_probing(len(seqs))]

    def _schedule(self, now_s: float, load_s: float, rest_s: float) -> None:
        self.due_s, self.paid_s = now_s + self.interval_s, load_s + rest_s

    def _num_probing(self, num_sequences: int) -> int:
        return max(1, round(self.settings.probe_share * num_sequences))

    def _rest_s(self, conditions: Conditions, num_rounds: float, num_sequences: int) -> float:
        """Time after a probe, for what it costs: all wait for the steps that verify the drafts of a few."""
        drafted = self._num_probing(num_sequences) * self.settings.probe_arm.num_draft_tokens
        rows = conditions.num_rows
        longer_s = conditions.target.at(rows, rows + drafted) - conditions.target_s(0)
        return longer_s * num_rounds / self.settings.probe_cost
