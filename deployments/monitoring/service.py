"""What clients get: latency, throughput, errors and the service level."""

from __future__ import annotations

from deployments.metrics import families as f
from deployments.monitoring.charts import CHOSEN_MODEL, TOKENS_PER_S, Board, Chart, named, quantiles, rare, rate, total
from deployments.monitoring.rules import SLO_SHARE, SLOS, WINDOWS, slow_ratio


def _burn(name: str, most_s: float) -> Chart:
    share = round(1 - SLO_SHARE, 6)
    return Chart(
        f"{name.upper()} budget burn",
        f"How many times too fast the budget goes of {share:.0%} that may take longer than {most_s} s.",
        "none",
        {window: f"sum by (model_name) ({slow_ratio(name, window)}{{{CHOSEN_MODEL}}}) / {share}" for window in WINDOWS},
    )


BOARD = Board(
    "service",
    "specdec: service",
    "What clients get: latency, throughput, errors and the service level.",
    {
        "Latency": (
            Chart(
                "Time to first token",
                "From the request's arrival to a sequence's first tokens.",
                "s",
                quantiles(f.TIME_TO_FIRST_TOKEN),
            ),
            Chart(
                "Time between tokens",
                "Between two arrivals of tokens of a sequence, which may be several at once.",
                "s",
                quantiles(f.INTER_TOKEN_LATENCY),
            ),
            Chart(
                "Time of a whole sequence",
                "From the request's arrival to a sequence's end.",
                "s",
                quantiles(f.E2E_LATENCY),
            ),
            Chart(
                "Time in the queue",
                "From the request's arrival until a target begins a sequence.",
                "s",
                quantiles(f.QUEUE_TIME),
            ),
            Chart(
                "Time of reading the prompt",
                "From a sequence's beginning to its first tokens.",
                "s",
                quantiles(f.PREFILL_TIME),
            ),
            Chart(
                "Running and waiting",
                "Sequences that a target has begun, and those that wait for a place or for its room.",
                "none",
                {"running": total(f.RUNNING), "waiting": total(f.WAITING)},
            ),
        ),
        "Throughput": (
            Chart(
                "Tokens",
                "Prompt and output tokens as billed, and output tokens that were generated in vain.",
                TOKENS_PER_S,
                {
                    "prompt": rate(f.PROMPT_TOKENS),
                    "output": rate(f.GENERATION_TOKENS),
                    "discarded": rate(f.DISCARDED_TOKENS),
                },
            ),
            Chart(
                "Output tokens by key",
                "Whom the output tokens were for, by the name of the API key.",
                TOKENS_PER_S,
                {"{{key}}": rate(f.GENERATION_TOKENS, "key")},
            ),
            Chart(
                "Sequences ended",
                "Sequences that ended, by how.",
                "reqps",
                {"{{finished_reason}}": rate(f.SUCCESS, "finished_reason")},
            ),
        ),
        "Errors": (
            Chart(
                "Answers by status",
                "HTTP answers by their status.",
                "reqps",
                {"{{status}}": rate(f.HTTP_REQUESTS, "status")},
            ),
            Chart(
                "Errors by code",
                "Answers that are errors, by the code in their body.",
                "reqps",
                {"{{code}}": rare(f.HTTP_ERRORS, "code")},
            ),
            Chart(
                "Refused and retried",
                "Sequences that were refused by a worker or by who drains, submitted again, or ended with an error.",
                "ops",
                {
                    "refused by workers": rare(named("worker_refusals")),
                    "refused while draining": rate(named("refused_draining")),
                    "submitted again": rate(named("resubmitted")),
                    "ended with an error": rate(named("sequence_errors"), "", 'deployment="OpenAIIngress"'),
                },
            ),
        ),
        "Service level": tuple(_burn(slo.name, slo.most_s) for slo in SLOS),
    },
)
