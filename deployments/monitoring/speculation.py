"""What drafts bring: acceptance, plans, offers, and how long each device waits for the other."""

from __future__ import annotations

from deployments.metrics import families as f
from deployments.monitoring.charts import (
    DRAFTERS,
    TARGETS,
    TOKENS_PER_S,
    WHOSE,
    WORKER,
    Board,
    Chart,
    chosen,
    mean,
    named,
    rare,
    rate,
    ratio,
    total,
)


def _sized(match: str, by: str = "rows, tokens") -> str:
    return f"{rate(named('decode_step_seconds'), by, match)} / ({rate(named('decode_steps'), by, match)} > 0)"


ALIVE = chosen(named("worker_sequences"))


BOARD = Board(
    "speculation",
    "specdec: speculation",
    "What drafts bring: acceptance, plans, offers, and how long each device waits for the other.",
    {
        "Acceptance": (
            Chart(
                "Acceptance rate",
                "Share of verified draft tokens that were accepted.",
                "percentunit",
                {"accepted": ratio(f.ACCEPTED_TOKENS, f.DRAFT_TOKENS)},
            ),
            Chart(
                "Accepted by position",
                "Share of drafts whose token at this place was accepted, counted from 0.",
                "percentunit",
                {
                    "{{position}}": f"{rate(f.ACCEPTED_PER_POSITION, 'position')} / on() group_left()"
                    f" ({rate(f.DRAFTS)} > 0)"
                },
            ),
            Chart(
                "Tokens per round",
                "Mean number of tokens that a verified draft gives, the target's own included.",
                "none",
                {"tokens": f"1 + {ratio(f.ACCEPTED_TOKENS, f.DRAFTS)}"},
            ),
        ),
        "Plans": (
            Chart(
                "Sequences by mode",
                "Speculation modes that routers plan; off is plain decoding.",
                "none",
                {"{{mode}}": total(named("planned_sequences"), "mode")},
            ),
            Chart(
                "Draft length and branches",
                "Means per round over sequences that draft, as planned.",
                "none",
                {
                    "draft tokens": mean(named("planned_draft_tokens")),
                    "branches": mean(named("planned_branches")),
                },
            ),
            Chart(
                "Gain over plain decoding",
                "Tokens per second of the best draft over those of plain decoding, as measured.",
                "none",
                {"measured": mean(named("measured_gain"))},
            ),
        ),
        "Offers": (
            Chart(
                "Offers by outcome",
                "Offers that came in time to be verified, rounds whose planned draft was late, and offers in vain.",
                "ops",
                {
                    "in time": rate(named("used_offers")),
                    "late": rate(named("late_rounds")),
                    "stale": rate(named("stale_offers")),
                },
            ),
            Chart(
                "Offers sent and received",
                "Offers that drafters sent and that targets received; a gap between them is a network that loses them.",
                "ops",
                {
                    "sent by {{deployment}}": rate(named("offers"), "deployment", DRAFTERS),
                    "received": rate(named("offers"), "", TARGETS),
                },
            ),
            Chart(
                "Branches",
                "Branches that drafters began, and those whose outcome came.",
                "ops",
                {
                    "began": rate(named("branches_forked")),
                    "came": rate(named("branches_promoted")),
                },
            ),
            Chart(
                "Held back for drafts",
                "Mean time that a target's round was held back for its draft.",
                "s",
                {"{{replica}}": ratio(named("draft_wait_seconds"), named("rounds"), "replica")},
            ),
            Chart(
                "Sequences without speculation",
                "Sequences that did not speculate, by the reason.",
                "ops",
                {"{{reason}}": rare(named("fallbacks"), "reason")},
            ),
            Chart(
                "Tokens drafted in vain",
                "Draft tokens that were not accepted, and tokens of branches whose outcome did not come.",
                TOKENS_PER_S,
                {
                    "not accepted": f"{rate(f.DRAFT_TOKENS)} - {rate(f.ACCEPTED_TOKENS)}",
                    "of branches": rate(named("branch_tokens_wasted")),
                },
            ),
        ),
        "Devices": (
            Chart(
                "Idle share of each device",
                "Share of time in which a worker computes no step.",
                "percentunit",
                # Ray's exporter keeps the counters of the dead, who are no idle devices.
                {WHOSE: f"1 - {rate(named('busy_seconds'), WORKER)} and on ({WORKER}) {ALIVE}"},
            ),
            Chart(
                "Step time of targets by size",
                "Mean time of a step without prompts, by rows and tokens, each rounded up to a power of two.",
                "s",
                {"{{rows}} rows, {{tokens}} tokens": _sized(TARGETS)},
            ),
            Chart(
                "Step time of drafters by size",
                "Mean time of a step without prompts, by rows and tokens, each rounded up to a power of two.",
                "s",
                {"{{deployment}} {{rows}} rows, {{tokens}} tokens": _sized(DRAFTERS, "deployment, rows, tokens")},
            ),
        ),
    },
)
