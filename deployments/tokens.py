"""What the HTTP application asks tokens of: the ingress' machine, and an inbox per open sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from deployments.http.service import ModelInfo, SequenceRequest, ServedModel
from deployments.operate.readiness import Workers, missing_parts
from deployments.transport.host import LoopHost
from specdec.core.errors import SequenceFailedError, ServiceUnavailableError
from specdec.protocol.ingress import DRAINING, MODEL_REPLACED, NUMERIC_CONTRACT, IngressMachine, TokenDelta

FAILED = "this ingress has failed"
PASSING = frozenset({FAILED, DRAINING, MODEL_REPLACED, NUMERIC_CONTRACT})
"""Reasons of an error for which the same request may be sent again: elsewhere, or later, it may succeed."""


AskRouters = Callable[[], Awaitable[Sequence[Workers]]]
"""Gives the workers of each router that answers."""


async def _no_router() -> Sequence[Workers]:
    return ()


class Inbox:
    """What has come for one sequence since its reader took the last, as one delta.

    A reader whose client is slow, or whose turn comes late, finds more of it at once; nobody waits for more to come.
    """

    def __init__(self) -> None:
        self._held: TokenDelta | None = None
        self._has_some = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        """Add to what is held; on the event loop."""
        self._held = delta if self._held is None else self._held + delta
        self._has_some.set()

    async def take(self) -> TokenDelta:
        """All that has come, as soon as there is something; for one reader."""
        await self._has_some.wait()
        taken, self._held = self._held, None
        assert taken is not None, "there is one reader"
        self._has_some.clear()
        return taken


class RoutedTokens:
    """A :class:`deployments.http.service.TokenService` over the routers.

    Args:
        info: What is served.

    Attributes:
        is_draining: Whether new sequences are refused.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._adapters = dict(info.adapters)
        self._info = replace(info, adapters=MappingProxyType(self._adapters))
        self._inboxes: dict[str, Inbox] = {}
        self._host: LoopHost[IngressMachine] | None = None
        self._has_router: Callable[[], bool] = lambda: False
        self._ask_routers: AskRouters = _no_router
        self.is_draining = False

    def connect(
        self, host: LoopHost[IngressMachine], has_router: Callable[[], bool], ask_routers: AskRouters = _no_router
    ) -> None:
        """Take requests from now on."""
        self._host, self._has_router, self._ask_routers = host, has_router, ask_routers
        host.on_failed = self.fail

    def deliver(self, machine: IngressMachine) -> None:
        """Hand what the machine delivers to those who wait for it; after each of its turns."""
        for delivery in machine.take_deliveries():
            inbox = self._inboxes.get(delivery.seq)
            if inbox is not None:
                inbox.put(delivery)

    def fail(self, _failure: Exception) -> None:
        """End all open sequences with an error: the machine has failed, and nothing comes any more."""
        for inbox in self._inboxes.values():
            inbox.put(TokenDelta(finish="error", reason=FAILED))

    def drain(self) -> None:
        """Refuse new sequences from now on; open ones go on."""
        self.is_draining = True

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._inboxes)

    def state(self) -> str:
        """For operators: why sequences are not taken, and how many are open still; empty where they are taken."""
        refusal = self.refusal()
        return f"{refusal}; {self.num_open} still run" if refusal and self.is_draining else refusal

    def refusal(self) -> str:
        """Why sequences are not taken; empty where they are."""
        if self._host is not None and self._host.failed:
            return FAILED
        if self.is_draining:
            return "this ingress drains: it takes no new requests"
        return "" if self._has_router() else "no router can be reached"

    def model_info(self) -> ModelInfo:
        """What is served."""
        return self._info

    def set_adapter(self, name: str, adapter: ServedModel | None) -> None:
        """Let new requests name an adapter, or with None no longer; open ones keep theirs.

        One change costs the same whether there are 4 adapters or 4,000.
        """
        if adapter is None:
            self._adapters.pop(name, None)
        else:
            self._adapters[name] = adapter

    def check_health(self) -> None:
        """Return if sequences are taken.

        Raises:
            ServiceUnavailableError: They are not.
        """
        refusal = self.refusal()
        if refusal:
            raise ServiceUnavailableError(refusal)

    async def check_ready(self) -> None:
        """Return if sequences are taken, and a router has a target for them.

        Raises:
            ServiceUnavailableError: Something is missing.
        """
        missing = missing_parts([self.refusal()], await self._ask_routers())
        if missing:
            raise ServiceUnavailableError("; ".join(f"{part}: {why}" for part, why in missing.items()))

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Generate one sequence; closing the generator cancels it.

        Raises:
            ServiceUnavailableError: Sequences are not taken now.
            SequenceFailedError: It ended with an error.
        """
        self.check_health()
        assert self._host is not None
        seq, inbox = request.seq, Inbox()
        self._inboxes[seq] = inbox
        try:
            self._host.tell(lambda machine, now_s: machine.start(seq, request.prompt, request.spec, now_s))
            finished = False
            while not finished:
                delta = await inbox.take()
                if delta.finish == "error":
                    if delta.tokens:
                        yield replace(delta, finish=None)
                    code = "numeric_contract" if delta.reason == NUMERIC_CONTRACT else "generation_failed"
                    raise SequenceFailedError(delta.reason, is_passing=delta.reason in PASSING, code=code)
                finished = delta.finish is not None
                yield delta
        finally:
            del self._inboxes[seq]
            self._host.tell(lambda machine, now_s: machine.cancel(seq))
