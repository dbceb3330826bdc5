"""OpenTelemetry spans of requests, by Serve's own tracing.

Serve sets tracing up in each replica's process before our code runs in it (:mod:`cluster.config.app`), and makes
the spans of its proxy and of the replica that the proxy calls. What comes after the ingress is called by nobody
through Serve: the spans of router, target and drafter are made here, below the label that a request's sequences
carry. Of a request that is not sampled there is no label, and no span.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specdec.protocol.leases import Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor
    from opentelemetry.trace import Span
    from opentelemetry.trace import Tracer as OtelTracer

logger = logging.getLogger("ray.serve")

_TRACEPARENT = "traceparent"


def otlp() -> list[SpanProcessor]:
    """Serve's exporter for a collector, by OTLP over HTTP; OpenTelemetry's own variables say where that is."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def serve_tracer() -> OtelTracer | None:
    """What makes spans in this process; None where Serve does not trace."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider.get_tracer("specdec") if isinstance(provider, TracerProvider) else None


def sequence_tracer(role: str, replica: str) -> Tracer | None:
    """For a machine: spans of its sequences; None where Serve does not trace.

    Args:
        role: Of the machine; its spans are called ``specdec.<role>``.
        replica: Serve's id of the replica that it runs in.
    """
    tracer = serve_tracer()
    if tracer is None:
        return None

    from opentelemetry.trace import INVALID_SPAN

    def begin(label: str, seq: str) -> SequenceSpan:
        attributes = {"specdec.seq": seq, "specdec.replica": replica}
        span: Span = INVALID_SPAN
        with _contained():
            span = tracer.start_span(f"specdec.{role}", _context({_TRACEPARENT: label}), attributes=attributes)
        return SequenceSpan(span)

    return begin


class SequenceSpan:
    """A sequence on one machine; a :class:`specdec.protocol.leases.Span`.

    Args:
        span: OpenTelemetry's, begun.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._sums: dict[str, int] = {}

    @property
    def label(self) -> str:
        """What sequences carry for those whose spans are below this one."""
        return _label(self._span)

    def add(self, **counts: int) -> None:
        """Add to sums; when the first tokens are counted, that is an event."""
        if "num_tokens" in counts and "num_tokens" not in self._sums:
            self._span.add_event("first tokens")
        for name, count in counts.items():
            self._sums[name] = self._sums.get(name, 0) + count

    def end(self, finish: str = "") -> None:
        """The machine holds it no more."""
        with _contained():
            self._span.set_attributes({f"specdec.{name}": count for name, count in self._sums.items()})
            if finish:
                self._span.set_attribute("specdec.finish", finish)
            self._span.end()


class RequestSpan:
    """A request at the ingress: below the span of Serve's replica, or the client's ``traceparent``.

    Where there is neither, Serve has decided that the request is not sampled, and nobody decides again.

    Args:
        tracer: Makes it.
        headers: Of the request.
    """

    def __init__(self, tracer: OtelTracer, headers: Mapping[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.context import get_current

        is_within = trace.get_current_span().get_span_context().is_valid
        above = get_current() if is_within else _context(headers)
        is_known = trace.get_current_span(above).get_span_context().is_valid
        self._tracer = tracer
        self._span = trace.INVALID_SPAN
        with _contained():
            self._span = tracer.start_span("specdec.ingress", above) if is_known else trace.INVALID_SPAN

    @property
    def label(self) -> str:
        """What the request's sequences carry; empty where it is not sampled."""
        return _label(self._span) if self._span.is_recording() else ""

    def end(self, phases: Mapping[str, float | None], facts: Mapping[str, Any]) -> None:
        """Its answer has ended, with it the last of its phases.

        Args:
            phases: When each began, on the monotonic clock, in seconds, in their order; None where it never did.
            facts: Attributes by name; those that are None are left out.
        """
        if not self._span.is_recording():
            return
        with _contained():
            self._end(phases, facts)

    def _end(self, phases: Mapping[str, float | None], facts: Mapping[str, Any]) -> None:
        from opentelemetry import trace

        now_s, now_ns = time.monotonic(), time.time_ns()
        begun = {name: int(now_ns - (now_s - start_s) * 1e9) for name, start_s in phases.items() if start_s is not None}
        context = trace.set_span_in_context(self._span)
        for (name, start_ns), end_ns in zip(begun.items(), [*begun.values(), now_ns][1:], strict=True):
            self._tracer.start_span(f"specdec.{name}", context, start_time=start_ns).end(end_ns)
        self._span.set_attributes({f"specdec.{name}": fact for name, fact in facts.items() if fact is not None})
        if facts["status"] >= 500:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(now_ns)


def _context(carrier: Mapping[str, str]) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier)


def _label(span: Span) -> str:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    return carrier.get(_TRACEPARENT, "")


@contextmanager
def _contained() -> Iterator[None]:
    """Around what a span processor may raise in: an exporter of the user's stops no machine and no request."""
    try:
        yield
    except Exception as error:
        logger.warning("A trace span was lost (tracing.exporter): %r", error)
