"""A whole step of a target on a device without memory: one upload, one download, and nothing that waits for it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.train_draft.heads import export_heads
from specdec.cache.recurrent import binding
from specdec.core.backends import DraftJob, Status, VerifyJob
from specdec.core.grammar import Grammar
from specdec.core.log import TokenLog
from specdec.core.messages import Candidates
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.head_chains import HeadChains
from specdec.drafting.heads import DraftHeads, HeadDrafter, HeadsOptions, load_heads
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads
from specdec.engine.drafter import ModelDrafter
from specdec.engine.pair import PairedTarget
from specdec.engine.target import ModelTarget
from specdec.engine.warmup import StepLimits, warm_sampling
from specdec.executor import staging, steps
from specdec.executor.chains import ChainGraphs
from specdec.executor.graphs import ExecutorLimits, Graphs
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Arrays, Record
from specdec.executor.steps import put_drawn
from specdec.kernels import recurrent
from specdec.kernels.recurrent import KeptStates, StateTensors
from specdec.kernels.sample import record_width
from specdec.kernels.scan import Mamba1, Mamba2, Scan
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.sampling import on_kernels, rows
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup
from tests.sizes import one_of_each
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.executor.test_derive import BREAKS
from tests.specdec.executor.test_steps import META, Nothing, on
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import RECURRENT, make_recurrent
from tests.specdec.operators import DeviceOnly, Operators

ANY = Grammar("json_object", "")
FEATURES = {
    "greedy": SamplingParams(temperature=0.0),
    "noise": SamplingParams(),
    "top_p": SamplingParams(top_p=0.9, top_k=20, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "others": SamplingParams(logit_bias=((3, 1.0),), allowed_token_ids=(1, 2, 3), bad_words=((4, 5),), min_tokens=3),
    "grammar": SamplingParams(grammar=ANY),
    "logprobs": SamplingParams(logprobs=3),
    "rejection": SamplingParams(acceptance="rejection"),
}


EXPERTS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_next")
downloads: list[int | None] = []


class Kernels:
    """Launches nothing."""

    num_bytes = 0

    def __init__(self, vocab_size: int, rows: int, sequences: int, tokens: int, device: torch.device) -> None:
        self.edited = torch.zeros(rows, vocab_size, device=device)
        self.chosen = torch.zeros(rows, dtype=torch.int32, device=device)
        self.record = torch.zeros(sequences, record_width(tokens), dtype=torch.int32, device=device)
        self.num_bytes = self.edited.nbytes

    def decide(self, logits: Tensor, step: Any, record: Tensor | None = None, **options: Any) -> None:
        assert all(getattr(step, name).device == META for name in type(step).__slots__)
        record = self.record if record is None else record
        assert len(record) >= len(step.first)
        assert record.shape[1] >= self.record.shape[1]
        assert record.storage_offset() * record.element_size() % 16 == 0


class NoStates(types.ModuleType):
    """Launches nothing."""

    def __init__(self) -> None:
        super().__init__("nothing_recurrent")
        self.num_launched = 0

    def convolve(
        self, inputs: Tensor, ring: Tensor, weight: Tensor, bias: object, activation: object, at: StateTensors
    ) -> Tensor:
        self._note(at)
        return inputs.clone()

    def scan(self, scan: Scan, kept: KeptStates, at: StateTensors) -> Tensor:
        self._note(at)
        assert [value.shape[2:] for value in scan.inputs] == [pool.shape[2:] for pool in kept.inputs]
        return scan.inputs[0 if isinstance(scan, Mamba1 | Mamba2) else 1].clone()

    def _note(self, at: StateTensors) -> None:
        assert all(getattr(at, name).device == META for name in type(at).__slots__)
        self.num_launched += 1


def recurrent_on_meta(family: str) -> LoadedModel:
    loaded = prepare_model(make_recurrent(family), "tiny")
    attention = tuple(replace(layer, device=META) for layer in loaded.attention_layers)
    layers = tuple(
        replace(
            layer,
            convolution=layer.convolution and replace(layer.convolution, device=META),
            scans=tuple(replace(scan, device=META) for scan in layer.scans),
        )
        for layer in loaded.recurrent_layers
    )
    loaded.model.to(META)
    return replace(loaded, device=META, attention_layers=attention, recurrent_layers=layers)


class AllowsAll:
    """In place of compiled grammars."""

    num_forbidden_draft_tokens = 0

    def is_ready(self, spec: SequenceSpec) -> bool:
        return True

    def allowed(self, spec: SequenceSpec, tokens: object, draft: tuple[int, ...]) -> tuple[int, ...]:
        return draft

    def forced(self, spec: SequenceSpec, tokens: object, most: int) -> tuple[int, ...]:
        return ()

    def masked(self, groups: Sequence[RowGroup]) -> tuple[list[RowGroup], dict[int, Exception]]:
        words = -(-VOCAB_SIZE // 32)
        masks = [torch.full((1 + len(group.draft), words), -1, dtype=torch.int32) for group in groups]
        has = [group.spec.sampling.grammar is not None for group in groups]
        return [g._replace(mask=m) if h else g for g, m, h in zip(groups, masks, has, strict=True)], {}


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels launch nothing, records are not copied but counted, and say that all is finite."""
    monkeypatch.setitem(recurrent._KERNELS, "nothing:Nothing", "nothing_recurrent")
    monkeypatch.setitem(sys.modules, "nothing_recurrent", NoStates())
    module: Any = types.ModuleType("kernels")
    module.Nothing, module.TritonSampler = Nothing, Kernels
    monkeypatch.setitem(sys.modules, "nothing", module)
    monkeypatch.setitem(sys.modules, "specdec.kernels.triton.sample", module)
    downloads.clear()
    copy, collect = staging._copy, Record.collect

    def copy_to_device(to: Tensor, of: Tensor, num_words: int | None) -> None:
        if of.device == META:
            downloads.append(num_words)
        else:
            copy(to, of, num_words)

    monkeypatch.setattr(staging, "_copy", copy_to_device)

    def all_finite(self: Record) -> Arrays:
        arrays = collect(self)
        for name in arrays.keys() & {"flags", "values", "finite", "finite_tokens"}:
            arrays[name][:] = 1
        return arrays

    monkeypatch.setattr(Record, "collect", all_finite)
    # In inference mode operators would be dispatched whole, and those that wait would not be seen.
    for owner, name in (
        (ModelRunner, "forward"),
        (ModelRunner, "launch_chains"),
        (ModelRunner, "launch_laid_out"),
        (HeadChains, "draw"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.setattr(on_kernels, "put_drawn", put_drawn.__wrapped__)
    monkeypatch.setattr(steps, "put_drawn", put_drawn.__wrapped__)
    with torch.no_grad():
        yield


def jobs_of(features: Sequence[str], num_rows: int, num_drafts: int) -> list[VerifyJob]:
    """New sequences that use features by turns."""
    jobs = []
    drawn = Candidates((5, 6), (0.5, 0.5))
    for i in range(num_rows):
        params = FEATURES[features[i % len(features)]]
        spec = SequenceSpec(params, i, 5, 50, eos_token_ids=(2,))
        candidates = (drawn,) * num_drafts if params.acceptance == "rejection" else ()
        key = f"{'-'.join(features)}-{num_rows}-{i}"
        jobs.append(VerifyJob(key, TokenLog((3 + i, 4, 5, 6, 7)), (5,) * num_drafts, spec, candidates))
    return jobs


def heads_on(loaded: LoadedModel, method: str, folder: Path) -> tuple[LoadedModel, DraftHeads]:
    """A model on ``meta`` with heads of random weights."""
    if method == "eagle3":
        write_eagle3(folder, make_model("llama"), [[*range(3, 90)]], layout="authors", draft_vocab_size=50)
    else:
        config = HeadsConfig(loaded.config.hidden_size, VOCAB_SIZE, 4, original_lm_head=True)
        export_heads(MedusaHeads(config, torch.nn.Identity()), folder)
    return load_heads(HeadsOptions(str(folder), 4, method=method), loaded)


class Target:
    """A target on ``meta`` with sequences that decode."""

    def __init__(
        self,
        family: str,
        features: Sequence[str],
        num_rows: int,
        num_drafts: int,
        is_padded: bool,
        heads: str = "",
        folder: Path | None = None,
    ) -> None:
        loaded = recurrent_on_meta(family) if family in RECURRENT else on(META, family)
        if family in EXPERTS:  # experts are multiplied in groups by no other type
            loaded = replace(loaded, model=loaded.model.bfloat16(), dtype=torch.bfloat16)
        if folder is not None:
            loaded, made = heads_on(loaded, heads, folder)
        runner = ModelRunner(loaded, num_blocks=300, block_size=16, kernel="nothing:Nothing", num_state_slots=num_rows)
        if is_padded:
            num_passes = 4 if heads else 0
            runner.record_graphs(ExecutorLimits(64, 512, 64, 7, num_extra_words=1 << 15, num_chained_passes=num_passes))
            assert not runner.graphs_failure
        sampler = Sampler(VOCAB_SIZE, on_kernels=True)
        sampler.matchers = AllowsAll()  # type: ignore[assignment]
        self.runner = runner
        drafter = HeadDrafter(made, runner, sampler, 4) if heads else None
        self.backend = ModelTarget(
            runner, sampler, max_model_len=64, max_num_batched_tokens=512, max_num_seqs=64, heads=drafter
        )
        self.jobs = jobs_of(features, num_rows, num_drafts)

    def step(self) -> None:
        results = self.backend.verify(self.jobs)
        for job, result in zip(self.jobs, results, strict=True):
            assert result.status is Status.DECIDED, result
            job.log.extend(result.run)


class Drafter:
    """A drafter on ``meta``, and sequences for it."""

    def __init__(
        self, features: Sequence[str], num_rows: int, num_passes: int, is_parallel: bool = False, **limits: int
    ) -> None:
        of_draft = {"mask_token_id": 1, "num_step_tokens": num_passes} if is_parallel else {}
        limits |= {"is_parallel": is_parallel, "max_draft_tokens": num_passes * is_parallel}
        self.runner = ModelRunner(on(META, "llama"), num_blocks=300, block_size=16, kernel="nothing:Nothing")
        self.runner.record_graphs(ExecutorLimits(64, 512, 64, num_extra_words=1 << 15, **limits))
        self.backend = ModelDrafter(
            self.runner,
            Sampler(VOCAB_SIZE, on_kernels=True),
            max_model_len=64,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            num_chained_passes=num_passes,
            **of_draft,
        )
        self.texts = [[3 + i, 4, 5, 6, 7] for i in range(num_rows)]
        params = [FEATURES[features[i % len(features)]] for i in range(num_rows)]
        self.specs = [SequenceSpec(one, i, 5, 50, eos_token_ids=(2,)) for i, one in enumerate(params)]

    def step(self, num_tokens: int, num_guesses: int) -> None:
        jobs = [
            DraftJob(f"{i}", text, spec, 0, len(text), None, num_guesses, num_tokens)
            for i, (text, spec) in enumerate(zip(self.texts, self.specs, strict=True))
        ]
        for text, found in zip(self.texts, self.backend.propose(jobs), strict=True):
            tokens = [found.token, *(one.token for one in found.further)]
            assert len(tokens) == num_tokens
            text += [token for token in tokens if token is not None]


def counted(target: Target | Drafter, allows_indices: bool = False, *others: Target | Drafter) -> DeviceOnly:
    """The mode, for a step like those before."""
    downloads.clear()
    allows_indices |= target.runner.loaded.dtype == torch.bfloat16  # experts, which transformers sorts by such tensors
    staged = tuple(one.runner._steps.staging.words for one in (target, *others))
    return DeviceOnly(staged, allows_indices)


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
    [*((tokens, guesses, False) for tokens in (1, 4, 8) for guesses in (0, 2)), (1, 2, True), (4, 0, True)],
)
def test_a_recorded_chain_is_one_upload_one_launch_and_one_download(
    num_tokens: int, num_guesses: int, is_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that gives several tokens in a pass it is a single pass."""
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
        assert launched == [(next(size for size in (16, 64, 512) if size >= num_read), num_tokens)]


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
        target.jobs = [job._replace(most_own=4) for job in target.jobs]
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
    assert launched == [16 if num_rows == 1 else 256, (size, 4)]
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
    """A kernel is compiled by options, widths, masks and sizes of buffers, and anew for lines that are not aligned."""
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
            step.draft_ids.shape[1],
            len(step.masks) > 0,
        )
        ways.add((*sorted(options.items()), scores is None, shapes, logits.stride(), logits.dtype))

    monkeypatch.setattr(Kernels, "decide", note)
    target = Target("llama", [], 0, 0, True)
    warm_sampling(target.backend._sampler, target.runner.no_logits, StepLimits(64, 512), 7)
    warmed = set(ways)
    assert len(warmed) > 50
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
