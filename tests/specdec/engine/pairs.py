"""Tiny pairs in one process, and what transformers makes of the same prompts."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.engine.draft_backend import ModelDrafter
from specdec.engine.local import LocalService
from specdec.engine.stats import SpecStats
from specdec.engine.target_backend import ModelTarget
from specdec.models.loading import prepare_model
from specdec.models.runner import ModelRunner
from specdec.protocol.messages import Notes
from specdec.sampling.params import SamplingParams, SequenceSpec
from specdec.sampling.pipeline import Sampler
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


def backend(kind: type, model: PreTrainedModel, *, num_blocks: int = 400, block_size: int = 4, chunk: int = 16):
    """A target or draft backend over a tiny model."""
    runner = ModelRunner(prepare_model(model, "tiny"), num_blocks=num_blocks, block_size=block_size)
    return kind(runner, Sampler(VOCAB_SIZE), max_model_len=MAX_MODEL_LEN, max_batch_tokens=chunk)


def make_service(family: str, noise: float, num_draft_tokens: int, **options: int) -> LocalService:
    """A pair of one family in one process."""
    target = backend(ModelTarget, make_model(family), **options)
    return LocalService(target, backend(ModelDrafter, make_draft(family, noise), **options), num_draft_tokens)


def run(service: LocalService, cases: Sequence[Case]) -> tuple[list[list[int]], SpecStats]:
    """Generate all cases in one batch; gives each one's output tokens, and what speculation did."""
    outputs: list[list[int]] = [[] for _ in cases]
    notes: list[list[Notes]] = [[] for _ in cases]
    names = [f"{next(_numbers)}" for _ in cases]  # a sequence's name is used once: what was closed does not come back
    for i, case in enumerate(cases):
        spec = SequenceSpec(
            case.sampling,
            case.seed,
            len(case.prompt),
            case.max_tokens,
            (EOS,),
            arrival_s=i,
            num_speculative_tokens=case.num_speculative_tokens,
        )
        service.start(names[i], case.prompt, spec)
    running = set(range(len(cases)))
    for _ in range(10_000):
        for delivery in service.pump():
            i = names.index(delivery.seq)
            outputs[i] += delivery.tokens
            notes[i].append(delivery.notes)
            if delivery.finish is not None:
                running.discard(i)
        if not running:
            return outputs, sum(map(SpecStats.of, notes), SpecStats())
    raise AssertionError(f"never finished: {running}")


@torch.inference_mode()
def greedy(stock: PreTrainedModel, case: Case) -> list[int]:
    """What transformers' own greedy ``generate`` of the target alone gives."""
    prompt = torch.tensor([case.prompt])
    output = stock.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=case.max_tokens,
        eos_token_id=EOS,
        pad_token_id=0,
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
