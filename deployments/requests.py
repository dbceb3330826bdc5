"""What the HTTP application asks tokens of: the ingress' machine, and an inbox per open sequence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from deployments.inbox import Inbox
from deployments.openai.service import ModelInfo, SequenceRequest, TokenDelta
from deployments.transport.host import LoopHost
from specdec.errors import ServiceUnavailableError
from specdec.protocol.ingress import IngressMachine


class RoutedTokens:
    """A :class:`deployments.openai.service.TokenService` over the routers.

    Args:
        info: What is served.
        scrape: Gives the metrics page.
        most_sequences: Sequences taken in at once; beyond it requests are refused.
    """

    def __init__(self, info: ModelInfo, scrape: Callable[[], Awaitable[bytes]], most_sequences: int) -> None:
        self._info = info
        self._scrape = scrape
        self._most_sequences = most_sequences
        self._inboxes: dict[str, Inbox] = {}
        self._host: LoopHost[IngressMachine] | None = None
        self._has_router: Callable[[], bool] = lambda: False

    def connect(self, host: LoopHost[IngressMachine], has_router: Callable[[], bool]) -> None:
        """Take requests from now on."""
        self._host, self._has_router = host, has_router

    def deliver(self, machine: IngressMachine) -> None:
        """Hand what the machine delivers to those who wait for it; after each of its turns."""
        for delivery in machine.take_deliveries():
            inbox = self._inboxes.get(delivery.seq)
            if inbox is not None:
                inbox.put(TokenDelta(delivery.tokens, delivery.notes, delivery.finish, delivery.plan))

    def model_info(self) -> ModelInfo:
        """What is served."""
        return self._info

    async def metrics(self) -> bytes:
        """The metrics page, in Prometheus' text format."""
        return await self._scrape()

    async def check_health(self) -> None:
        """Return if a router can be reached.

        Raises:
            ServiceUnavailableError: None can.
        """
        if not self._has_router():
            raise ServiceUnavailableError("no router can be reached")

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Generate one sequence; closing the generator cancels it.

        Raises:
            ServiceUnavailableError: As many sequences as this ingress takes are open, or no router can be reached.
        """
        await self.check_health()
        if len(self._inboxes) >= self._most_sequences:
            raise ServiceUnavailableError(f"{self._most_sequences} sequences are open, and no more are taken in")
        assert self._host is not None
        seq, inbox = request.seq, Inbox()
        spec = replace(request.spec, model=request.model, cache_salt=request.cache_salt or "")
        self._inboxes[seq] = inbox
        try:
            self._host.tell(lambda machine, now_s: machine.start(seq, request.prompt, spec, now_s))
            yield TokenDelta()
            finished = False
            while not finished:
                delta = await inbox.take()
                finished = delta.finish is not None
                yield delta
        finally:
            del self._inboxes[seq]
            self._host.tell(lambda machine, now_s: machine.cancel(seq))
