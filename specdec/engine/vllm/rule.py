"""Our rules in the place of vLLM's rejection sampler, in each of its workers. Imports nothing of vLLM's but its output.

With speculation on, vLLM's V1 runner gives the logits of all rows of a step to ``GPUModelRunner.rejection_sampler``
(``vllm/v1/worker/gpu_model_runner.py``, ``_sample``). With tensor parallelism every worker has all logits, and must
decide alike: noise and masks depend on the log alone, so they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from specdec.core.errors import NOT_FINITE, reason_of
from specdec.core.messages import Candidates
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenBuffer
from specdec.core.types import TokenLogprobs
from specdec.engine.vllm.checks import require
from specdec.sampling.acceptance import verify
from specdec.sampling.pipeline import LogitsProcessor, RowGroup, Sampler

SPEC = "specdec"
"""Where a request's ``SequenceSpec`` travels in vLLM's sampling parameters (``extra_args``)."""
NO_TOKEN = -1
"""What fills drafts up, in vLLM's scheduler and in ours."""


class Told(NamedTuple):
    """What the workers are told of a request before a step, where there is something.

    Attributes:
        candidates: Under the rejection rule, what each draft token was drawn from.
        mask: Of its grammar: see :class:`specdec.sampling.rows.RowGroup`.
    """

    candidates: tuple[Candidates, ...] = ()
    mask: Tensor | None = None


class Reported(NamedTuple):
    """What a worker tells of a request after a step, beside its tokens.

    Attributes:
        logprobs: One entry per token, if the request asked for them.
        failure: What a logits processor has raised; its tokens then mean nothing.
    """

    logprobs: tuple[TokenLogprobs, ...] | None = None
    failure: str = ""


class NoDrafts:
    """vLLM's proposer (``method: custom_class``): drafts come from elsewhere."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Nothing, for each row of the batch."""
        return [[] for _ in sampled_token_ids]


class AcceptanceSampler:
    """Decides all tokens of a step; called in the place of vLLM's ``RejectionSampler``.

    It decides every token of a request, so it keeps the request's log itself.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V1), or its ``CPUModelRunner``.
        sampler: Without grammars: their masks are told.
    """

    def __init__(self, runner: Any, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._logs: dict[str, tuple[Any, TokenBuffer]] = {}
        self.told: dict[str, Told] = {}
        self.reported: dict[str, Reported] = {}

    def __call__(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Decide for each request of the batch that has read its log.

        Args:
            metadata: vLLM's ``SpecDecodeMetadata``: how many draft tokens each request has.
            draft_probs: vLLM's; there are none.
            logits: [N, V]: one row more for each request than it has draft tokens, in the batch's order.
            sampling_metadata: vLLM's; nothing in it counts.

        Returns:
            int32 [requests, 1 + most draft tokens] on the CPU, filled up with -1.
        """
        req_ids: list[str] = self._runner.input_batch.req_ids
        counts: list[int] = metadata.num_draft_tokens
        self._forget()
        places, groups, rows = self._groups(req_ids, counts)
        tokens = torch.full((len(req_ids), 1 + max(counts)), NO_TOKEN, dtype=torch.int32)
        if groups:
            logits = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
            runs = self._decide(logits.float(), [req_ids[i] for i in places], groups)
            for i, run in zip(places, runs, strict=True):
                tokens[i, : len(run)] = torch.tensor(run, dtype=torch.int32)
                self._log(req_ids[i]).extend(run)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def _groups(self, req_ids: list[str], counts: list[int]) -> tuple[list[int], list[RowGroup], list[int]]:
        """Places of the requests that decide, their groups, and the numbers of their rows."""
        places: list[int] = []
        groups: list[RowGroup] = []
        rows: list[int] = []
        first = 0
        for i, (req_id, count) in enumerate(zip(req_ids, counts, strict=True)):
            if not self._runner.discard_request_mask.np[i]:  # else it still reads its log
                draft = self._runner.input_batch.spec_token_ids[i]
                num_drafted = num_filled(draft)
                mask = self.told[req_id].mask if req_id in self.told else None
                places.append(i)
                groups.append(RowGroup(self._spec(req_id), self._log(req_id).array, tuple(draft[:num_drafted]), mask))
                rows.extend(range(first, first + 1 + num_drafted))
            first += 1 + count
        return places, groups, rows

    def _decide(self, logits: Tensor, req_ids: list[str], groups: list[RowGroup]) -> list[Sequence[int]]:
        """The run of each group; what is to be told of it is kept."""
        is_finite = logits.amax(1).isfinite()
        logits = logits.where(is_finite[:, None], 0.0)
        told = [self.told.get(req_id, Told()) for req_id in req_ids]
        drawn = [one.candidates[: len(group.draft)] for one, group in zip(told, groups, strict=True)]
        runs: list[Sequence[int]] = [result.run for result in verify(self._sampler, logits, groups, drawn)]
        failures = self._sampler.take_failures()
        parts = is_finite.cpu().split_with_sizes([1 + len(group.draft) for group in groups])
        for group, part in zip(groups, parts, strict=True):
            if not part.all():
                failures[id(group)] = ValueError(NOT_FINITE)
        for req_id, group, logprobs in zip(req_ids, groups, self._sampler.logprobs(logits, groups, runs), strict=True):
            failure = reason_of(failures[id(group)]) if id(group) in failures else ""
            if logprobs is not None or failure:
                self.reported[req_id] = Reported(logprobs, failure)
        return runs

    def _spec(self, req_id: str) -> SequenceSpec:
        spec: SequenceSpec = self._runner.requests[req_id].sampling_params.extra_args[SPEC]
        return spec

    def _log(self, req_id: str) -> TokenBuffer:
        state = self._runner.requests[req_id]
        known = self._logs.get(req_id)
        if known is None or known[0] is not state:
            known = self._logs[req_id] = (state, TokenBuffer([*state.prompt_token_ids, *state.output_token_ids]))
        return known[1]

    def _forget(self) -> None:
        """Drop the logs of requests that have ended, now and then."""
        if len(self._logs) > 2 * len(self._runner.requests) + 8:
            self._logs = {key: kept for key, kept in self._logs.items() if key in self._runner.requests}


def num_filled(draft: Sequence[int]) -> int:
    """How many tokens of a draft are not there to fill it up."""
    return draft.index(NO_TOKEN) if NO_TOKEN in draft else len(draft)


class RuleExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); called by ``collective_rpc`` on every worker."""

    model_runner: Any

    def specdec_install(self, vocab_size: int, processors: tuple[LogitsProcessor, ...]) -> None:
        """Put the rule where vLLM's own was; also after a failed step, whose logits may still be waiting.

        Raises:
            ModelLoadError: This vLLM has another runner.
        """
        require(self.model_runner, "rejection_sampler", "execute_model_state", "discard_request_mask", "requests")
        require(self.model_runner.input_batch, "req_ids", "spec_token_ids")
        self.model_runner.execute_model_state = None
        self.model_runner.rejection_sampler = AcceptanceSampler(self.model_runner, Sampler(vocab_size, processors))

    def specdec_tell(self, told: dict[str, Told]) -> None:
        """What is to be known in the next step, by request."""
        self.model_runner.rejection_sampler.told = told

    def specdec_reports(self) -> dict[str, Reported]:
        """What the last step has to tell, by request."""
        rule: AcceptanceSampler = self.model_runner.rejection_sampler
        reported, rule.reported = rule.reported, {}
        return reported
