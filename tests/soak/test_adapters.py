"""Adapters in a real service: fifty with room for four, loaded and unloaded under load, and a target killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from openai import InternalServerError, NotFoundError, OpenAI

from cluster.models.demos import demo_folder
from specdec import BackendOptions, LoRAConfig, ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.types import Adapter
from specdec.models.describe import linear_shapes
from tests.integration.running import RunningService, eventually, nothing_held
from tests.specdec.adapters import write_adapter

OPS, USER = "sk-ops-0123456789abc", "sk-user-0123456789ab"
NUM_ADAPTERS = 50
ROOM = LoRAConfig(max_loras=4, max_rank=8)
PROMPT = "def read_lines(path):\n    "
NUM_TOKENS = 12
MEMORY_SLACK = 64 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Adapter]:
    shapes = linear_shapes(ModelSource(str(demo_folder("target"))))
    return {f"a{i}": write_adapter(folder / f"a{i}", shapes, 2 + i % 7, i, 1.0) for i in range(NUM_ADAPTERS)}


@pytest.fixture(scope="module")
def wanted(adapters: dict[str, Adapter]) -> dict[str, str]:
    """What each adapter says in this process, and the model without one."""
    source = ModelSource(str(demo_folder("target")), dtype="float32", adapters=ROOM)
    engine = SpeculativeEngine.from_pretrained(source, options=BackendOptions(max_model_len=64, max_num_seqs=4))
    greedy = SamplingParams(temperature=0)
    chosen: dict[str, Adapter | None] = {**adapters, "specdec-demo": None}
    texts = {
        name: engine.generate(PROMPT, greedy, max_tokens=NUM_TOKENS, adapter=one).text for name, one in chosen.items()
    }
    assert len(set(texts.values())) > NUM_ADAPTERS // 2, "the adapters are too weak to tell anything"
    return texts


@pytest.fixture(scope="module")
def service(
    folder: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ops: {OPS}\nuser: {USER}\n")
    flags = ["--lora-adapters", f"a0={folder}/a0", "--lora-folder", str(folder), "--access-api-keys-file", str(keys)]
    flags += ["--lora-max-loras", str(ROOM.max_loras), "--lora-max-rank", str(ROOM.max_rank)]
    flags += ["--access-admin-keys", "ops", "--no-access-metrics-need-key", "--replicas-ingress", "2"]
    running = RunningService(*flags, "--max-model-len", "512", "--num-speculative-tokens", "3")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(service: RunningService) -> OpenAI:
    """As OpenAI's are by default: a 503, such as of an ingress that cannot ask the store, is sent again."""
    return OpenAI(base_url=f"{service.url}/v1", api_key=USER, timeout=240)


def change(service: RunningService, path: str, **body: str) -> httpx2.Response:
    return httpx2.post(f"{service.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {OPS}"}, timeout=120)


def say(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
    return answer.choices[0].text


def target_memory(service: RunningService) -> int:
    (target,) = targets(service)
    return target.memory_info().rss


def targets(service: RunningService) -> list[psutil.Process]:
    return [child for child in service.children() if "TargetServer" in " ".join(child.cmdline())]


def test_fifty_adapters_with_room_for_four(
    service: RunningService, client: OpenAI, wanted: dict[str, str], adapters: dict[str, Adapter]
) -> None:
    """Eight clients ask for all of them, while they are loaded; each gets its own text, and so does a plain request."""
    names = [*adapters]
    for name in names[1:5]:
        assert change(service, "load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
    assert [say(client, name) for name in names[:5]] == [wanted[name] for name in names[:5]]
    before = target_memory(service)
    loaded = threading.Semaphore(5)
    done: list[tuple[str, str]] = []

    def ask(index: int) -> None:
        loaded.acquire()
        for name in (names[index], f"specdec-demo:{names[index]}", "specdec-demo", names[index % 5]):
            done.append((name.removeprefix("specdec-demo:"), say(client, name)))

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, index) for index in range(NUM_ADAPTERS)]
        for name in names[5:]:
            assert change(service, "load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
            loaded.release()
        for one in asked:
            one.result()
    assert len(done) == 4 * NUM_ADAPTERS
    assert [name for name, text in done if text != wanted[name]] == []
    assert service.worker_gauge("loaded_adapters")["target"] == ROOM.max_loras
    assert service.worker_gauge("adapter_loads")["target"] >= NUM_ADAPTERS
    eventually(lambda: nothing_held(service), 30, "nothing is held any more")
    assert target_memory(service) < before + MEMORY_SLACK
    assert len(client.models.list().data) == 2 + NUM_ADAPTERS


def test_a_stream_ends_on_the_adapter_that_is_unloaded(
    service: RunningService, client: OpenAI, wanted: dict[str, str]
) -> None:
    """New requests are 404, at the other ingress as soon as it has heard of it."""
    stream = client.completions.create(
        model="a7", prompt=PROMPT, max_tokens=NUM_TOKENS + 60, temperature=0, stream=True
    )
    first = next(stream).choices[0].text
    assert change(service, "unload_lora_adapter", lora_name="a7").status_code == 200

    def is_gone() -> bool:
        try:
            say(client, "a7")
        except NotFoundError:
            return True
        return False

    eventually(lambda: all(is_gone() for _ in range(8)), 60, "both ingresses have heard of it")
    text = first + "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text.startswith(wanted["a7"])
    assert change(service, "unload_lora_adapter", lora_name="a7").status_code == 404


def test_an_adapter_whose_folder_is_gone_fails_alone_and_is_served_again_when_it_is_back(
    service: RunningService, client: OpenAI, wanted: dict[str, str], folder: Path
) -> None:
    others = ["a21", "a22", "a23", "a24"]  # they take its place on the device
    for name in ("a20", *others):
        assert change(service, "load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
    (folder / "a20").rename(folder / "away")
    assert [say(client, name) for name in others] == [wanted[name] for name in others]
    with pytest.raises(InternalServerError, match="there is no folder"):
        say(client, "a20")
    assert say(client, "a21") == wanted["a21"]
    assert change(service, "load_lora_adapter", lora_name="again", lora_path="a20").status_code == 400
    (folder / "away").rename(folder / "a20")
    assert say(client, "a20") == wanted["a20"]
    eventually(lambda: nothing_held(service), 30, "nothing is held any more")


def test_a_killed_target_comes_back_without_adapters_and_loads_what_streams_name(
    service: RunningService, client: OpenAI
) -> None:
    models = ["a1", "a2", "a3", "a4", "a5", "specdec-demo"]

    def whole(model: str, started: threading.Barrier | None = None) -> str:
        stream = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=120,
            temperature=1,
            seed=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = next(stream).choices[0].text
        if started is not None:
            started.wait(60)
        return text + "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    calm = [whole(model) for model in models]
    reopened = service.count("reopened")
    started = threading.Barrier(4)  # those with adapters beyond the four wait for a slot, and begin later
    with ThreadPoolExecutor(len(models)) as pool:
        running = [pool.submit(whole, model, started if model in models[:3] else None) for model in models]
        started.wait(60)
        (target,) = targets(service)
        target.send_signal(signal.SIGKILL)
        texts = [one.result() for one in running]
    assert texts == calm
    assert service.count("reopened") > reopened
