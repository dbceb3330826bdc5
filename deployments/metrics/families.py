"""Every family of metrics that the service has: the one list that code, table, dashboards and alerts go by.

The table of every family of metrics, as it stands in ``docs/metrics.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PREFIX = "specdec_"

Kind = Literal["counter", "gauge", "histogram"]
Part = Literal["ingress", "router", "target", "draft"]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics.

    Attributes:
        name: Without the prefix, and without the ``_total`` that a counter's series end in.
        text: What it says, one sentence.
        labels: Beside those that every series has: ``model_name``, ``deployment``, ``replica``, ``application``.
        buckets: Upper bounds of a histogram's buckets.
        figure: By which a machine reports it, if one does; of one with labels this is the part before the first slash,
            and the labels' values follow, with slashes between them.
        parts: Whose it is.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    figure: str = ""
    parts: tuple[Part, ...] = ("ingress",)

    @property
    def series(self) -> str:
        """The full name, as queries have it; a histogram's ends in ``_bucket``, ``_sum`` or ``_count`` besides."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FIRST_BUCKETS_S = (*(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5), *(0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80))
_REQUEST_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)

RUNNING = Family("num_requests_running", "gauge", "Sequences that a target has begun and not ended.")
WAITING = Family("num_requests_waiting", "gauge", "Sequences that wait for a place or for a target's room.")
TIME_TO_FIRST_TOKEN = Family(
    "time_to_first_token_seconds",
    "histogram",
    "Time from the request's arrival to a sequence's first tokens.",
    buckets=_FIRST_BUCKETS_S,
)
INTER_TOKEN_LATENCY = Family(
    "inter_token_latency_seconds",
    "histogram",
    "Time between two arrivals of tokens of a sequence, which may be several at once.",
    buckets=_STEP_BUCKETS_S,
)
E2E_LATENCY = Family(
    "e2e_request_latency_seconds",
    "histogram",
    "Time from the request's arrival to a sequence's end.",
    buckets=_REQUEST_BUCKETS_S,
)
QUEUE_TIME = Family(
    "request_queue_time_seconds",
    "histogram",
    "Time from the request's arrival until a target begins a sequence.",
    buckets=_FIRST_BUCKETS_S,
)
PREFILL_TIME = Family(
    "request_prefill_time_seconds",
    "histogram",
    "Time from a sequence's beginning to its first tokens.",
    buckets=_FIRST_BUCKETS_S,
)
DECODE_TIME = Family(
    "request_decode_time_seconds",
    "histogram",
    "Time from a sequence's first tokens to its end.",
    buckets=_REQUEST_BUCKETS_S,
)
PROMPT_TOKENS = Family("prompt_tokens", "counter", "Prompt tokens that were billed.", ("key",))
GENERATION_TOKENS = Family(
    "generation_tokens", "counter", "Output tokens that were billed: written into an answer.", ("key",)
)
DISCARDED_TOKENS = Family("discarded_tokens", "counter", "Output tokens that were generated and are not billed.")
SUCCESS = Family("request_success", "counter", "Sequences that ended, by how.", ("key", "finished_reason"))
HTTP_REQUESTS = Family(
    "http_requests", "counter", "Requests that were answered, by path and status.", ("path", "status")
)
HTTP_ERRORS = Family("http_errors", "counter", "Answers that are errors, by their code.", ("code",))
IGNORED_FIELDS = Family(
    "ignored_fields",
    "counter",
    "Requests with a field that has no effect; other: not one of OpenAI's or vLLM's.",
    ("field",),
)
PREFIX_QUERIES = Family("prefix_cache_queries", "counter", "Prompt tokens that were looked for in the cache.")
PREFIX_HITS = Family("prefix_cache_hits", "counter", "Prompt tokens that were found in the cache.")
DRAFTS = Family("spec_decode_num_drafts", "counter", "Drafts that were verified.")
DRAFT_TOKENS = Family("spec_decode_num_draft_tokens", "counter", "Draft tokens that were verified.")
ACCEPTED_TOKENS = Family("spec_decode_num_accepted_tokens", "counter", "Draft tokens that were accepted.")
ACCEPTED_PER_POSITION = Family(
    "spec_decode_num_accepted_tokens_per_pos",
    "counter",
    "Draft tokens that were accepted, by their place in the draft, from 0.",
    ("position",),
)

REQUESTS = (
    *(RUNNING, WAITING, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, E2E_LATENCY, QUEUE_TIME, PREFILL_TIME),
    DECODE_TIME,
    *(PROMPT_TOKENS, GENERATION_TOKENS, DISCARDED_TOKENS, SUCCESS, HTTP_REQUESTS, HTTP_ERRORS, IGNORED_FIELDS),
    *(PREFIX_QUERIES, PREFIX_HITS, DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, ACCEPTED_PER_POSITION),
)
"""What an ingress sees of requests."""


_TARGET: tuple[Part, ...] = ("target",)
_DRAFT: tuple[Part, ...] = ("draft",)
_WORKERS: tuple[Part, ...] = ("target", "draft")
_ROUTER: tuple[Part, ...] = ("router",)
_INGRESS: tuple[Part, ...] = ("ingress",)
_FRONT: tuple[Part, ...] = ("ingress", "router")
_JUDGES: tuple[Part, ...] = ("target", "router")
_ALL: tuple[Part, ...] = ("ingress", "router", "target", "draft")


def _gauge(parts: tuple[Part, ...], figure: str, text: str, labels: tuple[str, ...] = (), name: str = "") -> Family:
    return Family(name or figure.removeprefix("num_"), "gauge", text, labels, figure=figure, parts=parts)


def _counter(parts: tuple[Part, ...], figure: str, text: str, labels: tuple[str, ...] = (), name: str = "") -> Family:
    return Family(name or figure.removeprefix("num_"), "counter", text, labels, figure=figure, parts=parts)


REPORTED = [
    # What is held now.
    _gauge(_WORKERS, "num_sequences", "Sequences that a worker holds.", name="worker_sequences"),
    _gauge(_ROUTER, "num_sessions", "Sequences that a router holds.", name="router_sequences"),
    _gauge(_ROUTER, "num_workers", "Workers that a router is linked to, by kind.", ("kind",), name="router_workers"),
    _gauge(_ROUTER, "min_workers", "Workers that the configuration wants in any case, by kind.", ("kind",)),
    _gauge(_ALL, "is_draining", "Whether nothing new is taken any more, 1 or 0."),
    _gauge(_WORKERS, "kv_cache_usage_perc", "Share of cache blocks in use, from 0 to 1."),
    _gauge(_WORKERS, "kv_blocks_in_use", "Cache blocks that sequences hold."),
    _gauge(_WORKERS, "kv_blocks_reusable", "Cache blocks kept for prompts that begin alike."),
    _gauge(_WORKERS, "num_state_slots", "Recurrent states that there is room for."),
    _gauge(_WORKERS, "state_slots_in_use", "Recurrent states that sequences hold."),
    _gauge(_WORKERS, "state_slots_reusable", "Recurrent states kept for prompts that begin alike."),
    _gauge(_DRAFT, "draft_failed", "1 while a draft model cannot be loaded, else 0."),
    _gauge(_DRAFT, "num_branches_held", "Branches that a drafter holds."),
    _gauge(
        _DRAFT, "num_waiting_sequences", "Sequences that wait for room at the drafter.", name="draft_sequences_waiting"
    ),
    _gauge(
        _ROUTER,
        "has_failed_controller",
        "Whether the controller has failed, so that nothing is drafted, 1 or 0.",
        name="controller_failed",
    ),
    _gauge(
        _TARGET, "num_waiting_sequences", "Sequences that wait for room at the target.", name="target_sequences_waiting"
    ),
    _gauge(
        _ROUTER,
        "num_without_drafter",
        "Sequences that should have a drafter and have none.",
        name="sequences_without_drafter",
    ),
    _gauge(
        _ROUTER,
        "exposed_draft_share",
        "Share of their time that targets would have saved had every planned draft been there.",
    ),
    _gauge(_ALL, "loop_lag_s", "Time by which the event loop was late, once a second.", name="loop_lag_seconds"),
    _gauge(_ALL, "loop_busy_share", "Share of a core that the event loop's thread uses, from 0 to 1."),
    _gauge(_INGRESS, "slots_used_share", "Share of an ingress's slots that are taken or waited for; it may be over 1."),
    _gauge(_INGRESS, "num_waiting_requests", "Requests that wait for slots.", name="slot_waiters"),
    _gauge(
        _INGRESS,
        "longest_queue_s",
        "Queue time until now of the sequence that waits longest for a target to begin it.",
        name="longest_queue_seconds",
    ),
    _counter(_INGRESS, "num_requests_refused", "Requests that were refused for want of room, with 429."),
    # Steps.
    _gauge(_WORKERS, "executor_recorded", "Whether a worker's steps are recorded, as CUDA graphs on a GPU, 1 or 0."),
    _counter(_WORKERS, "num_steps", "Steps of a worker."),
    _counter(_WORKERS, "busy_s", "Seconds that a worker's steps took.", name="busy_seconds"),
    _counter(_WORKERS, "num_gaps", "Steps that go on with a sequence of the step before.", name="step_gaps"),
    _counter(_WORKERS, "gap_s", "Seconds of host time before these steps.", name="step_gap_seconds"),
    _counter(
        _WORKERS,
        "decode_steps",
        "Steps that read no prompt, by rows and tokens, rounded up to powers of two.",
        labels=("rows", "tokens"),
    ),
    _counter(
        _WORKERS,
        "decode_step_s",
        "Seconds that steps took which read no prompt, by their rows and tokens.",
        labels=("rows", "tokens"),
        name="decode_step_seconds",
    ),
    _counter(_TARGET, "draft_wait_s", "Seconds that rows were held back for a draft.", name="draft_wait_seconds"),
    _gauge(_WORKERS, "backend", "What the function tells that the key backend names, by name.", labels=("name",)),
    # Offers and branches.
    _counter(_WORKERS, "num_offers", "Offers that a drafter sent, or a target received."),
    _counter(_TARGET, "num_used_offers", "Offers that came in time, so that something of them was verified."),
    _counter(_TARGET, "num_stale_offers", "Offers of which nothing was verified."),
    _counter(_TARGET, "num_rounds", "Rounds of a target; each step has one for each sequence in it."),
    _counter(_TARGET, "num_committed_tokens", "Output tokens that a target decided, discarded ones among them."),
    _counter(_TARGET, "num_late_rounds", "Rounds without a draft because the planned one was late."),
    _counter(_TARGET, "num_branch_hits", "Rounds whose outcome was among the branches that were offered."),
    _counter(_TARGET, "num_branch_misses", "Rounds whose outcome was among none of the branches that were offered."),
    _counter(_DRAFT, "num_branches_forked", "Branches that a drafter began."),
    _counter(
        _DRAFT, "num_promoted", "Branches that became the draft because their outcome came.", name="branches_promoted"
    ),
    _counter(_DRAFT, "num_branch_tokens_wasted", "Draft tokens of branches whose outcome did not come."),
    _counter(
        _DRAFT,
        "num_right_tokens",
        "Draft tokens that were decided as drafted.",
        name="draft_tokens_right",
    ),
    _counter(
        _DRAFT,
        "num_wrong_tokens",
        "Draft tokens in whose place another was decided.",
        name="draft_tokens_wrong",
    ),
    _counter(
        _TARGET,
        "num_drafts_by_source",
        "Verified drafts, by what made them.",
        labels=("source",),
    ),
    _counter(_TARGET, "num_draft_tokens_by_source", "Draft tokens of these.", labels=("source",)),
    _counter(_TARGET, "num_accepted_tokens_by_source", "Draft tokens of these that were accepted.", labels=("source",)),
    _counter(
        _TARGET,
        "num_failed_draft_steps",
        "Failed steps of a draft model or of heads in the target's process; they cost no token.",
        name="failed_draft_steps",
    ),
    _counter(_TARGET, "num_forbidden_draft_tokens", "Draft tokens that a grammar forbids, none of which is verified."),
    # Caches.
    _counter(_WORKERS, "num_evictions", "Sequences or branches that lost their cache to another."),
    _counter(_WORKERS, "num_reused_tokens", "Tokens that were found in the cache as a sequence began."),
    _gauge(_WORKERS, "num_loaded_adapters", "LoRA adapters that lie on the device."),
    _counter(_WORKERS, "num_adapter_loads", "LoRA adapters that were loaded onto the device."),
    _counter(_WORKERS, "num_reread_tokens", "Tokens that were read again for a recurrent state."),
    _counter(
        _ROUTER,
        "num_placements",
        "Choices of a target among several, by whether it had any of the sequence cached.",
        labels=("cached",),
        name="target_placements",
    ),
    _counter(
        _ROUTER,
        "num_reusable_prompt_tokens",
        "Tokens that some target had cached at these choices.",
        name="placement_reusable_tokens",
    ),
    _counter(
        _ROUTER,
        "num_reused_prompt_tokens",
        "Tokens of these that the chosen target was known to have cached.",
        name="placement_reused_tokens",
    ),
    # Faults.
    _counter(_WORKERS, "num_failed_steps", "Steps that failed as a whole, and were contained."),
    _counter(_JUDGES, "num_suspects", "Sequences that were tried apart from others after a failure."),
    _counter(
        _TARGET, "num_drafts_off", "Sequences that have no drafts any more because steps failed that verified them."
    ),
    _counter(
        _TARGET,
        "num_token_drafters_off",
        "Sequences whose drafter from tokens raised an error and is asked no more.",
    ),
    _counter(_TARGET, "num_errors", "Sequences that a target ended with an error.", name="worker_errors"),
    _counter(
        _DRAFT, "num_skipped_sequences", "Sequences for which nothing is drafted any more because they failed there."
    ),
    _counter(
        _ROUTER,
        "num_worker_deaths",
        "Workers whose link to a router ended though they did not drain, by kind.",
        labels=("kind",),
    ),
    _counter(_ROUTER, "num_reopened", "Times that a router opened a sequence again."),
    _counter(_ROUTER, "num_handed_over", "Sequences that a router took from a worker that drains."),
    _counter(
        _ROUTER,
        "num_resyncs",
        "Times that a worker asked a router to open a sequence again, by reason.",
        labels=("reason",),
    ),
    _counter(_INGRESS, "num_resubmitted", "Times that a sequence was submitted again."),
    _counter(_FRONT, "num_sequence_errors", "Sequences that ended with an error, wherever it arose."),
    _counter(_FRONT, "num_dropped_messages", "Messages that were dropped because what they speak of is over."),
    _counter(
        _WORKERS,
        "num_refused",
        "Sequences that a worker refused, by reason.",
        labels=("reason",),
        name="worker_refusals",
    ),
    _counter(_ROUTER, "num_refused_model", "Sequences that a router refused because they are of another model."),
    _counter(_ROUTER, "num_refused_draining", "Sequences that a router refused because it drains."),
    _counter(_WORKERS, "num_fallbacks", "Sequences that ran without speculation, by reason.", labels=("reason",)),
    _counter(_ALL, "num_config_errors", "Configurations that a replica refused while it served."),
    # What the controller plans, and the estimates behind it.
    _gauge(
        _ROUTER,
        "planned_sequences",
        "Sequences that the controller has planned for, by speculation mode.",
        labels=("mode",),
    ),
    _gauge(
        _ROUTER, "planned_draft_tokens", "Draft tokens per round that are planned, mean of the sequences that draft."
    ),
    _gauge(_ROUTER, "planned_branches", "Branches per round that are planned, mean of the sequences that draft."),
    _gauge(
        _ROUTER,
        "measured_gain",
        "Pace of the best speculation mode over that of plain decoding, by what was measured.",
        labels=("target",),
    ),
]
"""What machines report of themselves."""

FAMILIES = (*REQUESTS, *REPORTED)
"""The service's own."""


def register(family: Family) -> Family:
    """Add a family that a machine reports, from outside: a module that the key ``backend`` names calls this.

    Args:
        family: Its ``figure`` is a name that the backend's ``metrics`` have, and ``parts`` says whose backend it is.

    Raises:
        ValueError: There is one of that name.
    """
    if family.name in {one.name for one in (*REQUESTS, *REPORTED)}:
        raise ValueError(f"there is a metric of the name {family.series}")
    REPORTED.append(family)
    return family


HEADING = "## Every metric\n"
"""After it comes the table, to the end of the document."""


def metrics_table() -> Iterator[str]:
    """Markdown lines: the series, its kind, whose it is, labels of its own, meaning."""
    yield from ("| series | kind | of | labels | meaning |", "|---|---|---|---|---|")
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.series}` | {family.kind} | {', '.join(family.parts)} | {labels} | {family.text} |"


def main() -> None:
    """Put the table into the document that the argument names, in place of the one that is there."""
    document = Path(sys.argv[1])
    before, heading, _ = document.read_text(encoding="utf-8").partition(HEADING)
    document.write_text("\n".join([before + heading, *metrics_table()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
