"""What the ingress can measure of requests, and Prometheus' form of it."""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.http.tally import Round
from deployments.metrics import families
from deployments.metrics.families import PREFIX, Family
from deployments.metrics.page import ChangeCounter

Reason = Literal["stop", "length", "abort", "error"]
CLIENT_GONE = 499
"""The status under which a request is counted whose client had gone before there was an answer."""


MAX_KEYS, OTHER_KEYS = 512, "(other)"
"""API keys with series of their own: each key has six."""


class AcceptedPerPosition(Collector):
    """Draft tokens accepted, by their place in the draft: kept by rounds, so that no token costs anything."""

    def __init__(self) -> None:
        self._rounds: dict[str, Counts[int]] = {}

    def of(self, model: str) -> Counts[int]:
        """Rounds of a model, by the number of tokens accepted; the caller counts in it."""
        return self._rounds.setdefault(model, Counts())

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        family = families.ACCEPTED_PER_POSITION
        metric = CounterMetricFamily(PREFIX + family.name, family.text, labels=("model_name", *family.labels))
        for model, rounds in self._rounds.items():
            for position in range(max(rounds, default=0) or 1):
                count = sum(number for accepted, number in rounds.items() if accepted > position)
                metric.add_metric((model, str(position)), count)
        yield metric


class Observer:
    """Counts what happens to requests in a registry, by vLLM's names under the prefix ``specdec_``; on the event loop.

    Requests are counted by sequence: an answer with three choices counts three.

    Args:
        registry: Gets the metrics.
        model_name: Label of what belongs to no model: the target's name.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        def counter(family: Family) -> Counter:
            return Counter(PREFIX + family.name, family.text, ("model_name", *family.labels), registry=registry)

        def gauge(family: Family) -> Gauge:
            return Gauge(PREFIX + family.name, family.text, ("model_name", *family.labels), registry=registry)

        def histogram(family: Family) -> Histogram:
            return Histogram(
                PREFIX + family.name, family.text, ("model_name",), buckets=family.buckets, registry=registry
            )

        def by_key(family: Family) -> ChangeCounter:
            counts = ChangeCounter(family)
            registry.register(counts)
            return counts

        self.clock = clock
        self._model_name = model_name
        self.num_running, self.num_waiting = gauge(families.RUNNING), gauge(families.WAITING)
        self.time_to_first_token = histogram(families.TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = histogram(families.INTER_TOKEN_LATENCY)
        self.e2e_latency = histogram(families.E2E_LATENCY)
        self.queue_time, self.prefill_time = histogram(families.QUEUE_TIME), histogram(families.PREFILL_TIME)
        self.decode_time = histogram(families.DECODE_TIME)
        self.num_prompt_tokens = by_key(families.PROMPT_TOKENS)
        self.num_generation_tokens = by_key(families.GENERATION_TOKENS)
        self.num_discarded_tokens = counter(families.DISCARDED_TOKENS)
        self.num_success = by_key(families.SUCCESS)
        self.num_http_requests, self.num_http_errors = counter(families.HTTP_REQUESTS), counter(families.HTTP_ERRORS)
        self.num_ignored_fields = counter(families.IGNORED_FIELDS)
        self.num_prefix_queries, self.num_prefix_hits = counter(families.PREFIX_QUERIES), counter(families.PREFIX_HITS)
        self.num_drafts, self.num_draft_tokens = counter(families.DRAFTS), counter(families.DRAFT_TOKENS)
        self.num_accepted_tokens = counter(families.ACCEPTED_TOKENS)
        self.accepted_per_position = AcceptedPerPosition()
        registry.register(self.accepted_per_position)
        self._keys: set[str] = set()
        self._waiting_since: dict[object, float] = {}

    def longest_queue_s(self) -> float:
        """Queue time until now of the sequence that waits longest for a target to begin it; 0 where none waits."""
        return max(0.0, self.clock() - min(self._waiting_since.values(), default=math.inf))

    def key_label(self, key: str) -> str:
        """An API key's name as a label: the first ones to come have their own, all others are one."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            return OTHER_KEYS
        self._keys.add(key)
        return key

    def prompt_tokens(self, model: str, key: str, num_tokens: int) -> None:
        """Count a prompt; once, however many samples were asked for."""
        self.num_prompt_tokens.inc(model, self.key_label(key), by=num_tokens)

    def answered(self, path: str, status: int, code: str) -> None:
        """Count an answer, and its error's code where it is one."""
        self.num_http_requests.labels(self._model_name, path, str(status or CLIENT_GONE)).inc()
        if code:
            self.num_http_errors.labels(self._model_name, code).inc()

    def ignored_field(self, name: str) -> None:
        """Count a field without effect."""
        self.num_ignored_fields.labels(self._model_name, name).inc()

    @contextmanager
    def queued(self, model: str, num_sequences: int) -> Iterator[None]:
        """Count sequences that wait."""
        gauge = self.num_waiting.labels(model)
        gauge.inc(num_sequences)
        waiting = object()
        self._waiting_since[waiting] = self.clock()
        try:
            yield
        finally:
            del self._waiting_since[waiting]
            gauge.dec(num_sequences)

    def opened(self, model: str, key: str, age_s: float) -> SequenceObserver:
        """Begin to observe a sequence of a request that arrived ``age_s`` seconds ago."""
        key = self.key_label(key)
        # Series that exist before the first event: a rate over them is right from the start.
        for counter in (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, self.num_discarded_tokens):
            counter.labels(model).inc(0)
        for reason in get_args(Reason):
            self.num_success.inc(model, key, reason, by=0)
        return SequenceObserver(self, model, key, age_s)


class SequenceObserver:
    """What happens to one sequence.

    However many tokens come at once, they cost six updates of plain counters. As it begins, at its first tokens and as
    it ends a sequence costs about ten more.
    """

    def __init__(self, metrics: Observer, model: str, key: str, age_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._key = key
        self._arrived_s = metrics.clock() - age_s
        self._begun_s: float | None = None
        self._first_s: float | None = None
        self._came_s: float | None = None
        self._num_undelivered = 0
        self._gauge = metrics.num_waiting.labels(model)
        self._gauge.inc()
        metrics._waiting_since[self] = self._arrived_s
        # Looked up once: tokens come in every round.
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        metrics.num_generation_tokens.inc(model, key, by=0)
        self._num_discarded_tokens = metrics.num_discarded_tokens.labels(model)
        self._num_drafts = metrics.num_drafts.labels(model)
        self._num_draft_tokens = metrics.num_draft_tokens.labels(model)
        self._num_accepted_tokens = metrics.num_accepted_tokens.labels(model)
        self._num_accepted_per_position = metrics.accepted_per_position.of(model)

    def admitted(self) -> None:
        """A target has begun it."""
        self._begun_s = self._metrics.clock()
        self._metrics._waiting_since.pop(self, None)
        self._metrics.queue_time.labels(self._model).observe(self._begun_s - self._arrived_s)
        self._gauge.dec()
        self._gauge = self._metrics.num_running.labels(self._model)
        self._gauge.inc()

    def prompt_read(self, num_tokens: int, num_cached: int) -> None:
        """Its first tokens are about to be sent, so its prompt has been read; so many of it were found in the cache."""
        if self._came_s is None:
            self._metrics.num_prefix_queries.labels(self._model).inc(num_tokens)
            self._metrics.num_prefix_hits.labels(self._model).inc(num_cached)

    def tokens(self, num_billed: int, num_discarded: int, rounds: Iterable[Round]) -> None:
        """Tokens came: some for the client, to whom they are not delivered yet, some beyond its end."""
        metrics, model = self._metrics, self._model
        now_s = metrics.clock()
        if self._came_s is None:
            self._first_s = now_s
            metrics.time_to_first_token.labels(model).observe(now_s - self._arrived_s)
            if self._begun_s is not None:
                metrics.prefill_time.labels(model).observe(now_s - self._begun_s)
        else:
            self._inter_token_latency.observe(now_s - self._came_s)
        self._came_s = now_s
        self._num_undelivered += num_billed
        if num_discarded:
            self._num_discarded_tokens.inc(num_discarded)
        num_accepted_by_round = []
        num_draft_tokens = 0
        for num_drafted, num_accepted in rounds:
            num_draft_tokens += num_drafted
            num_accepted_by_round.append(num_accepted)
        if not num_accepted_by_round:
            return
        self._num_drafts.inc(len(num_accepted_by_round))
        self._num_draft_tokens.inc(num_draft_tokens)
        self._num_accepted_tokens.inc(sum(num_accepted_by_round))
        for num_accepted in num_accepted_by_round:
            self._num_accepted_per_position[num_accepted] += 1

    def delivered(self, num_tokens: int) -> None:
        """Tokens were handed to whoever writes the answer."""
        self._num_undelivered -= num_tokens
        self._metrics.num_generation_tokens.inc(self._model, self._key, by=num_tokens)

    def left(self) -> None:
        """Nobody writes the answer any more: what came, and was not delivered, was in vain."""
        if self._num_undelivered:
            self._num_discarded_tokens.inc(self._num_undelivered)
            self._num_undelivered = 0

    def closed(self, reason: Reason) -> None:
        """It has ended; called exactly once, admitted or not."""
        self._gauge.dec()
        self._metrics._waiting_since.pop(self, None)
        metrics, model, now_s = self._metrics, self._model, self._metrics.clock()
        metrics.num_success.inc(model, self._key, reason)
        if self._begun_s is None:  # it waited in vain
            metrics.queue_time.labels(model).observe(now_s - self._arrived_s)
        if reason in ("stop", "length"):
            metrics.e2e_latency.labels(model).observe(now_s - self._arrived_s)
            if self._first_s is not None:
                metrics.decode_time.labels(model).observe(now_s - self._first_s)
