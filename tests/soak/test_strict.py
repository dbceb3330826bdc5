"""The demo pair, strict in bfloat16, while its workers are killed: each text is that of its request asked alone."""

from __future__ import annotations

import logging

import pytest

from cluster.config.app import ServiceConfig
from cluster.models.sources import backend_options, target_source
from specdec import SamplingParams, SpeculativeEngine
from specdec.core.grammar import Grammar
from tests.integration.kills import Comparison, Stream, Streams, start, under_random_kills

logger = logging.getLogger(__name__)

NUM_TOKENS, NUM_KILLS, PERIOD_S = 20_000, 10, 12.0
NUM_STREAMS, STREAM_TOKENS = 18, 160  # asked again and again, and alone once
ASSIGNMENTS = "([a-z]{1,9} = [0-9]{1,4}\n){200}"
KINDS = ({}, {"guided_regex": ASSIGNMENTS}, {"logprobs": 0})


def alone(engine: SpeculativeEngine, streams: Streams, i: int) -> Stream:
    """Stream ``i`` by an engine that drafts nothing and has nothing else to do."""
    asked = streams.body(i)
    regex, logprobs = asked.get("guided_regex"), asked.get("logprobs")
    grammar = None if regex is None else Grammar("regex", regex)
    sampling = SamplingParams(temperature=asked["temperature"], grammar=grammar, ignore_eos=True, logprobs=logprobs)
    result = engine.generate(asked["prompt"], sampling, seed=asked["seed"], max_tokens=asked["max_tokens"])
    return Stream(result.text, len(result.token_ids), logprobs=[entry.logprob for entry in result.logprobs or ()])


@pytest.mark.timeout(3000)
def test_kills_change_no_token_and_no_bit_of_its_log_probability() -> None:
    config = ServiceConfig(exactness="strict", target={"dtype": "bfloat16"})
    engine = SpeculativeEngine.from_pretrained(
        target_source(config), options=backend_options(config, config.target), progress=logger.warning
    )
    service = start(2, "--exactness", "strict", "--target-dtype", "bfloat16", "--draft-dtype", "bfloat16")
    try:
        streams = Streams(service.url, service.model, NUM_STREAMS, STREAM_TOKENS, kinds=KINDS)
        expected = [alone(engine, streams, i) for i in range(NUM_STREAMS)]
        rounds, killed = under_random_kills(
            service,
            streams,
            count=NUM_KILLS,
            period_s=PERIOD_S,
            seed=7,
            victims=("draft", "target"),
            num_tokens=NUM_TOKENS,
        )
        assert service.count("spec_decode_num_accepted_tokens") > 0
        assert service.count("reopened") > 0
    finally:
        assert service.stop() == 0
    logger.warning("%d rounds, killed: %s", len(rounds), killed)
    assert set(killed) == {"draft", "target"}
    for ended in rounds:
        compared = Comparison.of(ended, expected)
        assert not compared.broken
        assert compared.is_exact
        assert [stream.logprobs for stream in ended] == [stream.logprobs for stream in expected]
