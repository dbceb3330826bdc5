"""Spans of requests and their sequences, in OpenTelemetry's terms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from deployments.http.service import ApiSettings
from deployments.metrics import spans as tracing
from deployments.metrics.spans import RequestSpan, sequence_tracer, serve_tracer
from tests.deployments.http.conftest import Bench

ASK = {"model": "demo", "prompt": "def f(x):", "max_tokens": 20}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE}-{PARENT}-{flag}" for flag in ("01", "00"))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """Traces all, unless a client says otherwise."""
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.fixture
def traced(bench: Bench, provider: TracerProvider) -> Bench:
    return Bench(bench.tokenizer, settings=ApiSettings(tracer=provider.get_tracer("test")))


@asynccontextmanager
async def served(bench: Bench) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=bench.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


async def test_a_request_has_a_span_and_one_for_each_of_its_phases(
    traced: Bench, exporter: InMemorySpanExporter
) -> None:
    traced.says("a b c d e f g", 3)
    async with served(traced) as http:
        answer = await http.post("/v1/completions", json=ASK, headers={"traceparent": SAMPLED})
        for path, body in (("/v1/completions", ASK | {"model": "nobody"}), ("/ping", {})):
            await http.post(path, json=body, headers={"traceparent": SAMPLED})
    first, refused = [span for span in exporter.get_finished_spans() if span.name == "specdec.ingress"]
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {int(TRACE, 16)}
    assert first.parent is not None
    assert first.parent.span_id == int(PARENT, 16)
    (request,) = traced.service.opened
    assert request.spec.trace == f"00-{TRACE}-{first.context.span_id:016x}-01"
    below = [span for span in exporter.get_finished_spans() if span.parent.span_id == first.context.span_id]
    assert [span.name for span in below] == ["specdec.queue", "specdec.prompt", "specdec.stream"]
    edges = [first.start_time, *(time for span in below for time in (span.start_time, span.end_time)), first.end_time]
    assert edges[2:] == sorted(edges[2:]), "a phase begins where the one before ends"
    usage, attributes = answer.json()["usage"], first.attributes
    assert (attributes["specdec.prompt_tokens"], attributes["specdec.completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert attributes["specdec.status"] == 200
    assert refused.attributes["specdec.status"] == 404
    assert first.status.status_code is refused.status.status_code is trace.StatusCode.UNSET


async def test_a_request_within_a_span_of_serve_is_below_that(
    traced: Bench, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    traced.says("a b c")
    with provider.get_tracer("serve").start_as_current_span("replica") as span:
        async with served(traced) as http:
            await http.post("/v1/completions", json=ASK, headers={"traceparent": SAMPLED})
    assert by_name(exporter)["specdec.ingress"].parent == span.get_span_context()


async def test_a_request_that_fails_is_an_error(traced: Bench, exporter: InMemorySpanExporter) -> None:
    traced.script = lambda request: [ZeroDivisionError()]
    async with served(traced) as http:
        await http.post("/v1/completions", json=ASK, headers={"traceparent": SAMPLED})
    assert by_name(exporter)["specdec.ingress"].status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize("headers", [{}, {"traceparent": NOT_SAMPLED}, {"traceparent": "00-forged"}])
async def test_what_serve_or_the_client_do_not_sample_has_no_label(
    traced: Bench, exporter: InMemorySpanExporter, headers: dict[str, str]
) -> None:
    traced.says("a b c")
    async with served(traced) as http:
        assert (await http.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
    assert [request.spec.trace for request in traced.service.opened] == [""]
    assert exporter.get_finished_spans() == ()


def test_sequences_have_spans_below_the_label_and_sums_as_attributes(
    exporter: InMemorySpanExporter, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    begin = sequence_tracer("router", "r#1")
    assert begin is not None
    above = begin(SAMPLED, "s")
    below = begin(above.label, "s")
    for _ in range(2):
        below.add(num_tokens=3, num_rounds=1)
    below.end("stop")
    above.end()
    inner, outer = exporter.get_finished_spans()
    assert inner.name == "specdec.router"
    assert inner.parent == as_seen_elsewhere(outer)
    assert outer.parent.span_id == int(PARENT, 16)
    assert dict(inner.attributes) == {
        "specdec.seq": "s",
        "specdec.replica": "r#1",
        "specdec.num_tokens": 6,
        "specdec.num_rounds": 2,
        "specdec.finish": "stop",
    }
    assert [event.name for event in inner.events] == ["first tokens"]


def as_seen_elsewhere(span: ReadableSpan) -> trace.SpanContext:
    """A span's context as another process has it."""
    own = span.context
    return trace.SpanContext(own.trace_id, own.span_id, True, own.trace_flags, own.trace_state)


def test_nothing_traces_where_serve_does_not() -> None:
    assert serve_tracer() is None
    assert sequence_tracer("target", "r#1") is None


def test_the_exporter_is_what_the_configuration_names() -> None:
    from cluster.config.names import OTLP

    module, _, function = OTLP.partition(":")
    assert module == tracing.__name__
    assert callable(getattr(tracing, function))


def test_a_span_processor_that_raises_stops_nobody() -> None:
    class Raising(SpanProcessor):
        def on_start(self, span: object, parent_context: object = None) -> None:
            raise RuntimeError("no exporter")

    provider = TracerProvider()
    provider.add_span_processor(Raising())
    span = RequestSpan(provider.get_tracer("specdec"), {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert span.label == ""
    span.end({"queue": 0.0}, {"status": 200})
