from __future__ import annotations

from collections.abc import Callable

import httpx2
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deployments.http.observer import MAX_KEYS, OTHER_KEYS, Observer
from deployments.http.tally import Round, RoundTally
from specdec.core.messages import Notes
from tests.letters import provenance, spelled

from .conftest import Bench


async def test_what_is_counted_is_what_is_billed(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("a b c d e f g", 3)
    usages = [
        (await client.completions.create(model="demo", prompt=["x", "y z"], n=2)).usage,
        (await client.completions.create(model="demo", prompt="x", stop=" d")).usage,
    ]
    assert bench.metric("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert bench.metric("generation_tokens_total") == sum(usage.completion_tokens for usage in usages)
    assert bench.metric("request_success_total", finished_reason="stop") == 5
    assert bench.metric("time_to_first_token_seconds_count") == 5
    assert bench.metric("e2e_request_latency_seconds_count") == 5
    assert bench.metric("inter_token_latency_seconds_count") == 4 * 2 + 1
    accepted = bench.metric("spec_decode_num_accepted_tokens_total")
    by_position = [bench.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert accepted == sum(by_position) == bench.metric("spec_decode_num_draft_tokens_total")
    assert by_position[0] == bench.metric("spec_decode_num_drafts_total")
    assert by_position[2] == 0


def test_times_are_measured_from_the_requests_arrival() -> None:
    now_s = 10.0
    registry = CollectorRegistry()
    sequence = Observer(registry, clock=lambda: now_s).opened("m", "", age_s=2.0)
    sequence.admitted()
    now_s = 11.0
    sequence.tokens(1, 0, [])
    now_s = 11.5
    sequence.tokens(2, 0, [])
    now_s = 15.0
    sequence.closed("length")
    sums = {
        name: registry.get_sample_value(f"specdec_{name}_sum", {"model_name": "m"})
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    }
    assert sums == {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 0.5,
        "e2e_request_latency_seconds": 7.0,
    }
    assert b"specdec_num_requests_running" in generate_latest(registry)


def test_rounds_are_put_together_again_wherever_they_were_cut() -> None:
    notes = Notes(provenance("aacpaabcaab"), (0, 0, 4, 0, 0, 0, 2, 1, 3, 0, 1))
    rounds = [Round(4, 2), Round(2, 2), Round(1, 0), Round(3, 1), Round(1, 1)]
    for cut in range(len(spelled(notes)) + 1):
        tally = RoundTally()
        assert tally.add(notes.first(cut)) + tally.add(notes.last(len(spelled(notes)) - cut)) == rounds
        assert (tally.num_drafts, tally.num_draft_tokens, tally.num_accepted_tokens) == (5, 11, 6)


async def test_answers_are_counted_by_path_status_and_code(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("a b", 1)
    for body in ({"model": "demo", "prompt": "x"}, {"model": "none", "prompt": "x"}, {"model": "demo", "prompt": 1.5}):
        await http.post("/v1/completions", json=body)
    await http.get("/v1/nothing")
    counted = {
        status: bench.metric("http_requests_total", path="/v1/completions", status=status)
        for status in ("200", "400", "404")
    }
    assert counted == {"200": 1, "400": 1, "404": 1}
    assert bench.metric("http_requests_total", path="none", status="404") == 1
    assert bench.metric("http_errors_total", code="model_not_found") == 1
    assert bench.metric("http_errors_total") == 3


def test_what_nobody_took_is_discarded() -> None:
    registry = CollectorRegistry()
    sequence = Observer(registry, "m").opened("m", "k", 0.0)
    sequence.tokens(3, 1, [])
    sequence.delivered(2)
    sequence.closed("abort")
    sequence.left()
    sequence.left()
    assert registry.get_sample_value("specdec_generation_tokens_total", {"model_name": "m", "key": "k"}) == 2
    assert registry.get_sample_value("specdec_discarded_tokens_total", {"model_name": "m"}) == 2


def test_updates_do_not_grow_with_tokens() -> None:
    """A sequence is observed as it begins, when tokens come, and as it ends, however many tokens these are."""

    def num_updates(num_tokens: int) -> int:
        registry = CollectorRegistry()
        sequence = Observer(registry, "m").opened("m", "", 0.0)
        series = {id(one): one for one in vars(sequence).values() if isinstance(one, Counter | Histogram | Gauge)}
        count = 0

        def counting(update: Callable[[float], None]) -> Callable[[float], None]:
            def counted(value: float = 1) -> None:
                nonlocal count
                count += 1
                update(value)

            return counted

        for one in series.values():
            for name in ("inc", "observe"):
                if hasattr(one, name):
                    setattr(one, name, counting(getattr(one, name)))
        for _ in range(10):
            sequence.tokens(num_tokens, 0, [Round(num_tokens - 1, num_tokens - 1)])
        return count

    assert num_updates(2) == num_updates(64) == 9 + 10 * 3


def test_so_many_api_keys_have_series_of_their_own_and_all_others_one() -> None:
    registry = CollectorRegistry()
    observer = Observer(registry, "m")
    for number in range(MAX_KEYS + 5):
        observer.prompt_tokens("m", f"key-{number}", 2)
        observer.prompt_tokens("m", "key-0", 1)
    samples = [one for metric in registry.collect() for one in metric.samples if "prompt_tokens_total" in one.name]
    counts = {one.labels["key"]: one.value for one in samples}
    assert len(counts) == MAX_KEYS + 1
    assert (counts["key-0"], counts[OTHER_KEYS]) == (2 + MAX_KEYS + 5, 10)
