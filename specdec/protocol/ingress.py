"""The ingress's state machine: the requests, with the tokens their clients already have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from specdec.protocol.leases import Outbox, Times
from specdec.protocol.marks import Extension, TokenLog
from specdec.protocol.messages import Cancel, End, Gone, Message, NewTokens, Notes, Plan, Submit, Want
from specdec.sampling.params import SequenceSpec
from specdec.types import Finish, Tokens


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a client gets next: tokens that are final, or the end of its sequence.

    Attributes:
        plan: By which the sequence is drafted now.
        reason: What went wrong, where ``finish`` is ``error`` (rule 13).
    """

    seq: str
    tokens: Tokens
    notes: Notes
    finish: Finish | None = None
    plan: Plan | None = None
    reason: str = ""


class Request:
    """One sequence as its client sees it.

    Attributes:
        log: Prompt and delivered output.
        router: Who has it now; None while nobody can be reached.
        state: ``live``, ``finished`` or ``cancelled``.
        heard_s: When its router last said anything of it.
        wanted_s: When it was last submitted or wanted.
    """

    __slots__ = ("attempt", "heard_s", "log", "router", "seq", "spec", "state", "wanted_s")

    def __init__(self, seq: str, tokens: Iterable[int], spec: SequenceSpec) -> None:
        self.seq = seq
        self.spec = spec
        self.log = TokenLog(tokens)
        self.attempt = 0
        self.router: str | None = None
        self.state: Literal["live", "finished", "cancelled"] = "live"
        self.heard_s = 0.0
        self.wanted_s = 0.0


class IngressMachine:
    """Submits, renews, and resubmits under a higher attempt when a router is gone; delivers each token once.

    Driven like the other machines; deliveries are taken by ``take_deliveries``.
    """

    def __init__(self, name: str, times: Times) -> None:
        self.name = name
        self._times = times
        self._requests: dict[str, Request] = {}
        self._routers: list[str] = []
        self._turn = 0
        self._outbox = Outbox()
        self._deliveries: list[Delivery] = []
        self.num_resubmitted = 0

    def set_times(self, times: Times) -> None:
        """Go by other times from now on."""
        self._times = times

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by router."""
        return self._outbox.take()

    def take_deliveries(self) -> list[Delivery]:
        """Deliveries since the last call, in order."""
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def __len__(self) -> int:
        return len(self._requests)

    def start(self, seq: str, prompt: Iterable[int], spec: SequenceSpec, now_s: float) -> None:
        """Take a request in, and submit it as soon as there is a router."""
        request = Request(seq, prompt, spec)
        self._requests[seq] = request
        self._submit(request, now_s)

    def cancel(self, seq: str) -> None:
        """The client wants no more of a sequence; unknown ones are ignored."""
        self._finish(seq, "cancelled")

    def router_joined(self, name: str, now_s: float) -> None:
        """A router can be reached."""
        if name not in self._routers:
            self._routers.append(name)
        for request in list(self._requests.values()):
            if request.router is None:
                self._submit(request, now_s)

    def router_lost(self, name: str, now_s: float) -> None:
        """A router is gone: its sequences are submitted to another, with the tokens their clients have (rule 8)."""
        if name in self._routers:
            self._routers.remove(name)
        for request in list(self._requests.values()):
            if request.router == name:
                self._submit(request, now_s)

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        match message:
            case NewTokens(seq, attempt):
                request = self._current(seq, attempt)
                if request is not None:
                    self._on_tokens(request, message, now_s)
            case End(seq, attempt, mark, finish, reason):
                request = self._current(seq, attempt)
                if request is not None and request.log.mark() == mark:
                    self._deliveries.append(Delivery(seq, (), Notes(), finish, reason=reason))
                    self._finish(seq, "finished")
            case Gone(seq, attempt):
                request = self._current(seq, attempt)
                if request is not None:
                    self._submit(request, now_s)

    def step(self, now_s: float) -> bool:
        """Timers: renewals and silence. Always False."""
        for request in list(self._requests.values()):
            if request.router is not None and now_s - request.heard_s > self._times.silence_s:
                self._submit(request, now_s)
            elif now_s - request.wanted_s >= self._times.renew_s:
                self._want(request, now_s)
        return False

    def _current(self, seq: str, attempt: int) -> Request | None:
        request = self._requests.get(seq)
        return request if request is not None and request.attempt == attempt else None

    def _on_tokens(self, request: Request, message: NewTokens, now_s: float) -> None:
        request.heard_s = now_s
        length = len(request.log)
        match request.log.extend_to(message.base, message.tokens, message.mark):
            case Extension.EXTENDED:
                new = request.log.tail(length)
                self._deliveries.append(Delivery(request.seq, new, message.notes.last(len(new)), plan=message.plan))
                self._want_soon(request, now_s)
            case Extension.MISMATCH:  # another life of a router has used this attempt
                self._submit(request, now_s)

    def _want_soon(self, request: Request, now_s: float) -> None:
        """Acknowledge now and then, so that what is repeated stays short; not every time: it costs a message."""
        if now_s - request.wanted_s >= self._times.repeat_s:
            self._want(request, now_s)

    def _submit(self, request: Request, now_s: float) -> None:
        self.num_resubmitted += request.attempt > 0
        request.attempt += 1
        request.heard_s = request.wanted_s = now_s
        request.router = self._next_router()
        if request.router is not None:
            tokens = request.log.tail(0)
            submit = Submit(request.seq, request.attempt, self.name, tokens, request.spec)
            self._outbox.put(request.router, submit)

    def _next_router(self) -> str | None:
        if not self._routers:
            return None
        self._turn += 1
        return self._routers[self._turn % len(self._routers)]

    def _want(self, request: Request, now_s: float) -> None:
        request.wanted_s = now_s
        if request.router is not None:
            want = Want(request.seq, request.attempt, self.name, len(request.log))
            self._outbox.put(request.router, want)

    def _finish(self, seq: str, state: Literal["finished", "cancelled"]) -> None:
        request = self._requests.pop(seq, None)
        if request is not None:
            request.state = state
            if request.router is not None:
                self._outbox.put(request.router, Cancel(seq, request.attempt))
