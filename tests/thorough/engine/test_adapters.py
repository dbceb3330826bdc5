"""Sequences with other adapters in one batch: each gets what its own gives alone, and nothing of another's."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import NOT_FINITE
from specdec.core.params import SamplingParams
from specdec.core.types import Adapter
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.describe import linear_shapes
from specdec.models.lora import slots as pool_module
from specdec.models.lora.slots import AdapterPool, AdapterSlots, LoRAConfig, Weights, layer_shapes
from specdec.models.quantization import Quantization
from tests.letters import spelled
from tests.sizes import some
from tests.specdec.adapters import RANKS, save_adapter, with_adapter, write_adapter
from tests.specdec.engine.features import Feature, assert_texts_are_its_own, demo
from tests.specdec.engine.pairs import (
    Case,
    add_noise,
    assert_same,
    backend,
    collect,
    greedy,
    make_draft,
    make_service,
    prepare_tiny,
    run,
)
from tests.specdec.engine.test_hostile_network import DRAFTER, TARGET, HostileService
from tests.specdec.engine.test_processors import BOTH
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.thorough.engine.test_combinations import EVERYTHING
from tests.thorough.engine.test_combinations import assert_same as assert_same_output

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.95)
NOISE = 0.05
ROOM = LoRAConfig(max_loras=4, max_rank=64)
ORDER = ("a", "b", None, "c", "d", "a", "c")


class AtOnce:
    """In the place of a thread: reads files in the caller's, so that a step of a test is a step."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target


@pytest.fixture(autouse=True)
def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "Thread", AtOnce)
    monkeypatch.setattr(pool_module, "_IDLE_S", 0.0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Strong enough to change every text, and so weak that a draft without them is right now and then."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(folder / name, make_model("llama"), rank, seed, 0.03, target_modules=modules)
        for seed, (name, (rank, modules)) in enumerate(RANKS.items())
    }


def make_cases(adapters: dict[str, Adapter], sampling: SamplingParams, *, has_twins: bool = False) -> list[Case]:
    """Prompts of up to three chunks that begin alike, each with another adapter than its neighbours."""
    rng = random.Random(11)
    shared, *own = ([rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (12, 1, 5, 23, 9, 2, 17, 1))
    chosen = [None if name is None else adapters[name] for name in ORDER]
    return [
        Case(
            (*shared, *tail),
            14 + 2 * i,
            sampling,
            100 + i,
            eos_token_ids=(),
            adapter=one,
            draft_adapter=one if has_twins else None,
        )
        for i, (tail, one) in enumerate(zip(own, chosen, strict=True))
    ]


def assert_as_peft(outputs: Sequence[list[int]], cases: Sequence[Case]) -> None:
    for got, case in zip(outputs, cases, strict=True):
        stock = with_adapter(make_model("llama"), case.adapter)
        assert_same(got, greedy(stock, case), case, stock)


def gauges(service: InProcessService) -> dict[str, float]:
    return service.target._backend.metrics()


@pytest.mark.parametrize("scarce", some(["slots", "blocks"]))
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_greedy_texts_are_those_of_peft(num_draft_tokens: int, scarce: str, adapters: dict[str, Adapter]) -> None:
    """Two slots fewer than adapters, or blocks for two or three sequences; prompts in chunks that begin alike."""
    cases = make_cases(adapters, GREEDY)
    max_loras, num_blocks = (2, 400) if scarce == "slots" else (4, 22)
    room = replace(ROOM, max_loras=max_loras)
    service = make_service("llama", NOISE, num_draft_tokens, adapters=room, num_blocks=num_blocks)
    outputs, stats = run(service, cases)
    assert_as_peft(outputs, cases)
    assert len(set(map(tuple, outputs))) == len(cases)
    assert (stats.num_accepted_tokens > 0) == (num_draft_tokens > 0)
    assert (gauges(service)["num_evictions"] > 0) == (scarce == "blocks")
    assert gauges(service)["num_adapter_loads"] >= 4
    assert gauges(service)["num_loaded_adapters"] == max_loras


@pytest.mark.parametrize("has_twins", some([False, True]))
def test_a_seed_gives_the_same_tokens_whatever_drafts_and_however_many_slots(
    has_twins: bool, adapters: dict[str, Adapter]
) -> None:
    cases = make_cases(adapters, SAMPLED, has_twins=has_twins)
    plain, _ = run(make_service("llama", NOISE, 0, adapters=ROOM), cases)
    alone = [run(make_service("llama", NOISE, 0, adapters=ROOM), [case])[0][0] for case in cases]
    assert plain == alone
    for max_loras in (1, 2, 4):
        room = replace(ROOM, max_loras=max_loras)
        outputs, stats = run(make_service("llama", NOISE, 3, adapters=room), cases)
        assert outputs == plain
        assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_pair_in_one_process_gives_the_tokens_without_drafts(is_padded: bool, adapters: dict[str, Adapter]) -> None:
    """With the draft's own adapters, also where only the device knows which tokens use which."""
    cases = make_cases(adapters, SAMPLED, has_twins=True)
    wanted, _ = run(make_service("llama", NOISE, 0, adapters=ROOM), cases)
    target = backend(ModelTarget, make_model("llama"), adapters=ROOM)
    drafter = backend(ModelDrafter, make_draft("llama", NOISE), adapters=ROOM)
    if is_padded:
        for one in (target, drafter):
            one._runner.record_graphs(ExecutorLimits(16, 64, 112, 4))
            assert not one._runner.graphs_failure
    outputs, stats = run(InProcessService(PairedTarget(target, drafter, 4), None, 0), cases)
    assert outputs == wanted
    assert stats.num_accepted_tokens > 20
    assert drafter.metrics()["num_adapter_loads"] >= len(adapters)


def test_a_draft_with_the_adapters_twin_is_right_more_often(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    strong = save_adapter(tmp_path / "strong", make_model("llama"), 8, strength=0.5)
    rates = []
    for twin in (None, strong):
        service = make_service("llama", NOISE, 3, adapters=ROOM)
        cases = [replace(case, adapter=strong, draft_adapter=twin) for case in make_cases(adapters, GREEDY)[:4]]
        rates.append(run(service, cases)[1].acceptance_rate)
    assert rates[1] > rates[0] + 0.1, rates


@pytest.mark.parametrize("chunk", some([8, 64]))
def test_prefixes_are_reused_under_the_same_adapter_alone(chunk: int, adapters: dict[str, Adapter]) -> None:
    prompt = tuple(range(3, 40))
    service = make_service("llama", NOISE, 3, adapters=ROOM, chunk=chunk)
    for name, num_reused in (("a", 0), ("b", 0), (None, 0), ("a", 36), (None, 36), ("b", 36), ("c", 0)):
        before = gauges(service)["num_reused_tokens"]
        case = Case(prompt, 12, GREEDY, adapter=None if name is None else adapters[name])
        assert_as_peft(run(service, [case])[0], [case])
        assert gauges(service)["num_reused_tokens"] - before == num_reused, name


def hostile_runner(noise: float, room: LoRAConfig, num_blocks: int) -> ModelRunner:
    model = make_model("llama")
    loaded = prepare_tiny(add_noise(model, noise) if noise else model, room)
    return ModelRunner(loaded, num_blocks=num_blocks, block_size=4)


@pytest.mark.parametrize(
    "sampling",
    [
        replace(GREEDY, logprobs=2),
        replace(SAMPLED, logprobs=2),
        replace(EVERYTHING, temperature=1.0),
    ],
    ids=["greedy", "sampled", "everything"],
)
def test_no_token_changes_behind_a_hostile_network(sampling: SamplingParams, adapters: dict[str, Adapter]) -> None:
    """Workers restart without any adapter and load what re-openings name; offers are late, doubled and lost."""
    cases = make_cases(adapters, sampling, has_twins=True)
    wanted = collect(make_service("llama", NOISE, 0, adapters=ROOM, processors=BOTH), cases)
    target, draft = (partial(hostile_runner, noise, replace(ROOM, max_loras=3), 26) for noise in (0.0, NOISE))
    counts: Counter[str] = Counter()
    for seed in (1, 2):
        service = HostileService(target, draft, seed, BOTH)
        for got, want in zip(collect(service, cases), wanted, strict=True):
            assert_same_output(got, want, f"seed {seed}")
        service.count(TARGET)
        service.count(DRAFTER)
        counts += service.counts
    for what in ("promoted", "accepted", "evicted", "reused", "T restarted", "D restarted"):
        assert counts[what] > 0, f"the schedules are too kind: nothing {what}"


def test_swapped_adapters_are_seen(adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that each use the other's: the comparison with PEFT tells."""
    cases = make_cases(adapters, GREEDY)
    slot = AdapterPool.slot

    def swapped(self: AdapterPool, adapter: Adapter | None) -> int | None:
        other = {"a": adapters["b"], "b": adapters["a"]}
        return slot(self, None if adapter is None else other.get(adapter.name, adapter))

    monkeypatch.setattr(AdapterPool, "slot", swapped)
    outputs, _ = run(make_service("llama", NOISE, 3, adapters=ROOM), cases)
    with pytest.raises(AssertionError, match="their logits differ"):
        assert_as_peft(outputs, cases)


@pytest.mark.parametrize("fault", ["gone", "another", "too large", "no room"])
def test_a_worker_that_cannot_load_an_adapter_says_so(fault: str, adapters: dict[str, Adapter], tmp_path: Path) -> None:
    """That sequence ends with an error that says why; the others go on, and a later one may succeed."""
    good, bad = adapters["b"], save_adapter(tmp_path / "bad", make_model("llama"), 8, seed=9)
    if fault == "gone":
        shutil.rmtree(bad.path)
    elif fault == "another":
        save_adapter(tmp_path / "bad", make_model("llama"), 8, seed=10)
    room = None if fault == "no room" else replace(ROOM, max_loras=1, max_rank=4 if fault == "too large" else 8)
    says = {
        "gone": "there is no folder",
        "another": "is another than",
        "too large": "at most 4",
        "no room": "no adapters",
    }
    cases = [
        Case((5, 6, 7), 8, GREEDY, adapter=bad),
        Case((5, 6, 7), 8, GREEDY, adapter=good if fault in ("gone", "another") else None),
        Case((5, 6, 7), 8, GREEDY, adapter=bad),
        Case((8, 9), 8, GREEDY),
    ]
    service = make_service("llama", NOISE, 3, adapters=room)
    outputs = collect(service, cases)
    assert [output.finish for output in outputs] == ["error", "length", "error", "length"]
    assert says[fault] in outputs[0].reason
    assert_as_peft([outputs[1].tokens, outputs[3].tokens], [cases[1], cases[3]])
    assert gauges(service)["kv_blocks_in_use"] == 0


def test_a_twin_that_is_gone_costs_its_own_drafts_alone(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    twin = save_adapter(tmp_path / "twin", make_model("llama"), 8, seed=9)
    shutil.rmtree(twin.path)
    cases = [
        replace(case, draft_adapter=twin if i % 2 else None) for i, case in enumerate(make_cases(adapters, SAMPLED))
    ]
    wanted = collect(make_service("llama", NOISE, 0, adapters=ROOM), cases)
    service = make_service("llama", NOISE, 3, adapters=ROOM)
    outputs = collect(service, cases)
    assert [output.tokens for output in outputs] == [output.tokens for output in wanted]
    assert ["a" in spelled(output.notes) for output in outputs] == [case.draft_adapter is None for case in cases]


@pytest.mark.parametrize("sampling", some([GREEDY, SAMPLED]), ids=some(["greedy", "sampled"]))
def test_an_adapter_whose_numbers_overflow_ends_its_own_texts_alone(
    sampling: SamplingParams, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    """Others go on beside it, and in the blocks that it leaves, in target and draft."""
    bad = write_adapter(tmp_path / "bad", layer_shapes(make_model("llama")), 4, 0, 3e37)
    spoilt = [
        Case(tuple(range(30 + i, 70)), 20, sampling, i, adapter=bad, draft_adapter=bad if i else None) for i in range(3)
    ]
    spoilt.append(replace(spoilt[0], adapter=None, draft_adapter=bad))
    cases = make_cases(adapters, sampling)
    room = {"adapters": ROOM, "num_blocks": 90}
    wanted = collect(make_service("llama", NOISE, 3, **room), cases)
    service = make_service("llama", NOISE, 3, **room)
    beside = collect(service, [*spoilt, *cases])
    assert [output.finish for output in beside] == ["error"] * 3 + ["length"] * (1 + len(cases))
    assert beside[0].reason == NOT_FINITE
    later = collect(service, cases)
    assert {output.finish for output in later} == {"length"}
    assert [one.tokens for one in beside[4:]] == [one.tokens for one in later] == [one.tokens for one in wanted]


@pytest.mark.parametrize("feature", some(["quantized", "hybrids", "prompt lookup", "grammars", "EAGLE-3"]))
def test_beside_another_feature_each_text_is_its_own_adapters(feature: str, tmp_path: Path) -> None:
    quantization: Quantization = "none"
    if feature == "quantized":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")
        quantization = "int8"
    role = "hybrid" if feature == "hybrids" else "target"
    source = demo(role, quantization=quantization, adapters=replace(ROOM, max_rank=8))
    shapes = linear_shapes(source)
    chosen = [None, *(write_adapter(tmp_path / name, shapes, 3 + i, i, 1.0) for i, name in enumerate("abc"))]
    drafts: Feature = "drafts" if feature in ("hybrids", "quantized") else feature
    texts = assert_texts_are_its_own(source, demo("draft"), drafts, chosen)
    plain = assert_texts_are_its_own(demo(role, quantization=quantization), demo("draft"), drafts)
    assert [text == other for text, other in zip(texts, plain, strict=True)] == [one is None for one in chosen] * 2


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("slow", ["a", "ab"])
def test_adapters_that_come_slowly_hold_up_no_others(
    slow: str, is_gone: bool, adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where as many hang as there are slots, whether whoever wanted them is gone or waits for them."""
    monkeypatch.setattr(pool_module, "_SLOW_READ_S", 0.05)
    monkeypatch.setattr(pool_module, "Thread", threading.Thread)
    may_go_on = threading.Event()
    folder_of, read = pool_module.adapter_folder, list[str]()

    def slow_folder_of(path: str) -> Path:
        read.append(path)
        assert all(path != adapters[name].path for name in slow) or may_go_on.wait(60)
        return folder_of(path)

    monkeypatch.setattr(pool_module, "adapter_folder", slow_folder_of)
    pool = AdapterPool(prepare_tiny(make_model("llama"), LoRAConfig(2, 64)).adapters)
    for _ in range(2):
        for name in slow:
            pool.hold(name, adapters[name], (0, 1.0))
        pool.prepare()
        for name in slow if is_gone else "":
            pool.release(name)
    for name in "cd":
        pool.hold(name, adapters[name], (0, 2.0))
    wait_for(pool, [adapters["c"], adapters["d"]])
    pool.hold("a", adapters["a"], (0, 0.0))
    pool.prepare()
    assert pool.must_wait(adapters["a"])
    may_go_on.set()
    wait_for(pool, [adapters["a"]])
    assert sorted(read) == sorted(adapters[name].path for name in {*slow, *"cd"}), "a file was read twice"


def test_only_so_many_files_are_read_at_once(adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SLOW_READ_S", 0.0)
    monkeypatch.setattr(pool_module, "_READINGS_PER_SLOT", 2)
    monkeypatch.setattr(pool_module, "Thread", threading.Thread)
    may_go_on, folder_of = threading.Event(), pool_module.adapter_folder

    def slow_folder_of(path: str) -> Path:
        assert may_go_on.wait(60)
        return folder_of(path)

    monkeypatch.setattr(pool_module, "adapter_folder", slow_folder_of)
    pool = AdapterPool(prepare_tiny(make_model("llama"), LoRAConfig(1, 64)).adapters)
    for name in "abc":
        pool.hold(name, adapters[name], (0, float(ord(name))))
    for _ in range(4):
        pool.prepare()
    assert len(pool._reading) == 2
    may_go_on.set()
    for name in "abc":
        wait_for(pool, [adapters[name]])
        pool.release(name)


def test_the_thread_that_reads_an_adapter_leaves_the_step_a_plain_copy(
    adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, copied = AdapterSlots.put, list[torch.Tensor]()

    def remember(self: AdapterSlots, slot: int, weights: Weights) -> None:
        copied.extend(tensor for _, *both in weights for tensor in both)
        put(self, slot, weights)

    monkeypatch.setattr(AdapterSlots, "put", remember)
    pool = AdapterPool(prepare_tiny(make_model("llama"), LoRAConfig(2, 64)).adapters)
    pool.hold("a", adapters["a"], (0, 0.0))
    prepared(pool)
    assert copied
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in copied)


def wait_for(pool: AdapterPool, adapters: Sequence[Adapter]) -> None:
    until_s = time.monotonic() + 30
    while any(map(pool.must_wait, adapters)):
        assert time.monotonic() < until_s, "an adapter never came"
        pool.prepare()
        time.sleep(0.01)


def prepared(pool: AdapterPool) -> None:
    for _ in range(2):  # read, and taken
        pool.prepare()


def test_those_who_came_first_have_the_slots_and_the_least_recently_used_go(adapters: dict[str, Adapter]) -> None:
    pool = AdapterPool(prepare_tiny(make_model("llama"), LoRAConfig(2, 64)).adapters)
    for arrival_s, name in enumerate("abca"):
        pool.hold(f"{name}{arrival_s}", adapters[name], (0, arrival_s))
    prepared(pool)
    assert [pool.must_wait(adapters[name]) for name in "abcd"] == [False, False, True, True]
    pool.release("a0")  # a is needed still, but by one that came after c
    prepared(pool)
    assert [pool.must_wait(adapters[name]) for name in "abc"] == [True, False, False]
    for key in ("b1", "c2", "a3"):
        pool.release(key)
    prepared(pool)
    assert pool.metrics() == {"num_loaded_adapters": 2.0, "num_adapter_loads": 3.0}
    pool.hold("b", adapters["b"], (0, 9.0))
    prepared(pool)
    pool.hold("d", adapters["d"], (0, 10.0))
    prepared(pool)
    assert [pool.must_wait(adapters[name]) for name in "bcd"] == [False, True, False], "c was used longest ago"
    assert pool.num_loads == 4
