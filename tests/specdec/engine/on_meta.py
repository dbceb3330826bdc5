"""Targets and drafters on a device without memory: kernels launch nothing, and uploads and waits are counted."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.backends import DraftJob, Status, VerifyJob
from specdec.core.grammar import Grammar
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.drafting.head_chains import HeadChains
from specdec.drafting.heads import DraftHeads, HeadDrafter, HeadsOptions, load_heads
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor import staging, steps
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Arrays, Record
from specdec.executor.steps import put_drawn
from specdec.kernels import recurrent
from specdec.kernels.recurrent import KeptStates, StateTensors
from specdec.kernels.sample import record_width
from specdec.kernels.scan import Mamba1, Mamba2, Scan
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling import on_kernels
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.drafting.medusa_folders import write_medusa
from tests.specdec.executor.test_steps import META, Nothing, on
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import RECURRENT, make_recurrent
from tests.specdec.operators import DeviceOnly

ANY = Grammar("json_object", "")
FEATURES = {
    "greedy": SamplingParams(temperature=0.0),
    "noise": SamplingParams(),
    "top_p": SamplingParams(top_p=0.9, top_k=20, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "others": SamplingParams(
        logit_bias=((3, 1.0),), allowed_token_ids=SharedTokens((1, 2, 3)), bad_words=((4, 5),), min_tokens=3
    ),
    "grammar": SamplingParams(grammar=ANY),
    "logprobs": SamplingParams(logprobs=3),
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


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(on_kernels, "put_drawn", inspect.unwrap(put_drawn))
    monkeypatch.setattr(steps, "put_drawn", inspect.unwrap(put_drawn))


def jobs_of(features: Sequence[str], num_rows: int, num_drafts: int) -> list[VerifyJob]:
    """New sequences that use features by turns."""
    jobs = []
    for i in range(num_rows):
        params = FEATURES[features[i % len(features)]]
        spec = SequenceSpec(params, i, 5, 50, eos_token_ids=(2,))
        key = f"{'-'.join(features)}-{num_rows}-{i}"
        jobs.append(VerifyJob(key, TokenLog((3 + i, 4, 5, 6, 7)), (5,) * num_drafts, spec, max_own_tokens=8))
    return jobs


def heads_on(loaded: LoadedModel, method: str, folder: Path) -> tuple[LoadedModel, DraftHeads]:
    """A model on ``meta`` with heads of random weights."""
    if method == "eagle3":
        write_eagle3(folder, make_model("llama"), [[*range(3, 90)]], layout="authors", draft_vocab_size=50)
    else:
        config = HeadsConfig(loaded.config.hidden_size, VOCAB_SIZE, 4, original_lm_head=True)
        write_medusa(folder, config, MedusaHeads(config, torch.nn.Identity()).state_dict())
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
