"""Streams against a real server whose tokens come by a script, and what its metrics tell of devices."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from transformers import AutoTokenizer

from benchmarks.modes.load import (
    Workload,
    devices_between,
    reported_stand_ins,
    run_workload,
    served_model,
    service_stand_ins,
    worker_figures,
)
from cluster.models.demos import demo_folder
from specdec.core.errors import ServiceUnavailableError
from specdec.engine.results import SpecStats
from tests.deployments.http.conftest import Bench, listening

TEXT = "for item in items:\n    print('é', item)\n"

PAGE = """
# TYPE specdec_steps counter
specdec_steps_total{model_name="m",deployment="TargetServer",replica="a"} 10.0
specdec_steps_total{model_name="m",deployment="TargetServer",replica="b"} 5.0
specdec_steps_total{model_name="m",deployment="DraftServer",replica="c"} 40.0
# TYPE specdec_busy_seconds counter
specdec_busy_seconds_total{model_name="m",deployment="TargetServer",replica="a"} 1.5
specdec_busy_seconds_total{model_name="m",deployment="TargetServer",replica="b"} 0.5
# TYPE specdec_backend gauge
specdec_backend{model_name="m",name="num_overruns",deployment="TargetServer",replica="a"} 3.0
# TYPE specdec_generation_tokens counter
specdec_generation_tokens_total{model_name="m"} 99.0
"""


@pytest.fixture
def bench() -> Bench:
    return Bench(AutoTokenizer.from_pretrained(demo_folder("target")))


@pytest.fixture
async def url(bench: Bench) -> AsyncIterator[str]:
    async with listening(bench.app) as url:
        yield url


async def test_a_stream_is_counted_in_tokens(bench: Bench, url: str) -> None:
    ids = bench.tokenizer.encode(TEXT)
    bench.says(TEXT, 4, "length")
    assert await served_model(url) == "demo"
    run = await run_workload(url, "demo", Workload(("a", "b"), len(ids), 0.5, 3))
    assert run.texts == (TEXT, TEXT)
    assert run.num_tokens == 2 * len(ids)
    for stream in run.streams:
        sizes = [arrival.num_tokens for arrival in stream.arrivals]
        assert sizes == [4] * (len(ids) // 4) + [len(ids) % 4] * bool(len(ids) % 4)
        times = [arrival.time_s for arrival in stream.arrivals]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] <= run.duration_s
    stats = sum((stream.stats for stream in run.streams), SpecStats())
    assert stats.acceptance_rate == 1
    # Every round but a last one of a single token kept three draft tokens.
    assert stats.mean_acceptance_length == pytest.approx(len(ids) / -(-len(ids) // 4), abs=1)
    assert run.devices == {}


async def test_requests_are_as_the_workload_says(bench: Bench, url: str) -> None:
    bench.says(TEXT, 1, "length")
    await run_workload(url, "demo", Workload(("a", "b"), 9, 0.5, None))
    await run_workload(url, "demo", Workload(("a",), 9, 0.0, 0))
    specs = [request.spec for request in bench.service.opened]
    assert [spec.num_speculative_tokens for spec in specs] == [None, None, 0]
    assert [spec.sampling.temperature for spec in specs] == [0.5, 0.5, 0.0]
    assert all(spec.sampling.ignore_eos and spec.max_tokens == 9 for spec in specs)
    assert len({spec.seed for spec in specs[:2]}) == 2, "each stream has a seed of its own"


async def test_no_prompt_is_found_in_a_cache(bench: Bench, url: str) -> None:
    """Prompts are the same in every round, and of two streams too: each request has a salt of its own."""
    bench.says(TEXT, 1, "length")
    for _ in range(2):
        await run_workload(url, "demo", Workload(("a", "a"), 9, 0.0, 0))
    salts = [request.spec.cache_salt for request in bench.service.opened]
    assert len(salts) == len({*salts}) == 4
    assert all(salts)


async def test_a_stream_that_fails_is_no_result(bench: Bench, url: str) -> None:
    bench.script = lambda request: [*bench.say(TEXT, 4, "length")[:1], ServiceUnavailableError("gone")]
    with pytest.raises(httpx2.HTTPError, match="without its tokens"):
        await run_workload(url, "demo", Workload(("a",), 9, 0.0, 0))


async def test_a_refusal_is_an_error(url: str) -> None:
    with pytest.raises(httpx2.HTTPStatusError):
        await run_workload(url, "another", Workload(("a",), 9, 0.0, 0))


def test_figures_of_workers_are_summed_by_device() -> None:
    assert worker_figures(PAGE) == {
        "target": {"num_steps": 15.0, "busy_s": 2.0, "num_overruns": 3.0, "num_workers": 2.0},
        "draft": {"num_steps": 40.0, "num_workers": 1.0},
    }


def test_what_devices_did_in_between() -> None:
    before = {"target": {"num_steps": 5.0, "busy_s": 0.5}}
    uses = devices_between(before, worker_figures(PAGE), 6.0)
    assert set(uses) == {"target"}, "the draft does not tell how long it was busy"
    target = uses["target"]
    assert (target.num_steps, target.num_overruns) == (10, 3)
    assert target.idle_share == pytest.approx(0.875), "1.5 of 12 seconds of two workers"
    assert target.step_s == pytest.approx(0.15)


async def test_a_service_tells_what_is_not_real(url: str) -> None:
    assert await service_stand_ins(url) == ()
    figures = {"target": {"num_emulated_steps": 3.0, "is_scripted": 1.0}, "draft": {"num_emulated_steps": 0.0}}
    assert reported_stand_ins(figures) == ("emulated devices: target", "scripted tokens")
    assert reported_stand_ins({"target": {"num_steps": 3.0}}) == ()
