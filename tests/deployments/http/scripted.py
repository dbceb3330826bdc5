"""A token service that follows a script, for tests of whatever stands before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from deployments.http.service import ModelInfo, SequenceRequest
from specdec.core.messages import Notes
from specdec.core.types import Finish, PackedLogprobs, PromptLogprobs, TokenLogprobs
from specdec.protocol.ingress import TokenDelta
from tests.letters import provenance

Step = TokenDelta | asyncio.Event | Exception
"""Send this, wait for this, or fail with this."""


class ScriptedService:
    """Answers every sequence with the steps that ``script`` gives for it.

    What a script tells of a prompt reaches only sequences that asked for it, as it would from a target.

    Attributes:
        opened: Requests in the order they came.
        cancelled: Sequences that were closed before their end.
        unhealthy: Raised by ``model_info`` and ``check_health`` while set.
    """

    def __init__(self, info: ModelInfo, script: Callable[[SequenceRequest], Iterable[Step]]) -> None:
        self._info = info
        self._script = script
        self.opened: list[SequenceRequest] = []
        self.cancelled: list[str] = []
        self.unhealthy: Exception | None = None

    def model_info(self) -> ModelInfo:
        """The info given."""
        if self.unhealthy is not None:
            raise self.unhealthy
        return self._info

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Follow the script."""
        self.opened.append(request)
        ended = False
        try:
            for step in self._script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    ended = True
                    raise step
                else:
                    ended = step.finish is not None
                    yield step if request.spec.sampling.prompt_logprobs is not None else _without_prompt(step)
        finally:
            if not ended:
                self.cancelled.append(request.seq)

    def check_health(self) -> None:
        """Fail while ``unhealthy`` is set."""
        self.model_info()

    async def check_ready(self) -> None:
        """As ``check_health``."""
        self.check_health()


def rounds(
    tokens: Sequence[int],
    size: int = 1,
    finish: Finish = "stop",
    logprobs: Sequence[TokenLogprobs] | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
) -> list[TokenDelta]:
    """Cut tokens into rounds of at most ``size``, all but the last of each drafted and accepted."""
    deltas = []
    for start in range(0, len(tokens), size):
        run = tuple(tokens[start : start + size])
        how = "a" * (len(run) - 1) + ("b" if len(run) > 1 else "p")
        num_drafted = (0,) * (len(run) - 1) + (len(run) - 1,)
        of_run = None if logprobs is None else tuple(logprobs[start : start + len(run)])
        last = start + size >= len(tokens)
        told = None if start or prompt_logprobs is None else PackedLogprobs.pack(prompt_logprobs)
        notes = Notes(provenance(how), num_drafted, of_run, told)
        deltas.append(TokenDelta(run, notes, finish if last else None))
    return deltas


def _without_prompt(delta: TokenDelta) -> TokenDelta:
    return replace(delta, notes=structs.replace(delta.notes, prompt_logprobs=None))
