"""The engine of one process over models that are in memory, with steps recorded or not: as in ``SpeculativeEngine``
a pair is one target that drafts for its own steps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from benchmarks.gpu.executor import record
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE
from specdec.core.backends import TargetBackend
from specdec.core.messages import Notes
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from specdec.engine.results import SpecStats
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler

MOST_DRAFT_TOKENS = 8
_EXTRA_WORDS = 1 << 20
"""Room for what sampling needs to know of a step's rows, as a service has it."""
_names = itertools.count()


@dataclass(frozen=True)
class Work:
    """What is generated.

    Attributes:
        num_rows: Sequences at once.
        prompt_length: Of each, in tokens.
        num_tokens: Generated for each.
    """

    num_rows: int
    prompt_length: int
    num_tokens: int

    @property
    def max_length(self) -> int:
        """Of a sequence, with the drafts that are read beyond its end."""
        return self.prompt_length + self.num_tokens + MOST_DRAFT_TOKENS + 1

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Of random tokens, always the same."""
        rng = random.Random(3)
        return [[rng.randrange(2, vocab_size) for _ in range(self.prompt_length)] for _ in range(self.num_rows)]


class Pair:
    """A target, and maybe a draft, each with its caches.

    Args:
        target: Decides.
        draft: Proposes; None for none.
        work: The most that is generated.
        max_num_batched_tokens: Most tokens of a step.

    Attributes:
        runners: By role.
        target: The newest backends, as is ``drafter``.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, work: Work, max_num_batched_tokens: int = 2048
    ) -> None:
        self._work, self._max_num_batched_tokens = work, max_num_batched_tokens
        self.runners: dict[str, ModelRunner] = {}
        num_blocks = (work.num_rows + 2) * (-(-work.max_length // BLOCK_SIZE) + 1)
        for role, model in (("target", target), ("draft", draft)):
            if model is not None:
                loaded = prepare_model(model, f"the {role}")
                self.runners[role] = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._make_backends()

    def record(self, report: Report) -> None:
        """Record the steps of both; on a GPU with compiled layers."""
        limits = ExecutorLimits(
            max_rows=self._work.num_rows,
            max_tokens=self._max_num_batched_tokens,
            max_length=self._work.max_length,
            max_draft_tokens=MOST_DRAFT_TOKENS,
            num_extra_words=_EXTRA_WORDS,
        )
        for role, runner in self.runners.items():
            num_passes = MOST_DRAFT_TOKENS if role == "draft" else 0
            record(report, f"the {role}", runner, replace(limits, num_chained_passes=num_passes))
        self._make_backends()

    def _make_backends(self) -> None:
        sampler = Sampler(self.runners["target"].vocab_size)
        room = {
            "max_model_len": self._work.max_length,
            "max_num_batched_tokens": self._max_num_batched_tokens,
            "max_num_seqs": self._work.num_rows,
        }
        self.target = ModelTarget(self.runners["target"], sampler, **room)
        self.drafter: ModelDrafter | None = None
        if "draft" in self.runners:
            passes = MOST_DRAFT_TOKENS if self.runners["draft"].is_recorded else 1
            self.drafter = ModelDrafter(self.runners["draft"], sampler, num_chained_passes=passes, **room)

    def generate(
        self, prompts: Sequence[Sequence[int]], temperature: float, num_draft_tokens: int
    ) -> tuple[list[list[int]], SpecStats]:
        """Generate for all prompts at once; gives each one's tokens, and what speculation did.

        Args:
            prompts: Of the length and number that the work says.
            temperature: Of all; prompt i has seed i.
            num_draft_tokens: Draft tokens a round.

        Raises:
            RuntimeError: A sequence ends with an error.
        """
        decides: TargetBackend = self.target
        if self.drafter is not None and num_draft_tokens:
            decides = PairedTarget(self.target, self.drafter, num_draft_tokens, drafts_first=True)
        service = InProcessService(decides, None, num_draft_tokens)
        tokens: dict[str, list[int]] = {f"{next(_names)}": [] for _ in prompts}
        notes = {name: Notes() for name in tokens}
        for i, (name, prompt) in enumerate(zip(tokens, prompts, strict=True)):
            params = SamplingParams(temperature=temperature, ignore_eos=True)
            service.start(name, prompt, SequenceSpec(params, i, len(prompt), self._work.num_tokens, arrival_s=float(i)))
        open_names = set(tokens)
        while open_names:
            for delivery in service.pump():
                tokens[delivery.seq] += delivery.tokens
                notes[delivery.seq] = notes[delivery.seq] + delivery.notes
                if delivery.finish == "error":
                    raise RuntimeError(delivery.reason)
                if delivery.finish is not None:
                    open_names.discard(delivery.seq)
        for name in tokens:
            service.cancel(name)
        return list(tokens.values()), SpecStats.of(list(notes.values()))
