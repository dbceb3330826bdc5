"""What the ingress can measure, and Prometheus' form of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deployments.openai.tally import Round

Reason = Literal["stop", "length", "abort", "error"]

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FIRST_BUCKETS_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)


class Observer:
    """Counts what happens to requests in a registry, by vLLM's names under the prefix ``specdec_``; on the event loop.

    Requests are counted by sequence: an answer with three choices counts three.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.num_running = _gauge(registry, "num_requests_running", "Sequences that are being generated.")
        self.num_waiting = _gauge(
            registry, "num_requests_waiting", "Sequences that wait to be taken in, or for their first token."
        )
        self.time_to_first_token = _histogram(
            registry, "time_to_first_token_seconds", "Time from the request to its first tokens.", _FIRST_BUCKETS_S
        )
        self.inter_token_latency = _histogram(
            registry, "inter_token_latency_seconds", "Time between the deliveries of a sequence.", _STEP_BUCKETS_S
        )
        self.e2e_latency = _histogram(
            registry, "e2e_request_latency_seconds", "Time from the request to its end.", _REQUEST_BUCKETS_S
        )
        self.num_prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens, as billed.")
        self.num_generation_tokens = _counter(registry, "generation_tokens", "Output tokens, as billed.")
        self.num_discarded_tokens = _counter(
            registry, "discarded_tokens", "Output tokens beyond the end of their text; not billed."
        )
        self.num_success = _counter(registry, "request_success", "Sequences that ended, by reason.", "finished_reason")
        self.num_ignored_fields = Counter(
            "specdec_ignored_fields", "Requests with a field that has no effect here.", ["field"], registry=registry
        )
        self.num_drafts = _counter(registry, "spec_decode_num_drafts", "Drafts verified.")
        self.num_draft_tokens = _counter(registry, "spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.num_accepted_tokens = _counter(registry, "spec_decode_num_accepted_tokens", "Draft tokens kept.")
        self.num_accepted_per_position = _counter(
            registry,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens kept, by their place in the draft, from 0.",
            "position",
        )

    def prompt_tokens(self, model: str, num_tokens: int) -> None:
        """Count a prompt; once, however many samples were asked for."""
        self.num_prompt_tokens.labels(model).inc(num_tokens)

    def ignored_field(self, name: str) -> None:
        """Count a field without effect."""
        self.num_ignored_fields.labels(name).inc()

    @contextmanager
    def queued(self, model: str, num_sequences: int) -> Iterator[None]:
        """Count sequences that wait."""
        gauge = self.num_waiting.labels(model)
        gauge.inc(num_sequences)
        try:
            yield
        finally:
            gauge.dec(num_sequences)

    def opened(self, model: str, age_s: float) -> SequenceObserver:
        """Begin to observe a sequence of a request that arrived ``age_s`` seconds ago."""
        # Series that exist before the first event: a rate over them is right from the start.
        for counter in (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, self.num_discarded_tokens):
            counter.labels(model).inc(0)
        self.num_accepted_per_position.labels(model, "0").inc(0)
        return SequenceObserver(self, model, age_s)


class SequenceObserver:
    """What happens to one sequence."""

    def __init__(self, metrics: Observer, model: str, age_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived_s = metrics.clock() - age_s
        self._delivered_s: float | None = None
        self._gauge = metrics.num_waiting.labels(model)
        self._gauge.inc()
        # Looked up once: a series is found by its labels in some microseconds, and tokens come in every round.
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._num_generation_tokens = metrics.num_generation_tokens.labels(model)
        self._num_drafts = metrics.num_drafts.labels(model)
        self._num_draft_tokens = metrics.num_draft_tokens.labels(model)
        self._num_accepted_tokens = metrics.num_accepted_tokens.labels(model)
        self._num_accepted_per_position: list[Counter] = []

    def admitted(self) -> None:
        """Its first news came."""
        self._gauge.dec()
        self._gauge = self._metrics.num_running.labels(self._model)
        self._gauge.inc()

    def tokens(self, num_billed: int, num_discarded: int, rounds: Iterable[Round]) -> None:
        """Tokens came: some for the client, some beyond its end."""
        metrics, model = self._metrics, self._model
        now_s = metrics.clock()
        if self._delivered_s is None:
            metrics.time_to_first_token.labels(model).observe(now_s - self._arrived_s)
        else:
            self._inter_token_latency.observe(now_s - self._delivered_s)
        self._delivered_s = now_s
        self._num_generation_tokens.inc(num_billed)
        if num_discarded:
            metrics.num_discarded_tokens.labels(model).inc(num_discarded)
        for num_draft_tokens, num_accepted in rounds:
            self._num_drafts.inc()
            self._num_draft_tokens.inc(num_draft_tokens)
            self._num_accepted_tokens.inc(num_accepted)
            for position in range(num_accepted):
                self._at(position).inc()

    def _at(self, position: int) -> Counter:
        """The series of a place in the draft; it appears with the first token that is kept there."""
        series = self._num_accepted_per_position
        while len(series) <= position:
            series.append(self._metrics.num_accepted_per_position.labels(self._model, str(len(series))))
        return series[position]

    def closed(self, reason: Reason) -> None:
        """It has ended; told exactly once, admitted or not."""
        self._gauge.dec()
        self._metrics.num_success.labels(self._model, reason).inc()
        self._metrics.e2e_latency.labels(self._model).observe(self._metrics.clock() - self._arrived_s)


def _gauge(registry: CollectorRegistry, name: str, text: str) -> Gauge:
    return Gauge(f"specdec_{name}", text, ["model_name"], registry=registry)


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"specdec_{name}", text, ["model_name", *labels], registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"specdec_{name}", text, ["model_name"], buckets=buckets, registry=registry)
