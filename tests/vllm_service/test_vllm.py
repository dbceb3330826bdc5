"""A service whose target runs in vLLM gives the texts of our own engine. ``make test-vllm`` runs more tests with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.models.demos import demo_folder
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from tests.integration.kills import processes_of
from tests.integration.running import ROOT, RunningService, eventually, nothing_held

PROMPTS = [f'def function_{i}(self, values):\n    """' for i in range(8)]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    flags = {
        "target-engine": "vllm",
        "target-python": str(ROOT / ".venv-vllm" / "bin" / "python"),
        "target-engine-args": "{enforce_eager: true}",
        "target-kv-cache-memory": "128MiB",
        "max-model-len": "1024",
        "num-speculative-tokens": "4",
    }
    running = RunningService(*(word for name, value in flags.items() for word in (f"--{name}", value)))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def own() -> SpeculativeEngine:
    source = ModelSource(str(demo_folder("target")), dtype="float32")
    return SpeculativeEngine.from_pretrained(source, options=BackendOptions(max_model_len=1024, max_num_seqs=16))


def test_vllm_runs_in_the_target_alone(service: RunningService) -> None:
    def has_vllm(role: str) -> bool:
        (process,) = processes_of(service, role)
        return any("site-packages/vllm/" in Path(one.path).as_posix() for one in process.memory_maps())

    assert has_vllm("target")
    assert not has_vllm("draft")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_texts_are_those_of_our_own_engine(
    service: RunningService, own: SpeculativeEngine, temperature: float, num_draft_tokens: int
) -> None:
    sampling, client, model = SamplingParams(temperature=temperature), service.client(), service.model
    wanted = [own.generate(prompt, max_tokens=64, seed=i, sampling=sampling).text for i, prompt in enumerate(PROMPTS)]

    def ask(i: int) -> str:
        fields = {"num_speculative_tokens": num_draft_tokens}
        answer = client.completions.create(
            model=model, prompt=PROMPTS[i], max_tokens=64, seed=i, temperature=temperature, extra_body=fields
        )
        return answer.choices[0].text

    before = service.count("spec_decode_num_accepted_tokens")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == wanted
    accepted = service.count("spec_decode_num_accepted_tokens") - before
    assert (accepted > 0) == (num_draft_tokens > 0)
    eventually(lambda: nothing_held(service), 10, "nothing is held")
