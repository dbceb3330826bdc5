"""A request from its arrival on: when it came, from whom, until when it may take, and what became of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.config.limits import SharePrefixes
from deployments.http.admission import Reservation
from deployments.http.errors import ApiError


@dataclass(slots=True)
class RequestStats:
    """What is known of a request so far, for the line that is logged at its end.

    Attributes:
        request_id: That of its body; empty where it has none.
        key: Name of its API key; empty where none is asked for.
        reservation: Its part of what is taken in; None where it asks for nothing to be generated.
        admitted_s: When it had its slots, on the monotonic clock.
        first_token_s: When its first token came, on the same.
        finish: How its choices ended, each way once.
    """

    request_id: str = ""
    key: str = ""
    reservation: Reservation | None = None
    model: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finish: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """When a request came, under what id, and from whom.

    Attributes:
        request_id: That of ``x-request-id``.
        clock_s: Monotonic.
        wall_s: Since the epoch.
        waited_s: At Serve's proxy before that, by its clock; part of what is measured, and of no deadline.
        caller: Digest of the API key that came with it; empty where none came.
        begin_by_s: When its first token must have come, monotonic.
        patience_s: Longest wait for each further token.
        end_by_s: When its answer must have ended, monotonic.
        retry_after_s: What ``Retry-After`` says where it has waited too long.
        trace: Label of its trace; empty where there is none.
        stats: What became of it.
    """

    request_id: str
    clock_s: float
    wall_s: float
    waited_s: float = 0.0
    caller: str = ""
    begin_by_s: float = math.inf
    patience_s: float = math.inf
    end_by_s: float = math.inf
    retry_after_s: int = 1
    trace: str = ""
    share_prefixes: SharePrefixes = "key"
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def label(self) -> str:
        """By which answers and log lines name the request: the id in its body, or else that of ``x-request-id``."""
        return self.stats.request_id or self.request_id

    def cache_salt(self, wanted: str | None) -> str | None:
        """With whom cached prefixes are shared, by ``access.share_prefixes``; and the same salt if one is wanted.

        How fast an answer begins tells whether its prompt was cached: nobody else is to learn so what others asked.
        """
        group, slash, _ = self.stats.key.partition("/")
        if self.share_prefixes == "all":
            sharing = ""
        elif self.share_prefixes == "group" and slash:
            sharing = f"group {group}"
        else:
            sharing = self.caller
        return f"{sharing}:{wanted or ''}" if sharing or wanted else None

    @asynccontextmanager
    async def waiting(self, *, to_begin: bool) -> AsyncIterator[None]:
        """Around a wait for the first token, or for what follows.

        Raises:
            ApiError: It took too long: 503 to begin or to go on, 504 to end.
        """
        begin_or_go_on_s = self.begin_by_s if to_begin else time.monotonic() + self.patience_s
        limit_s = min(begin_or_go_on_s, self.end_by_s)
        if limit_s == math.inf:
            yield
            return
        rest_s = limit_s - time.monotonic()
        if rest_s <= 0:
            raise self._too_late(limit_s, to_begin)
        try:
            async with asyncio.timeout(rest_s):
                yield
        except TimeoutError:
            raise self._too_late(limit_s, to_begin) from None

    def _too_late(self, limit_s: float, to_begin: bool) -> ApiError:
        after = f"within {limit_s - self.clock_s:.3g} s of its arrival"
        if limit_s < self.end_by_s:
            headers = {"Retry-After": str(self.retry_after_s)}
            text = f"the request had no first token {after}" if to_begin else f"no token for {self.patience_s:.3g} s"
            text += " (limits.queue_timeout_s)"
            return ApiError(503, text, "server_error", code="queue_timeout", headers=headers)
        # OpenAI's clients send again what has a status of 500 and more: the same would take as long once more.
        headers = {"x-should-retry": "false"}
        text = f"the answer had no end {after} (limits.request_timeout_s, or the header x-request-timeout-seconds)"
        return ApiError(504, text, "timeout_error", code="request_timeout", headers=headers)
