"""How the controller proceeds: what it tries, how often, and what that may cost."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.control.limits import Arm

_FIRST_ARM, _PROBE_ARM = Arm("overlap", 4), Arm("overlap", 2)


@dataclass(frozen=True)
class Settings:
    """How the controller proceeds. A step is a step of the target without drafts.

    Attributes:
        first_arm: Before anything was measured.
        probe_arm: What probing sequences do while the others are off.
        hysteresis: How much better another arm must be, as a share of the present one.
        curiosity: An arm is tried if it would be the best with so many standard deviations of luck, with twice as many
            where nothing of the allowance is spent. Target alone is granted one more: drafting has to be shown better.
        trial_steps: Steps of a trial.
        unseen_s: Time under load after which an arm is measured though no report has told of draft steps of its size.
        loss: Share of the time under load that trials may lose in the long run.
        early_loss: ... and at first, at a load that is new; it falls to 1/e within ``early_steps``.
        early_steps: See ``early_loss``.
        most_credit: Steps that trials may lose at once, where they have lost less than they may before.
        least_credit: ... in the long run.
        least_price: Share of the time that a trial is taken to lose at least.
        most_growth: An arm is considered only if its steps are at most so many times larger than any that was seen, or
            have no more than ``free_rows`` rows.
        rest_s: Time under load between two choices where the present arm is well measured, nothing is on trial and the
            load is the same.
        settle_rounds: Rounds after a change of plan that are not measured.
        probe_rounds: Rounds of a probe.
        probe_cost: Most of the time that probing may cost, as a share.
        probe_share: Sequences that probe at a time, as a share; at least one does.
        probe_first_s: Time until the first probe; it doubles with each probe in vain, up to ``probe_last_s``, and
            begins anew once drafting was worthwhile.
        round_trip_s: Assumed until it is measured.
    """

    first_arm: Arm = _FIRST_ARM
    probe_arm: Arm = _PROBE_ARM
    hysteresis: float = 0.015
    curiosity: float = 1.0
    trial_steps: int = 20
    unseen_s: float = 2.0
    loss: float = 0.005
    early_loss: float = 0.25
    early_steps: float = 200.0
    most_credit: float = 8.0
    least_credit: float = 3.0
    least_price: float = 0.07
    most_growth: float = 4.0
    free_rows: int = 34
    rest_s: float = 1.0
    settle_rounds: int = 3
    probe_rounds: int = 24
    probe_cost: float = 0.005
    probe_share: float = 0.05
    probe_first_s: float = 2.0
    probe_last_s: float = 60.0
    round_trip_s: float = 0.004
