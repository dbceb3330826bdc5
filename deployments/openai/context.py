"""What every route needs, and how it gets it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from deployments.openai.errors import ApiError
from deployments.openai.ignored import IgnoredFields
from deployments.openai.observer import Observer
from deployments.openai.service import ServedModel, TokenService
from deployments.openai.settings import ApiSettings
from specdec.text.pieces import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")
_QUICK_CHARACTERS = 1 << 14
"""Texts up to this long are tokenized on the event loop: it takes about a millisecond."""
_CHARACTERS_PER_LOGPROB = 16
"""About as many are tokenized in the time that it takes to write one log probability, or to place one token."""


@dataclass(frozen=True, slots=True)
class Api:
    """The parts of one API.

    Attributes:
        tokenizer: The pair's, a fast one; used from several threads, and not changed.
        texts: What its single tokens say.
        ignored: Takes note of fields without effect.
    """

    service: TokenService
    tokenizer: PreTrainedTokenizerBase
    settings: ApiSettings
    observer: Observer
    texts: TokenTexts
    ignored: IgnoredFields

    def model(self, name: str | None) -> ServedModel:
        """The served model of that name; the target where there is none.

        Raises:
            ApiError: 404 where no such model is served.
        """
        info = self.service.model_info()
        if name is None:
            return info.target
        for model in info.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in info.models)
        raise ApiError(404, f"there is no model {name!r}; there is: {names}", param="model", code="model_not_found")

    async def encode(self, num_characters: int, work: Callable[[], _T]) -> _T:
        """Run tokenizing work, in a thread where the text is long."""
        return work() if num_characters <= _QUICK_CHARACTERS else await asyncio.to_thread(work)

    async def write(self, num_logprobs: int, work: Callable[[], _T]) -> _T:
        """Run work that writes log probabilities, or text piece by piece, in a thread where they are many."""
        return await self.encode(num_logprobs * _CHARACTERS_PER_LOGPROB, work)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, under what id, and from whom.

    Attributes:
        clock_s: Monotonic.
        wall_s: Since the epoch.
        caller: Digest of the API key that came with it; empty where none came.
    """

    request_id: str
    clock_s: float
    wall_s: float
    caller: str = ""

    def cache_salt(self, wanted: str | None) -> str | None:
        """With whom cached prefixes are shared: with requests of the same key, and the same salt if one is wanted.

        How fast an answer begins tells whether its prompt was cached: nobody is to learn so what others asked.
        """
        return f"{self.caller}:{wanted or ''}" if self.caller or wanted else None


# FastAPI runs what is no coroutine in another thread, and hand-overs wait where cores are busy.
async def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api


async def _arrival(request: Request) -> Arrival:
    key = request.headers.get("authorization", "")
    caller = blake2b(key.encode(), digest_size=16).hexdigest() if key else ""
    return Arrival(request.state.request_id, time.monotonic(), time.time(), caller)


ApiOf = Annotated[Api, Depends(_api)]
ArrivalOf = Annotated[Arrival, Depends(_arrival)]
