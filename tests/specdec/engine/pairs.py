"""Tiny pairs in one process, and what transformers makes of the same prompts."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.core.backends import DraftBackend
from specdec.core.messages import Notes, Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Adapter, Finish
from specdec.drafting.heads import DraftHeads, HeadDrafter, with_heads
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.sampling.pipeline import LogitsProcessor, Sampler
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.models.families import VOCAB_SIZE, make_model

logger = logging.getLogger(__name__)

EOS = 2
MAX_MODEL_LEN = 160
_numbers = itertools.count()
TIE = 1e-4
"""Logits closer than this may swap by rounding alone."""


@dataclass(frozen=True)
class Case:
    """One sequence of a test."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int = 0
    num_speculative_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = (EOS,)
    prediction: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    adapter: Adapter | None = None
    draft_adapter: Adapter | None = None

    def spec(self, arrival_s: float = 0.0) -> SequenceSpec:
        """What the service is told of it."""
        return SequenceSpec(
            self.sampling,
            self.seed,
            len(self.prompt),
            self.max_tokens,
            self.eos_token_ids,
            arrival_s=arrival_s,
            priority=self.priority,
            num_speculative_tokens=self.num_speculative_tokens,
            prediction=SharedTokens(self.prediction),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            draft_adapter=self.draft_adapter,
        )


@dataclass
class Output:
    """What a sequence gave."""

    tokens: list[int] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    finish: Finish | None = None
    reason: str = ""


@torch.no_grad()
def add_noise(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """Move every weight matrix by ``share`` of its own size, at random: a draft that agrees sometimes."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * share)
    return model


def make_draft(family: str, noise: float) -> PreTrainedModel:
    """The target's twin with noise on its weights; infinite noise is another model altogether."""
    return make_model(family, seed=50) if noise == float("inf") else add_noise(make_model(family), noise)


def prepare_tiny(model: PreTrainedModel, room: LoRAConfig | None = None) -> LoadedModel:
    """A model in memory, maybe with room for adapters."""
    loaded = prepare_model(model, "tiny")
    return loaded if room is None else replace(loaded, adapters=AdapterSlots(loaded.model, room))


def backend(
    kind: Callable[..., Any],
    model: PreTrainedModel,
    *,
    num_blocks: int = 400,
    block_size: int = 4,
    chunk: int = 16,
    max_model_len: int = MAX_MODEL_LEN,
    processors: Sequence[LogitsProcessor] = (),
    heads: tuple[DraftHeads, int, int] | None = None,
    adapters: LoRAConfig | None = None,
) -> Any:
    """A target or draft backend over a tiny model; heads come with how far they draft, and in trees of what size."""
    loaded = prepare_tiny(model, adapters)
    loaded = loaded if heads is None else with_heads(loaded, heads[0])
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=block_size)
    sampler = Sampler(VOCAB_SIZE, processors)
    options = {} if heads is None else {"heads": HeadDrafter(heads[0], runner, sampler, *heads[1:])}
    return kind(runner, sampler, max_model_len=max_model_len, max_num_batched_tokens=chunk, **options)


def make_service(family: str, noise: float, num_draft_tokens: int, **options: Any) -> InProcessService:
    """A pair of one family in one process."""
    target = backend(ModelTarget, make_model(family), **options)
    return InProcessService(target, backend(ModelDrafter, make_draft(family, noise), **options), num_draft_tokens)


def run_with_branches(
    target: ModelTarget, drafter: DraftBackend, prompts: Sequence[Sequence[int]], plan: Plan, num_draft_steps: int
) -> OverlapService:
    """Generate 50 tokens for each prompt while the drafter works, as without drafts; gives the service, for its counts.

    ``num_draft_steps`` is how many steps the drafter makes in one of the target.
    """
    sampling = SamplingParams(temperature=1.0)
    cases = [Case(tuple(prompt), 50, sampling, 5 + i, eos_token_ids=(0,)) for i, prompt in enumerate(prompts)]
    wanted, _ = run(OverlapService(target, drafter, Plan(0), lambda: 0), cases)
    service = OverlapService(target, drafter, plan, lambda: num_draft_steps)
    outputs, stats = run(service, cases)
    assert outputs == wanted
    assert stats.num_accepted_tokens > 20
    assert service.drafter.counters.num_promoted > 5
    return service


def run(service: InProcessService | OverlapService, cases: Sequence[Case]) -> tuple[list[list[int]], SpecStats]:
    """Generate all cases in one batch; gives each one's output tokens, and what speculation did."""
    outputs = collect(service, cases)
    stats = (SpecStats.of([output.notes]) for output in outputs)
    return [output.tokens for output in outputs], sum(stats, SpecStats())


def collect(service: InProcessService | OverlapService, cases: Sequence[Case]) -> list[Output]:
    """Generate all cases in one batch; gives everything that was delivered."""
    names = start(service, cases)
    outputs = {name: Output() for name in names}
    for _ in range(10_000):
        deliver(service, outputs)
        if all(output.finish is not None for output in outputs.values()):
            return list(outputs.values())
    raise AssertionError(f"never finished: {outputs}")


def start(service: InProcessService | OverlapService, cases: Sequence[Case]) -> list[str]:
    """Take all cases in; gives their names, each of which is used once: what was closed does not come back."""
    names = [f"{next(_numbers)}" for _ in cases]
    for i, (name, case) in enumerate(zip(names, cases, strict=True)):
        service.start(name, case.prompt, case.spec(arrival_s=i))
    return names


def deliver(service: InProcessService | OverlapService, outputs: dict[str, Output]) -> None:
    """One round, and what it gave."""
    for delivery in service.pump():
        output = outputs[delivery.seq]
        output.tokens += delivery.tokens
        output.notes = output.notes + delivery.notes
        output.finish, output.reason = delivery.finish, delivery.reason


@torch.inference_mode()
def greedy(stock: PreTrainedModel, case: Case, **options: object) -> list[int]:
    """What transformers' own greedy ``generate`` of the target alone gives; ``options`` are of its own."""
    prompt = torch.tensor([case.prompt])
    output = stock.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=case.max_tokens,
        eos_token_id=list(case.eos_token_ids),
        pad_token_id=0,
        **options,
    )
    return output[0, len(case.prompt) :].tolist()


@torch.inference_mode()
def assert_same(got: list[int], want: list[int], case: Case, stock: PreTrainedModel) -> None:
    """Equal, or different from a tie on: a tie is named, never passed over in silence."""
    for i, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        if ours == theirs:
            continue
        logits = stock(input_ids=torch.tensor([[*case.prompt, *want[:i]]]), use_cache=False).logits[0, -1]
        gap = abs(float(logits[ours] - logits[theirs]))
        assert gap < TIE, f"token {i} is {ours}, not {theirs}: their logits differ by {gap:.2e}"
        logger.warning("a tie at token %d: %d and %d differ by %.1e", i, ours, theirs, gap)
        return
    assert len(got) == len(want)
