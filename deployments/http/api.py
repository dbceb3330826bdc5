"""What every route needs, and how it gets it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from deployments.http.errors import ApiError
from deployments.http.ignored import IgnoredFields
from deployments.http.observer import Observer
from deployments.http.recordings import RecordingFolder
from deployments.http.request_context import RequestContext
from deployments.http.service import ApiSettings, SequenceRequest, ServedModel, TokenService
from deployments.http.store import Store
from specdec.core.errors import ServiceUnavailableError
from specdec.structured.compiler import Grammars
from specdec.structured.parsing.selection import AnswerForms
from specdec.text.detokenizer import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("ray.serve")
_T = TypeVar("_T")
_MOST_SHOWN = 256
"""Characters of a model's name that an error repeats."""
_MOST_NAMED = 16
_QUICK_CHARACTERS = 1 << 11
"""Texts up to this long are tokenized on the event loop, in a millisecond: a thread would cost as much."""
_NUM_THREADS = 3
"""At most two of them for one API key. More would wait for the interpreter's lock, and the event loop with them."""
_CHARACTERS_PER_LOGPROB = 16
"""About as many are tokenized in the time that it takes to write one log probability, or to place one token."""


@dataclass(frozen=True, slots=True)
class Api:
    """The parts of one API.

    Attributes:
        tokenizer: The pair's, a fast one; used from several threads, and not changed.
        texts: What its single tokens say.
        ignored: Takes note of fields without effect.
        grammars: Compiles what requests bring, to refuse what cannot be.
        answers: How the model's answers are written.
        store: Keeps responses; None where the service keeps none.
        find_adapter: Looks for an adapter that is not known here; None if none can be loaded.
        recordings: Keeps answers as recordings; None if nobody asks for that.
        threads: Do what takes long.
    """

    service: TokenService
    tokenizer: PreTrainedTokenizerBase
    settings: ApiSettings
    observer: Observer
    texts: TokenTexts
    ignored: IgnoredFields
    grammars: Grammars
    answers: AnswerForms
    store: Store | None = None
    find_adapter: Callable[[str], Awaitable[None]] | None = None
    recordings: RecordingFolder | None = None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_NUM_THREADS, "requests"))

    def check_admin(self, context: RequestContext, act: str) -> None:
        """Let on who may administer, and log what is to be done.

        Raises:
            ApiError: 403: the request's API key may not.
        """
        if context.stats.key not in self.settings.admin_keys or not context.stats.key:
            text = "this needs one of the API keys that access.admin_keys names"
            raise ApiError(403, text, "permission_error", code="admin_key_needed")
        _logger.info("admin request_id=%s key=%s %s", context.label, context.stats.key, act)

    async def look_for(self, name: str | None) -> None:
        """Look for a model that is not known: another ingress may just have loaded that adapter, or a folder has it.

        Raises:
            InvalidParameterError: The folder has such an adapter, which cannot be served.
            ServiceUnavailableError: The store does not answer, or adapters are still being checked, so nobody knows
                whether there is such a model.
        """
        if self.find_adapter is not None and name is not None and self.service.model_info().find(name) is None:
            try:
                await self.find_adapter(name)
            except ServiceUnavailableError as error:
                if self.service.model_info().find(name) is not None:  # it came while others were still checked
                    return
                what = f"the model {name[:_MOST_SHOWN]!r} is not known here, and may be an adapter that was just loaded"
                raise ServiceUnavailableError(f"{what}: {error}") from error

    def model(self, name: str | None) -> ServedModel:
        """The served model of that name; the target where there is none.

        Raises:
            ApiError: 404 where no such model is served.
        """
        info = self.service.model_info()
        if name is None:
            return info.target
        found = info.find(name)
        if found is not None:
            return found
        names = list(islice(chain((info.target.name,), info.adapters), _MOST_NAMED + 1))
        known = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        raise ApiError(
            404, f"there is no model {name[:_MOST_SHOWN]!r}; there is: {known}", param="model", code="model_not_found"
        )

    async def admit(self, context: RequestContext, model: ServedModel, sequences: Sequence[SequenceRequest]) -> None:
        """Take a slot per sequence of a request that is checked, waiting for them if need be.

        Raises:
            ApiError: 429: nobody may wait any more; 503 or 504: it has waited too long.
        """
        self.service.check_health()
        if context.stats.reservation is not None:
            with self.observer.queued(model.label, len(sequences)):
                async with context.waiting(to_begin=True):
                    await context.stats.reservation.take(len(sequences), sequences[0].spec.order[0])
        context.stats.admitted_s = time.monotonic()

    async def encode(self, num_characters: int, work: Callable[[], _T]) -> _T:
        """Run tokenizing work, in a thread where the text is long."""
        return work() if num_characters <= _QUICK_CHARACTERS else await self.beside_loop(work)

    async def beside_loop(self, work: Callable[[], _T]) -> _T:
        """Run work in a thread. Work that has not begun is dropped on cancel."""
        return await asyncio.wrap_future(self.threads.submit(work))

    async def write(self, num_logprobs: int, work: Callable[[], _T], num_characters: int = 0) -> _T:
        """Run work that writes log probabilities, or text piece by piece, in a thread where they are many.

        Args:
            num_logprobs: How many are written.
            work: What writes them.
            num_characters: Beside them.
        """
        return await self.encode(num_logprobs * _CHARACTERS_PER_LOGPROB + num_characters, work)


def api_of(request: Request) -> Api:
    """The parts of the API."""
    api: Api = request.app.state.api
    return api


# FastAPI runs what is no coroutine in another thread, and hand-overs wait where cores are busy.
async def _api(request: Request) -> Api:
    return api_of(request)


async def _context(request: Request) -> RequestContext:
    context: RequestContext = request.state.context
    return context


ApiOf = Annotated[Api, Depends(_api)]
ContextOf = Annotated[RequestContext, Depends(_context)]
