"""The plainest controller: the same plan for all, within what each request allows."""

from __future__ import annotations

from collections.abc import Callable

from specdec.protocol.messages import Mode, Plan
from specdec.sampling.params import SequenceSpec


def fixed_plan(num_draft_tokens: int, mode: Mode, draft_wait_s: float = 0.0) -> Callable[[SequenceSpec], Plan]:
    """A planner that gives every sequence the same draft length, or the one its request names.

    Args:
        num_draft_tokens: Draft tokens per round where the request names none.
        mode: Of every plan.
        draft_wait_s: Of every plan.
    """

    def plan(spec: SequenceSpec) -> Plan:
        wanted = spec.num_speculative_tokens
        return Plan(num_draft_tokens if wanted is None else wanted, mode=mode, draft_wait_s=draft_wait_s)

    return plan


def no_drafts(spec: SequenceSpec) -> Plan:
    """A planner for a service without a draft model."""
    return Plan()
