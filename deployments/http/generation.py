"""The sequences of one request, generated side by side."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType

from deployments.http.api import Api
from deployments.http.job import Job
from deployments.http.observer import Reason, SequenceObserver
from deployments.http.service import SequenceRequest
from deployments.http.tally import RoundTally
from specdec.audition.recording import Sample
from specdec.core.messages import Notes, Plan
from specdec.core.types import Finish, PromptLogprobs, TokenLogprobs, Tokens
from specdec.protocol.ingress import TokenDelta
from specdec.text.detokenizer import OutputText

_MOST_QUEUED = 256


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose log probability is reported.

    Attributes:
        offset: Number of characters of the choice's text before it.
    """

    token: int
    offset: int
    entry: TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """What is new in one choice.

    Attributes:
        index: Of the choice.
        text: New text.
        token_ids: New tokens, as billed.
        logprobs: If asked for, the tokens that begin within the text up to here, and were not reported before: a
            token that may yet complete a stop string waits, and one that has is left out.
        finish: Why the choice ended, if it did.
        stop_reason: The stop string or the stop token id that ended it, if one did.
        prompt_logprobs: In the first piece of a choice, if asked for.
        notes: How ``token_ids`` came, if asked for.
        plan: By which the choice is drafted now, where somebody says.
        recording: The whole choice, with its end, if asked for.
    """

    index: int
    text: str
    token_ids: Tokens
    logprobs: tuple[ShownToken, ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    notes: Notes | None = None
    plan: Plan | None = None
    recording: Sample | None = None

    def __add__(self, later: SampleDelta) -> SampleDelta:
        """Two pieces of the same choice as one."""
        return SampleDelta(
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            (self.logprobs or ()) + later.logprobs if later.logprobs is not None else self.logprobs,
            later.finish,
            later.stop_reason,
            self.prompt_logprobs,
            (self.notes or Notes()) + later.notes if later.notes is not None else self.notes,
            later.plan or self.plan,
            later.recording or self.recording,
        )


class JoinedDeltas:
    """All pieces of one choice as one.

    Adding two pieces copies both. A piece is added to the one before it only when that has no more tokens, so a token
    is copied about as often as the number of tokens can be halved.
    """

    def __init__(self) -> None:
        self._runs: list[SampleDelta] = []

    def append(self, delta: SampleDelta) -> None:
        """Take the next piece."""
        while self._runs and len(self._runs[-1].token_ids) <= len(delta.token_ids):
            delta = self._runs.pop() + delta
        self._runs.append(delta)

    def pop(self) -> SampleDelta:
        """Give up the whole choice, which has at least one piece."""
        whole = self._runs.pop()
        while self._runs:
            whole = self._runs.pop() + whole
        return whole


class Generation:
    """Runs a job's sequences: an asynchronous context, inside which it iterates over what comes, as it comes.

    Entering waits until the first of the sequences has begun, or raises what was said of any until then: what fails
    later is raised by the iteration. Leaving cancels every sequence that has not ended, and returns when the service
    knows.

    Attributes:
        job: What is generated.
        num_completion_tokens: Tokens billed so far, over all choices.
        num_cached_tokens: Prompt tokens that were not read, each prompt counted once: for its first choice.
        tallies: What speculation did, by choice.
    """

    def __init__(self, api: Api, job: Job) -> None:
        self.job = job
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.tallies = [RoundTally() for _ in job.sequences]
        self._counters = [job.new_counter() for _ in job.sequences] if job.new_counter is not None else []
        self._api = api
        self._keeps = (
            api.recordings is not None
            and job.body.may_be_kept
            and job.body.shows_output
            and api.recordings.keeps(job.context.stats.key)
        )
        self._num_open = len(job.sequences)
        self._has_begun = False
        self._queue: asyncio.Queue[SampleDelta | Exception] = asyncio.Queue(_MOST_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._observers: dict[int, SequenceObserver] = {}
        self._prompts_read: list[asyncio.Future[PromptLogprobs]] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of the tokens billed that are reasoning."""
        return sum(counter.num_tokens for counter in self._counters)

    async def __aenter__(self) -> Generation:
        loop = asyncio.get_running_loop()
        admissions: list[asyncio.Future[None]] = []
        self._prompts_read = [loop.create_future() for _ in self.job.prompts]
        for index, request in enumerate(self.job.sequences):
            admitted = loop.create_future()
            admissions.append(admitted)
            self._tasks.append(asyncio.create_task(self._run(index, request, admitted)))
        try:
            async with self.job.context.waiting(to_begin=True):
                begun, _ = await asyncio.wait(admissions, return_when=asyncio.FIRST_COMPLETED)
            for admission in begun:
                admission.result()
        except BaseException:
            await self._cancel()
            raise
        self._has_begun = True
        for prompt in self.job.prompts:
            self._api.observer.prompt_tokens(self.job.model.label, self.job.context.stats.key, len(prompt))
            self.job.context.stats.num_prompt_tokens += len(prompt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cancel()
        for observer in self._observers.values():
            observer.left()

    def delivered(self, index: int, num_tokens: int) -> None:
        """Tokens of a choice were written into the answer: what never is counts as discarded."""
        self._observers[index].delivered(num_tokens)

    def forget_prompts(self) -> None:
        """Drop the log probabilities of the prompts: every choice has them."""
        self._prompts_read.clear()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> SampleDelta:
        if not self._num_open:
            raise StopAsyncIteration
        async with self.job.context.waiting(to_begin=False):
            item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._num_open -= item.finish is not None
        self.num_completion_tokens += len(item.token_ids)
        if self._counters:
            self._counters[item.index].push(item.token_ids)
        return item

    async def _cancel(self) -> None:
        if self._num_open:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, request: SequenceRequest, admitted: asyncio.Future[None]) -> None:
        """Generate one sequence to its end; errors go to whoever waits."""
        age_s = time.monotonic() - self.job.context.clock_s + self.job.context.waited_s
        observer = self._api.observer.opened(self.job.model.label, self.job.context.stats.key, age_s)
        self._observers[index] = observer
        reason: Reason = "abort"
        try:
            reason = await self._pump(index, request, admitted, observer)
        except Exception as error:
            reason = "error"
            if admitted.done() or self._has_begun:
                await self._queue.put(error)
            else:
                admitted.set_exception(error)
                admitted.exception()  # known: who waits may have gone already, because of another's
        finally:
            observer.closed(reason)
            self._note(index, reason)

    def _note(self, index: int, reason: Reason) -> None:
        """Add a sequence that has ended to what is known of its request."""
        stats, tally = self.job.context.stats, self.tallies[index]
        stats.num_draft_tokens += tally.num_draft_tokens
        stats.num_accepted_tokens += tally.num_accepted_tokens
        stats.finish[reason] = None

    async def _pump(
        self, index: int, request: SequenceRequest, admitted: asyncio.Future[None], observer: SequenceObserver
    ) -> Finish:
        """Turn a sequence's tokens into text, until its end or that of its text."""
        spec = request.spec
        with_offsets = self.job.body.num_logprobs is not None
        output = OutputText(
            self._api.tokenizer,
            self.job.prompts[index // self.job.num_samples],
            spec,
            self.job.stops,
            self.job.body.skip_special_tokens is not False,
            tells_offsets=with_offsets,
            includes_stop=bool(self.job.body.include_stop_str_in_output),
            kept=self.job.kept,
        )
        unshown: deque[ShownToken] = deque()
        said: list[int] | None = [] if self._keeps or self.job.body.return_recording else None
        tells_of_prompt = self.job.body.num_prompt_logprobs is not None
        stats = self.job.context.stats
        async with aclosing(self._api.service.open(request)) as deltas:
            async for delta in deltas:
                if not admitted.done():
                    observer.admitted()
                    admitted.set_result(None)
                if delta.tokens and stats.first_token_s is None:
                    stats.first_token_s = time.monotonic()
                if not delta.tokens and delta.finish is None:
                    continue
                if stats.reservation is not None:
                    stats.reservation.generated(len(delta.tokens))
                if index % self.job.num_samples == 0:
                    self.num_cached_tokens += delta.notes.num_cached_tokens
                observer.prompt_read(len(request.prompt), delta.notes.num_cached_tokens)
                piece = self._piece(index, delta, output, unshown, observer)
                if tells_of_prompt:
                    piece = replace(piece, prompt_logprobs=await self._prompt_read(index, delta.notes))
                    tells_of_prompt = False
                if said is not None:
                    said += piece.token_ids
                    if piece.finish is not None:
                        piece = self._recorded(piece, piece.finish, request, said)
                await self._queue.put(piece)
                if piece.finish is not None:
                    return piece.finish
        raise RuntimeError("the service ended a sequence without a reason")

    def _piece(
        self,
        index: int,
        delta: TokenDelta,
        output: OutputText,
        unshown: deque[ShownToken],
        observer: SequenceObserver,
    ) -> SampleDelta:
        """The text of a delta, and what is to be counted of it."""
        if not self.job.body.shows_output:
            return self._unseen(index, delta, observer)
        text = output.push(delta.tokens, delta.finish)
        num_billed = text.num_billed
        logprobs = delta.notes.logprobs if self.job.body.num_logprobs is not None else None
        unshown.extend(map(ShownToken, delta.tokens, text.offsets, logprobs or ()))
        shown = tuple(unshown.popleft() for _ in range(text.num_shown if unshown else 0))
        rounds = self.tallies[index].add(delta.notes)
        self.tallies[index].plan = delta.plan or self.tallies[index].plan
        if delta.tokens:
            observer.tokens(num_billed, len(delta.tokens) - num_billed, rounds)
            self.job.context.stats.num_completion_tokens += num_billed
        return SampleDelta(
            index,
            text.text,
            delta.tokens[:num_billed],
            shown if shown or logprobs is not None else None,
            text.finish,
            text.stop_reason,
            notes=delta.notes.first(num_billed) if self.job.body.wants_speculation else None,
            plan=self.tallies[index].plan,
        )

    def _recorded(self, piece: SampleDelta, finish: Finish, request: SequenceRequest, said: list[int]) -> SampleDelta:
        """Keep a choice that has ended, and tell it if asked for."""
        stats, spec = self.job.context.stats, request.spec
        tokens = tuple(request.prompt), tuple(said)
        sample = Sample.of_sequence(spec, *tokens, finish, stats.key, self.job.fingerprint)
        if self._keeps and self._api.recordings is not None:
            self._api.recordings.add(sample)
        return replace(piece, recording=sample) if self.job.body.return_recording else piece

    def _unseen(self, index: int, delta: TokenDelta, observer: SequenceObserver) -> SampleDelta:
        """The whole choice where only its prompt is of interest: nothing of a delta is shown or billed."""
        observer.tokens(0, len(delta.tokens), self.tallies[index].add(delta.notes))
        return SampleDelta(index, "", (), None if delta.notes.logprobs is None else (), "length")

    async def _prompt_read(self, index: int, notes: Notes) -> PromptLogprobs:
        """The log probabilities of a choice's prompt; they come with the first tokens of the prompt's first sample."""
        prompt, sample = divmod(index, self.job.num_samples)
        if sample == 0:
            if notes.prompt_logprobs is None:
                raise RuntimeError("the service left out the log probabilities of a prompt")
            logprobs = notes.prompt_logprobs
            self._prompts_read[prompt].set_result(await self._api.write(len(logprobs), logprobs.unpack))
        return await self._prompts_read[prompt]
