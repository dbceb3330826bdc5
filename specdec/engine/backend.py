"""What a target and a drafter over a model share: the scheduler, and steps that are tried again in smaller parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from specdec.core.errors import reason_of
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequences import SequenceStates
from specdec.executor.runner import ModelRunner
from specdec.kernels.device_errors import device_losses, is_out_of_memory
from specdec.sampling.pipeline import Sampler


class _Job(Protocol):
    @property
    def key(self) -> str: ...


J = TypeVar("J", bound=_Job)
R = TypeVar("R")


class ModelBackend:
    """A model with its caches, a sampler, and what chooses the rows of each step.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        max_model_len: Longest sequence in tokens; the runner's pool must hold one.
        max_num_batched_tokens: Most tokens in a forward pass.
        max_num_seqs: Most rows in a forward pass; by default as many as it may have tokens.
        max_decode_tokens: A sequence that lacks at most so many tokens is not read like a prompt.
        states: Of the runner, where another backend uses it too; by default there is none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int | None,
        max_decode_tokens: int,
        states: SequenceStates | None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._states = states if states is not None else SequenceStates(runner)
        self._max_model_len = max_model_len
        self._scheduler = Scheduler(
            max_num_batched_tokens, max_num_seqs or max_num_batched_tokens, max_decode_tokens=max_decode_tokens
        )
        self._step: dict[str, int] = {}  # tokens of each row, once the step is scheduled
        self._num_step_drafts = 0  # draft tokens among them

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._max_model_len

    @property
    def max_rollback(self) -> int | None:
        """Tokens that can be taken back of a sequence at most; None for any number."""
        return self._runner.max_rollback

    def last_progress(self) -> float:
        """Monotonic time at which the newest layer of a step was done; from any thread."""
        return self._runner.progress.newest_s

    def _in_parts(
        self,
        step: Callable[[Sequence[J]], list[R]],
        jobs: Sequence[J],
        *,
        waiting: R,
        suspect: Callable[[str], R],
    ) -> list[R]:
        """Run a step, and with fewer tokens where memory runs out (rule 16).

        Args:
            step: Gives a result for each job. Sets ``self._step`` and ``self._num_step_drafts``.
            jobs: Of the step.
            waiting: The result of a job that has not been tried.
            suspect: The result of the job whose step ran out of memory with a single token in it, by the reason.
        """
        with device_losses():
            while True:
                self._step = {}  # what fails before this step is scheduled is not the step before's
                try:
                    return step(jobs)
                except Exception as error:
                    if not is_out_of_memory(error) or not self._step:
                        raise
                    reason = reason_of(error)
                torch.cuda.empty_cache()  # after the block, whose traceback holds the step's tensors
                if not self._scheduler.shrink(sum(self._step.values()), self._num_step_drafts, reason):
                    return [suspect(f"out of memory: {reason}") if job.key in self._step else waiting for job in jobs]
