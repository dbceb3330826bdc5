from __future__ import annotations

from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry, generate_latest

from deployments.openai.observer import Observer
from deployments.openai.tally import Round, RoundTally
from specdec.protocol.messages import Notes

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
    sequence = Observer(registry, clock=lambda: now_s).opened("m", age_s=2.0)
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
    notes = Notes("aacpaabcaab", (0, 0, 4, 0, 0, 0, 2, 1, 3, 0, 1))
    rounds = [Round(4, 2), Round(2, 2), Round(1, 0), Round(3, 1), Round(1, 1)]
    for cut in range(len(notes.how) + 1):
        tally = RoundTally()
        assert tally.add(notes.first(cut)) + tally.add(notes.last(len(notes.how) - cut)) == rounds
        assert (tally.num_drafts, tally.num_draft_tokens, tally.num_accepted_tokens) == (5, 11, 6)
