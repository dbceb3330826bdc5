"""Which of several drafters draft for a target's sequences: those whose tokens are worth the target's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from specdec.drafting.length.modes import StepTimes

TRIAL_ROUNDS = 64.0
"""Rounds in whose drafts a drafter has tokens, after which it is judged, and between two judgments."""
REST_S = 60.0
"""Who does not pay drafts nothing for so long; then it is tried again. Who offers little is judged after as long."""
LEAST_GAIN = 0.01
"""Part of the pace that a drafter has to add where it has a part in every draft."""
MOST_BETWEEN_S = 1.0
"""Where choices are further apart than this nothing was drafted between them, and nobody was waited for."""


@dataclass(slots=True)
class Trial:
    """What came of a drafter since it was judged last, and of all drafters together.

    It begins with the drafter's first offer: until then it reads its sequences. Who is late costs the target nothing.

    Attributes:
        num_rounds: With drafts of any.
        num_drafts: Of them, rounds in whose drafts it has tokens.
        num_added: Tokens that no better drafter had, each of which the target computes because of it.
        num_earned: Those of them that were accepted.
        waited_s: Time in which something was drafted.
        rests_until_s: It drafts nothing until then.
    """

    num_rounds: float = 0.0
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_drafts: float = 0.0
    num_added: float = 0.0
    num_earned: float = 0.0
    waited_s: float = 0.0
    rests_until_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether enough came of it, or it was waited for long enough."""
        return self.num_drafts >= TRIAL_ROUNDS or self.waited_s >= REST_S

    def is_worth_it(self, times: StepTimes, num_rows: int) -> bool:
        """Whether the target's pace is higher with it, by enough for the share of rounds in which it has a part."""
        if not self.num_drafts:
            return False
        return self.gain(times, num_rows) > LEAST_GAIN * min(1.0, self.num_drafts / self.num_rounds)

    def gain(self, times: StepTimes, num_rows: int) -> float:
        """Tokens a second with it, over those of the same rounds without it, less 1."""
        tokens = 1 + self.num_accepted / self.num_rounds
        size = 1 + self.num_drafted / self.num_rounds
        earned, added = self.num_earned / self.num_rounds, self.num_added / self.num_rounds
        if not times:
            return earned / max(1.0, tokens - earned)
        with_s, without_s = times.at(num_rows, num_rows * size), times.at(num_rows, num_rows * max(1.0, size - added))
        return tokens / max(1.0, tokens - earned) * without_s / with_s - 1


class DrafterChoice:
    """The drafters of one target's sequences.

    Each is tried, and judged by what it earned beside the others: who adds too little, since it is wrong, or says what
    others say, or since the target has no time for more tokens, rests. The one that earned most never does. A target's
    :class:`specdec.protocol.target_sequence.Record` says less: who is right, not what that is worth. It ranks drafters
    in every step, by tokens that are not counted here since a better drafter had them.
    """

    def __init__(self) -> None:
        self._trials: defaultdict[str, Trial] = defaultdict(Trial)
        self._chosen_s = 0.0

    def count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """The target has counted on, from one report of its metrics to the next."""

        def came(name: str) -> float:
            return max(0.0, after.get(name, 0.0) - before.get(name, 0.0))

        for name, trial in self._trials.items():
            trial.num_drafts += came(f"num_drafts_by_drafter/{name}")
            if not trial.num_drafts:
                continue
            trial.num_rounds += came("num_drafts")
            trial.num_drafted += came("num_draft_tokens")
            trial.num_accepted += came("num_accepted_tokens")
            trial.num_added += came(f"num_draft_tokens_by_drafter/{name}")
            trial.num_earned += came(f"num_accepted_tokens_by_drafter/{name}")

    def choose(self, names: Collection[str], times: StepTimes, num_rows: int, now_s: float) -> tuple[str, ...]:
        """Those that draft from now on; none are named where all do. To be called while something is drafted.

        Args:
            names: Drafters that there are.
            times: Of the target's steps.
            num_rows: Of one of these.
            now_s: The time.
        """
        passed_s, self._chosen_s = min(now_s - self._chosen_s, MOST_BETWEEN_S), now_s
        if len(names) < 2:
            return ()
        for name in names:
            if 0.0 < self._trials[name].rests_until_s <= now_s:  # what came while it rested says nothing of it
                self._trials[name] = Trial()
        awake = [name for name in sorted(names) if not self._trials[name].rests_until_s]
        first = max(awake, key=lambda name: self._trials[name].num_earned, default=None)
        for name in awake:
            trial = self._trials[name]
            trial.waited_s += passed_s
            if trial.is_over:
                is_worth_it = name == first or trial.is_worth_it(times, num_rows)
                self._trials[name] = Trial(rests_until_s=0.0 if is_worth_it else now_s + REST_S)
        awake = [name for name in awake if not self._trials[name].rests_until_s]
        if not awake:  # those that were better are gone
            self._trials.clear()
        return () if len(awake) in (0, len(names)) else tuple(awake)
