"""A target over vLLM: one call of ``verify`` is one step of a vLLM engine that this process drives.

vLLM keeps the model, the paged cache, prefix reuse, chunked prompts and preemption. Three things are taken from it,
without a patch:

- *Who runs.* The four parts of a step (schedule, execute, sample, update) are called one by one. A request without a
  job is held back by ``Request.next_decode_eligible_step``; it keeps its blocks.
- *Drafts.* Speculation is switched on with a proposer that proposes nothing; before a step its drafts are given to
  ``Scheduler.update_draft_token_ids``, each as long as it is.
- *Tokens.* :class:`specdec.engine.vllm.target.AcceptanceSampler` decides them, in the workers.

A step begins when the tokens of the one before are known: there is no asynchronous scheduling. The runner is V1, as V2,
vLLM's default on GPUs, takes neither such a proposer nor the drafts of ``SchedulerOutput``. A port would carry them by
``method: ngram``, write them to ``req_states.draft_tokens``, and replace both of its samplers.

Our rule in the place of vLLM's rejection sampler, in each of its workers. Imports nothing of vLLM's but its output.

With speculation on, vLLM's V1 runner gives the logits of all rows of a step to ``GPUModelRunner.rejection_sampler``
(``vllm/v1/worker/gpu_model_runner.py``, ``_sample``). With tensor parallelism every worker has all logits, and must
decide alike: noise and masks depend on the log alone, so they do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus

from specdec.core.backends import Status, Verification, VerifyJob
from specdec.core.errors import NOT_FINITE, DeviceLostError, reason_of
from specdec.core.log import PrefixHash
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenBuffer, common_prefix_length
from specdec.core.types import PromptLogprobs, TokenLogprobs, Tokens
from specdec.engine.target import as_chain, with_allowed_draft
from specdec.engine.vllm.checks import require
from specdec.kernels.device_errors import device_losses
from specdec.sampling.acceptance import decide
from specdec.sampling.pipeline import LogitsProcessor, RowGroup, Sampler
from specdec.sampling.rows import Rows

SPEC = "specdec"
"""Where a request's ``SequenceSpec`` travels in vLLM's sampling parameters (``extra_args``)."""
NO_TOKEN = -1
"""What fills drafts up, in vLLM's scheduler and in ours."""


class StepInputs(NamedTuple):
    """What the workers need to know of a request in a step, beside what vLLM sends them.

    Attributes:
        mask: Of its grammar: see :class:`specdec.sampling.rows.RowGroup`.
    """

    mask: Tensor | None = None


class Reported(NamedTuple):
    """What a worker reports of a request after a step, beside its tokens.

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
        sampler: Without grammars: their masks come with each step.
    """

    def __init__(self, runner: Any, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._logs: dict[str, tuple[Any, TokenBuffer]] = {}
        self.inputs: dict[str, StepInputs] = {}
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
                mask = self.inputs[req_id].mask if req_id in self.inputs else None
                places.append(i)
                groups.append(RowGroup(self._spec(req_id), self._log(req_id).array, tuple(draft[:num_drafted]), mask))
                rows.extend(range(first, first + 1 + num_drafted))
            first += 1 + count
        return places, groups, rows

    def _decide(self, logits: Tensor, req_ids: list[str], groups: list[RowGroup]) -> list[Sequence[int]]:
        """The run of each group; what is to be reported of it is kept."""
        is_finite = logits.amax(1).isfinite()
        logits = logits.where(is_finite[:, None], 0.0)
        runs, reports, flags = decide(self._sampler, logits, groups, is_finite)
        failures = self._sampler.take_failures()
        rows = Rows(groups)
        for group, start, count in zip(groups, rows.starts, rows.counts, strict=True):
            if not flags[start : start + count].all():
                failures[id(group)] = ValueError(NOT_FINITE)
        for req_id, group, logprobs in zip(req_ids, groups, reports, strict=True):
            failure = reason_of(failures[id(group)]) if id(group) in failures else ""
            if logprobs is not None or failure:
                self.reported[req_id] = Reported(logprobs, failure)
        return [result.run for result in runs]

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

    def specdec_set_inputs(self, inputs: dict[str, StepInputs]) -> None:
        """What is to be known in the next step, by request."""
        self.model_runner.rejection_sampler.inputs = inputs

    def specdec_reports(self) -> dict[str, Reported]:
        """What the last step has to report, by request."""
        rule: AcceptanceSampler = self.model_runner.rejection_sampler
        reported, rule.reported = rule.reported, {}
        return reported


_NEVER = 1 << 62
_WAITING = Verification(Status.WAITING)
_PREFILLING = Verification(Status.PREFILLING)


class _Held(NamedTuple):
    """A sequence that vLLM knows.

    Attributes:
        prefix_hash: Of the log of its last job.
        run: What was decided after that.
        num_cached: How many tokens of its log were cached as it was begun.
    """

    request: Request
    prefix_hash: PrefixHash
    run: Tokens = ()
    num_cached: int = 0


class VllmTarget:
    """A :class:`specdec.core.backends.TargetBackend` over a vLLM engine in this process.

    vLLM changes the process: its collector, its torch threads and its seeds. One engine a process, and no draft beside.

    Args:
        core: The engine, with the rule's extension in its workers.
        sampler: Whose grammars all masks come from.
        processors: Hooks that the workers call.
        max_draft: Most draft tokens of one job; longer drafts are cut.
        fills_up: Every job is forwarded as if it had ``max_draft`` draft tokens.

    Raises:
        ModelLoadError: This vLLM lacks what we rest on.
    """

    def __init__(
        self,
        core: EngineCore,
        sampler: Sampler,
        processors: tuple[LogitsProcessor, ...] = (),
        *,
        max_draft: int,
        fills_up: bool = False,
    ) -> None:
        self._core = core
        self._scheduler: Any = core.scheduler
        _check_names(core)
        self._sampler = sampler
        self._processors = processors
        self._max_draft = max_draft
        self._fills_up = fills_up
        self._held: dict[str, _Held] = {}
        self._num_opened = self._num_evictions = self._num_reused_tokens = 0
        self._install()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        length: int = self._scheduler.max_model_len
        return length

    def metrics(self) -> dict[str, float]:
        """What is held now, for the worker's report."""
        pool = self._scheduler.kv_cache_manager.block_pool
        figures = {
            "num_cached_sequences": float(len(self._scheduler.running)),
            "num_reused_tokens": float(self._num_reused_tokens),
            "num_evictions": float(self._num_evictions),
            "kv_blocks_in_use": float(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()),  # one is nobody's
            "kv_cache_usage_perc": float(pool.get_usage()),
        }
        if self._sampler.matchers is not None:
            figures["num_forbidden_draft_tokens"] = float(self._sampler.matchers.num_forbidden_draft_tokens)
        return figures

    def release(self, key: str) -> None:
        """Free what is held for a sequence; its full blocks stay for reuse until they are needed."""
        held = self._held.pop(key, None)
        if held is not None:
            self._core.abort_requests([held.request.request_id])

    def close(self) -> None:
        """End the engine and its workers."""
        self._core.shutdown()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step over a ragged batch; see :meth:`specdec.core.backends.TargetBackend.verify`."""
        with device_losses():
            try:
                return self._verify(jobs)
            except Exception as error:
                self._start_over(error)
                raise

    def _verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = {job.key: _WAITING for job in jobs}
        within = [job.within(self._sampler.vocab_size) for job in jobs if self._sampler.is_ready(job.spec)]
        able = [with_allowed_draft(self._sampler, as_chain(job)) for job in within]
        able = able[: self._scheduler.max_num_running_reqs]
        requests = self._requests(able)
        self._give_drafts(able, requests)
        scheduled: SchedulerOutput = self._scheduler.schedule()
        self._num_evictions += len(scheduled.preempted_req_ids or ())
        self._note_cached(scheduled)
        drafts = {req_id: _unfilled(draft) for req_id, draft in scheduled.scheduled_spec_decode_tokens.items()}
        failures = self._tell(able, requests, scheduled, drafts)
        output = self._execute(scheduled)
        self._scheduler.update_from_output(scheduled, output)  # takes back the positions of refused tokens
        reports = self._reports(able)
        for job, request in zip(able, requests, strict=True):
            req_id = request.request_id
            if req_id in scheduled.num_scheduled_tokens:
                report = reports.get(req_id, Reported())
                result = self._result(job, request, output, drafts.get(req_id, ()), report)
                reason = failures.get(job.key) or report.failure
                results[job.key] = Verification(Status.FAILED, reason=reason) if reason else result
        self._yield_room(able, requests, scheduled)
        return [results[job.key] for job in jobs]

    def _requests(self, jobs: Sequence[VerifyJob]) -> list[Request]:
        """Those of the jobs, at their logs, and in vLLM's order; all others are held back, or let go."""
        keys = {job.key for job in jobs}
        num_places = self._scheduler.max_num_running_reqs - len(keys)
        idle = sorted((key for key in self._held if key not in keys), key=self._rank)
        for place, key in enumerate(idle):
            request = self._held[key].request
            request.next_decode_eligible_step = _NEVER
            if place >= num_places or request.status != RequestStatus.RUNNING:
                self.release(key)
        requests = [self._at_log(job) for job in jobs]
        for request in requests:
            request.next_decode_eligible_step = 0
        # The budget is spent in this order: who decodes goes first.
        self._scheduler.running.sort(key=lambda one: (one.is_prefill_chunk, *_order(one)))
        return requests

    def _rank(self, key: str) -> tuple[int, float, str]:
        return _order(self._held[key].request)

    def _at_log(self, job: VerifyJob) -> Request:
        """The request whose tokens are the job's log: the one held, or a new one where that says something else."""
        held = self._held.get(job.key)
        if held is not None and not held.request.is_finished() and job.log.since(held.prefix_hash) == held.run:
            return held.request
        self.release(job.key)
        self._num_opened += 1
        request = Request(
            request_id=f"{job.key}#{self._num_opened}",
            prompt_token_ids=job.log.tokens.tolist(),
            sampling_params=self._sampling_params(job),
            pooling_params=None,
            arrival_time=job.spec.arrival_s,
            priority=job.spec.order[0],  # no owner's passes another's: vLLM does not take owners in turn
            cache_salt=job.spec.cache_salt or None,
            block_hasher=self._core.request_block_hasher,
        )
        self._core.add_request(request)
        self._held[job.key] = _Held(request, job.log.prefix_hash())
        return request

    def _sampling_params(self, job: VerifyJob) -> VllmSamplingParams:
        """Greedy, as this costs vLLM nothing and has no effect."""
        is_prompt = len(job.log) == job.spec.output_start
        return VllmSamplingParams(
            temperature=0.0,
            max_tokens=self.max_model_len,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=job.spec.sampling.prompt_logprobs if is_prompt else None,
            extra_args={SPEC: job.spec},
        )

    def _give_drafts(self, jobs: Sequence[VerifyJob], requests: Sequence[Request]) -> None:
        """Drafts for those that decode: who is only now admitted takes none. Where the budget is short, short ones."""
        decoding = [
            (request.request_id, job.draft[: self._max_draft])
            for job, request in zip(jobs, requests, strict=True)
            if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk
        ]
        if self._fills_up:
            drafts = {key: [*draft, *[NO_TOKEN] * (self._max_draft - len(draft))] for key, draft in decoding}
        else:
            left = self._scheduler.max_num_scheduled_tokens - len(decoding)
            # Prompts have half of it where they have need of it.
            left = max(0, left - (left + 1) // 2 if len(decoding) < len(jobs) else left)
            drafts = {}
            for place, (key, draft) in enumerate(sorted(decoding, key=lambda one: len(one[1]))):
                drafts[key] = list(draft[: left // (len(decoding) - place)])
                left -= len(drafts[key])
        self._scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _note_cached(self, scheduled: SchedulerOutput) -> None:
        cached = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._num_reused_tokens += sum(cached.values())
        for key, held in self._held.items():
            if held.request.request_id in cached:
                self._held[key] = held._replace(num_cached=cached[held.request.request_id])

    def _tell(
        self,
        jobs: Sequence[VerifyJob],
        requests: Sequence[Request],
        scheduled: SchedulerOutput,
        drafts: dict[str, Tokens],
    ) -> dict[str, str]:
        """Give the workers masks; return why a job's mask cannot be had, by its key."""
        deciding = [
            (job, request.request_id)
            for job, request in zip(jobs, requests, strict=True)
            if request.request_id in scheduled.num_scheduled_tokens and not request.is_prefill_chunk
        ]
        groups = [RowGroup(job.spec, job.log.tokens, drafts.get(req_id, ())) for job, req_id in deciding]
        groups = self._sampler.masked(groups)
        errors = self._sampler.take_failures()
        inputs = {
            req_id: StepInputs(group.mask)
            for (_, req_id), group in zip(deciding, groups, strict=True)
            if group.mask is not None
        }
        if inputs:
            self._core.collective_rpc("specdec_set_inputs", args=(inputs,))
        failed = ((job.key, group) for (job, _), group in zip(deciding, groups, strict=True) if id(group) in errors)
        return {key: reason_of(errors[id(group)]) for key, group in failed}

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        executor = self._core.model_executor
        output = executor.execute_model(scheduled)
        if output is None:  # there was something to run, and its logits wait in the workers
            output = executor.sample_tokens(self._scheduler.get_grammar_bitmask(scheduled))
        return output

    def _reports(self, jobs: Sequence[VerifyJob]) -> dict[str, Reported]:
        if not self._processors and all(job.spec.sampling.logprobs is None for job in jobs):
            return {}
        reports: dict[str, Reported] = self._core.collective_rpc("specdec_reports")[0]
        return reports

    def _result(
        self, job: VerifyJob, request: Request, output: ModelRunnerOutput, draft: Tokens, report: Reported
    ) -> Verification:
        run = tuple(output.sampled_token_ids[output.req_id_to_index[request.request_id]])
        if not run:
            return _PREFILLING
        held = self._held[job.key]
        if request.is_finished():  # vLLM ends what has reached the greatest length
            del self._held[job.key]
        else:
            self._held[job.key] = held._replace(prefix_hash=job.log.prefix_hash(), run=run)
        logprobs = output.prompt_logprobs_dict.get(request.request_id)
        return Verification(
            Status.DECIDED,
            run,
            common_prefix_length(draft, run),
            len(draft),
            report.logprobs,
            None if logprobs is None else _prompt_logprobs(logprobs, job.spec.sampling.prompt_logprobs or 0),
            held.num_cached if len(job.log) == job.spec.output_start else 0,
            is_forced=job.source == "" and len(draft) > 0,
        )

    def _yield_room(self, jobs: Sequence[VerifyJob], requests: Sequence[Request], scheduled: SchedulerOutput) -> None:
        """Whoever came last lets go of its blocks where somebody waits: vLLM does so for running ones alone."""
        budget_left = self._scheduler.max_num_scheduled_tokens - scheduled.total_num_scheduled_tokens
        if scheduled.preempted_req_ids or budget_left <= self._max_draft:
            return
        keys = (job.key for job, one in zip(jobs, requests, strict=True) if one.status != RequestStatus.RUNNING)
        waiting = next((key for key in keys if key in self._held), None)
        running = [key for key, held in self._held.items() if held.request.status == RequestStatus.RUNNING]
        last = max(running, key=self._rank, default=None)
        if waiting is not None and last is not None and self._rank(last) > self._rank(waiting):
            self.release(last)
            self._num_evictions += 1

    def _start_over(self, error: Exception) -> None:
        """A step failed: blocks that it should have filled count as cached already, so nothing may be reused.

        Raises:
            DeviceLostError: The engine can no longer be used.
        """
        try:
            for key in list(self._held):
                self.release(key)
            if not self._scheduler.reset_prefix_cache():
                raise RuntimeError("somebody still holds blocks of its cache")
            self._install()
        except Exception as lost:
            raise DeviceLostError(f"vLLM can no longer be used: {reason_of(lost)}, after {reason_of(error)}") from lost

    def _install(self) -> None:
        self._core.collective_rpc("specdec_install", args=(self._sampler.vocab_size, self._processors))


def _order(request: Request) -> tuple[int, float, str]:
    """Requests with the least go first, as in vLLM's own queue."""
    return request.priority, request.arrival_time, request.request_id


def _check_names(core: EngineCore) -> None:
    """Check everything that we rest on in this process; the workers check their own."""
    require(core, "add_request", "abort_requests", "request_block_hasher", "collective_rpc", "shutdown")
    require(core.model_executor, "execute_model", "sample_tokens")
    methods = ("schedule", "update_from_output", "update_draft_token_ids", "reset_prefix_cache", "get_grammar_bitmask")
    require(core.scheduler, *methods, "running", "max_model_len", "max_num_running_reqs", "max_num_scheduled_tokens")
    require(core.scheduler.kv_cache_manager.block_pool, "num_gpu_blocks", "get_num_free_blocks", "get_usage")
    request = Request("", [0], VllmSamplingParams(max_tokens=1), None, arrival_time=time.time())
    require(request, "next_decode_eligible_step", "is_prefill_chunk", "arrival_time", "priority", "status")


def _unfilled(draft: Sequence[int]) -> Tokens:
    return tuple(draft[: num_filled(draft)])


def _prompt_logprobs(found: LogprobsTensors, num_top: int) -> PromptLogprobs:
    """In each of vLLM's rows the token that stands there comes first, then the likeliest."""
    rows = zip(
        found.logprob_token_ids.tolist(), found.logprobs.tolist(), found.selected_token_ranks.tolist(), strict=True
    )
    return (
        None,
        *(
            TokenLogprobs(values[0], rank, tuple(zip(ids[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)))
            for ids, values, rank in rows
        ),
    )
