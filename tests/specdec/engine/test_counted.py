"""A whole step of a target on a device without memory: one upload, one download, and nothing that waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.cache.recurrent import binding
from specdec.engine.pair import PairedTarget
from specdec.engine.warmup import StepLimits, warm_sampling
from specdec.executor.chains import ChainGraphs
from specdec.executor.graphs import ExecutorLimits, Graphs
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Arrays, Record
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.sampling import rows
from specdec.sampling.rows import RowGroup
from tests.sizes import one_of_each
from tests.specdec.engine.on_meta import (
    FEATURES,
    Drafter,
    Kernels,
    Target,
    counted,
    downloads,
    jobs_of,
    launch_nothing,
    recurrent_on_meta,
)
from tests.specdec.executor.test_derive import BREAKS
from tests.specdec.executor.test_steps import META, on
from tests.specdec.models.families import VOCAB_SIZE
from tests.specdec.operators import DeviceOnly, Operators


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch_nothing(monkeypatch)
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("family", "is_padded"),
    one_of_each(["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen2_moe"], [False, True]),
)
def test_a_whole_step_is_one_upload_and_one_download(family: str, is_padded: bool) -> None:
    """Where a step takes no block that another sequence had: such are cleared first, by their numbers."""
    for num_rows, num_drafts in (64, 0), (1, 3):
        target = Target(family, [*FEATURES], num_rows, num_drafts, is_padded)
        target.step()  # prompts are read, and memory for steps is made
        target.step()
        for _ in range(2):
            with counted(target) as seen:
                target.step()
            assert (seen.num_uploads, len(downloads)) == (1, 1)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "mamba2", "bamba", "falcon_mamba", "lfm2"])
def test_a_whole_step_of_a_hybrid_is_one_upload_and_one_download(family: str) -> None:
    """Whether its sequences go on or were cut back."""
    for num_rows, num_drafts in (64, 0), (2, 3):
        target = Target(family, [*FEATURES], num_rows, num_drafts, True)
        kernels: Any = sys.modules["nothing_recurrent"]
        target.step()
        target.step()
        for _ in range(2):
            kernels.num_launched = 0
            with counted(target) as seen:
                target.step()
            assert (seen.num_uploads, len(downloads)) == (1, 1)
            layers = target.runner.loaded.recurrent_layers
            assert kernels.num_launched == sum((x.convolution is not None) + len(x.scans) for x in layers)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
@torch.no_grad()
def test_a_prompt_of_a_hybrid_is_one_upload(family: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than what is recorded; also where a package's kernel scans it, which transformers' own stands for."""
    monkeypatch.setattr(binding, "is_fast", lambda _: is_fast)
    runner = ModelRunner(recurrent_on_meta(family), num_blocks=100, kernel="nothing:Nothing", num_state_slots=4)
    runner.record_graphs(ExecutorLimits(4, 256, 256, 3))
    kernels: Any = sys.modules["nothing_recurrent"]
    num_kernels = sum((x.convolution is not None) + len(x.scans) for x in runner.loaded.recurrent_layers)
    for _ in range(2):
        kernels.num_launched = 0
        sequences = [runner.new_sequence() for _ in range(2)]
        assert all(runner.reserve(sequence, 100) for sequence in sequences)
        with DeviceOnly(runner._steps.staging.words, allows_indices=True) as seen:
            runner._launch([RowInput(sequence, [5] * 100, 1) for sequence in sequences])
        assert (seen.num_uploads, kernels.num_launched) == (1, num_kernels)


@torch.no_grad()
def test_a_pass_with_adapters_is_one_upload_and_one_without_multiplies_by_none() -> None:
    loaded = on(META, "llama")
    slots = AdapterSlots(loaded.model, LoRAConfig(4, 8))
    runner = ModelRunner(replace(loaded, adapters=slots), num_blocks=100, kernel="nothing:Nothing")
    runner.record_graphs(ExecutorLimits(4, 64, 64, 3))
    sequences = [runner.new_sequence() for _ in range(3)]

    def launch(adapters: Sequence[int | None]) -> int:
        for sequence in sequences:
            assert runner.reserve(sequence, len(sequence) + 2)
        rows = [RowInput(one, [5, 6], 2, adapter=slot) for one, slot in zip(sequences, adapters, strict=True)]
        with DeviceOnly(runner._steps.staging.words) as seen, Operators() as operators:
            runner._launch(rows)
        assert seen.num_uploads == 1
        return sum("mm" in name for name in operators.names)

    plain = launch([None, None, None])
    assert launch([1, None, 3]) == launch([0, 0, 2]) == plain + 2 * len(slots.shapes)
    assert launch([None, None, None]) == plain


@pytest.mark.parametrize("feature", FEATURES)
def test_each_way_of_sampling_is_one_upload_and_one_download(feature: str) -> None:
    for num_rows, num_drafts in (1, 0), (3, 2):
        target = Target("llama", [feature], num_rows, num_drafts, True)
        target.step()
        target.step()
        with counted(target) as seen:
            target.step()
        assert (seen.num_uploads, len(downloads)) == (1, 1)


def noted(monkeypatch: pytest.MonkeyPatch, *methods: tuple[Any, str]) -> list[str]:
    """The names of methods as they are called from now on."""
    order: list[str] = []

    def noting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def note(*args: Any, **options: Any) -> Any:
            order.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, note)

    for owner, name in methods:
        noting(owner, name)
    return order


def test_a_step_that_is_decided_in_parts_waits_for_all_of_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_SLICE_BYTES", 4 * VOCAB_SIZE * 100)
    order = noted(monkeypatch, (Kernels, "decide"), (Record, "download"), (Record, "collect"))
    target = Target("llama", [*FEATURES], 64, 3, True)
    target.step()
    target.step()
    order.clear()
    with counted(target) as seen:
        target.step()
    assert (seen.num_uploads, len(downloads)) == (1, 1)
    assert order == [*["decide"] * 3, "download", "collect"]


def test_what_is_sampled_after_a_step_has_a_record_for_each_of_its_sequences() -> None:
    """The kernels write one, though nobody reads it; the step's may have room for fewer."""
    target = Target("llama", ["noise"], 1, 0, True)
    sampler, groups = target.backend._sampler, [RowGroup(target.jobs[0].spec, (3, 4, 5))] * 30
    for _ in range(2):
        sampler.sample(target.runner.no_logits(30), groups)
        target.step()


FEATURES_OF_DRAFTS = [("greedy", "noise", "top_p"), ("greedy",)]


@pytest.mark.parametrize(
    ("num_tokens", "num_guesses", "features"),
    one_of_each([1, 4, 1, 4], [0, 0, 2, 2], [*FEATURES_OF_DRAFTS, *reversed(FEATURES_OF_DRAFTS)]),
)
def test_a_draft_is_an_upload_for_each_pass_and_one_download(
    num_tokens: int, num_guesses: int, features: tuple[str, ...]
) -> None:
    for num_rows in 1, 64:
        drafter = Drafter(features, num_rows, 4)
        drafter.step(num_tokens, num_guesses)
        drafter.step(num_tokens, num_guesses)
        with counted(drafter) as seen:
            drafter.step(num_tokens, num_guesses)
        assert (seen.num_uploads, len(downloads)) == (num_tokens, 1)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Keys of the recorded passes that are launched from now on."""
    launched: list[object] = []
    launch = Graphs.launch

    def note(self: Graphs[Any, Any], key: object) -> object:
        launched.append(key)
        return launch(self, key)

    monkeypatch.setattr(Graphs, "launch", note)
    return launched


@pytest.mark.parametrize(
    ("num_tokens", "num_guesses", "is_parallel"),
    [*((tokens, guesses, False) for tokens in (1, 7, 8) for guesses in (0, 2)), (1, 2, True), (4, 0, True)],
)
def test_a_recorded_chain_is_one_upload_few_launches_and_one_download(
    num_tokens: int, num_guesses: int, is_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of powers of two passes. Of a model that gives several tokens in a pass it is a single pass."""
    launched = launches(monkeypatch)
    for num_rows in 1, 64:
        features = "greedy", "noise", "top_p"
        drafter = Drafter(features, num_rows, 8, is_parallel, num_chained_passes=8, num_guesses=3)
        drafter.step(num_tokens, num_guesses)
        drafter.step(num_tokens, num_guesses)
        launched.clear()
        with counted(drafter, allows_indices=True) as seen:  # transformers does, to keep some tokens' logits
            drafter.step(num_tokens, num_guesses)
        assert (seen.num_uploads, len(downloads)) == (1, 1)
        # A pass that drafts several reads the tokens of the draft before, too.
        num_read = num_rows * (2 * num_tokens - 1) if is_parallel else num_rows
        size = next(size for size in (16, 64, 512) if size >= num_read)
        further = [(min(size, 64), length, True) for length in (2, 1)]
        assert launched == ([(size, 4, False), *further] if num_tokens == 7 else [(size, num_tokens, False)])


def test_a_round_of_a_pair_waits_for_nothing_before_all_of_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload and a launch for all drafts, another two for the target, and both results come after that."""
    order: list[str] = []

    def noting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def note(self: Any, *args: Any, **options: Any) -> Any:
            is_draft = isinstance(self, ChainGraphs) or "tokens" in getattr(self, "tensors", ())
            order.append(f"{name} {'draft' if is_draft else 'target'}")
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, note)

    for owner, name in (Graphs, "launch"), (Kernels, "decide"), (Record, "download"), (Record, "collect"):
        noting(owner, name)
    for num_rows in 1, 64:
        target = Target("llama", ["greedy", "noise", "top_p"], num_rows, 0, True)
        drafter = Drafter((), 0, 4, num_chained_passes=4)
        target.backend = PairedTarget(target.backend, drafter.backend, 4)  # type: ignore[assignment]
        target.jobs = [job._replace(max_own_tokens=4) for job in target.jobs]
        for _ in range(3):
            target.step()
        downloads.clear()
        order.clear()
        with counted(target, True, drafter) as seen:
            target.step()
        assert (seen.num_uploads, len(downloads)) == (2, 2)
        of_draft = ["launch draft", *["decide target"] * 4, "download draft"]
        of_target = ["launch target", "decide target", "download target"]
        assert order == [*of_draft, *of_target, "collect draft", "collect target"]


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_of_heads_are_one_upload_one_launch_and_one_download_beside_the_step(
    method: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    target = Target("llama", ["greedy", "noise", "top_p"], num_rows, 3, True, heads=method, folder=tmp_path)
    for _ in range(3):
        target.step()
    launched.clear()
    with counted(target, allows_indices=True) as seen:
        target.step()
    size = 16 if num_rows == 1 else 64
    # A head that caches reads all that was kept, which is one token of each row here.
    assert launched == [16 if num_rows == 1 else 256, (size, 4, False)]
    assert (seen.num_uploads, len(downloads)) == (2, 2)


@pytest.mark.parametrize("feature", ["penalties", "others", "logprobs"])
def test_a_draft_token_that_depends_on_others_is_one_upload_and_one_download(feature: str) -> None:
    drafter = Drafter((feature,), 3, 1)
    drafter.step(1, 2)
    drafter.step(1, 2)
    with counted(drafter) as seen:
        drafter.step(1, 2)
    assert (seen.num_uploads, len(downloads)) == (1, 1)


def test_serving_samples_in_no_way_that_was_not_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled by options, masks and sizes of buffers, and anew for lines that are not aligned."""
    ways: set[object] = set()

    def note(
        self: Kernels,
        logits: Tensor,
        step: Any,
        scores: Tensor | None = None,
        record: Tensor | None = None,
        **options: Any,
    ) -> None:
        lines = [getattr(step, name) for name in type(step).__slots__ if name not in ("counts", "prompt_bits")]
        assert all(line.storage_offset() * line.element_size() % 16 == 0 for line in lines if line.numel())
        shapes = (
            self.chosen.shape,
            None if record is None else record.stride(),
            len(step.masks) > 0,
        )
        ways.add((*sorted(options.items()), scores is None, shapes, logits.stride(), logits.dtype))

    monkeypatch.setattr(Kernels, "decide", note)
    target = Target("llama", [], 0, 0, True)
    warm_sampling(target.backend._sampler, target.runner.no_logits, StepLimits(64, 512), 7)
    warmed = set(ways)
    assert len(warmed) > 40
    for features in ([name] for name in FEATURES):
        for num_rows, num_drafts in (1, 0), (3, 2):
            target.jobs = jobs_of(features, num_rows, num_drafts)
            target.step()
            target.step()
    assert ways == warmed


@pytest.mark.parametrize("name", BREAKS)
def test_sampling_that_waits_or_copies_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("llama", ["noise"], 2, 0, True)
    target.step()
    target.step()

    def broken(self: Kernels, logits: Tensor, step: Any, **options: Any) -> None:
        BREAKS[name](step.position)

    monkeypatch.setattr(Kernels, "decide", broken)
    with counted(target), pytest.raises(AssertionError, match="waits for the device or copies"):
        target.step()


def test_what_does_not_depend_on_the_result_is_done_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("llama", ["noise"], 2, 0, True)
    target.step()
    sequences = [target.backend._states.sequence(job.key) for job in target.jobs]
    methods = (target.runner._graphs, "launch"), (Kernels, "decide"), (Record, "download")
    order = noted(monkeypatch, *methods, (target.backend, "_note_read"))
    collect = Record.collect

    def waited(self: Record) -> Arrays:
        order.append("collect")
        assert [len(one) for one in sequences] == [len(job.log) for job in target.jobs]
        return collect(self)

    monkeypatch.setattr(Record, "collect", waited)
    target.step()
    assert order == ["launch", "decide", "download", "_note_read", "collect"]
    assert np.array_equal(target.runner.flag_rows, [0, 1, 0, 1])
