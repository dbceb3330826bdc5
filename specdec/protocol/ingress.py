"""The ingress's state machine: the requests, with the tokens their clients already have."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec.core.log import Extension, TokenLog
from specdec.core.messages import Cancel, End, Gone, Message, NewTokens, Notes, Plan, Submit, Want
from specdec.core.params import SequenceSpec, StopCondition
from specdec.core.tokens import SharedTokens
from specdec.core.types import UNKNOWN, Fingerprints, Finish, Tokens
from specdec.protocol.dispatcher import choose_router
from specdec.protocol.leases import Outbox, Times, label

logger = logging.getLogger(__name__)

ROUTER_SLACK = 2
"""Sequences."""
DRAINING = "the service is about to stop; send the request again"
MODEL_REPLACED = "the model was replaced by another; send the request again"
NUMERIC_CONTRACT = "no target is left whose numbers have the same bits; send the request again"


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next tokens of a sequence, final, or its end.

    Attributes:
        tokens: May be empty: in the first delta, which then says that the sequence was begun, and in the last.
        notes: How they came, one entry per token.
        finish: Why the sequence ended, in the last delta.
        plan: By which the sequence is drafted now; None where that is unknown.
        reason: What went wrong, where ``finish`` is ``error`` (rule 13).
        seq: Whose they are.
    """

    tokens: Tokens = ()
    notes: Notes = field(default_factory=Notes)
    finish: Finish | None = None
    plan: Plan | None = None
    reason: str = ""
    seq: str = field(default="", compare=False)

    def __add__(self, later: TokenDelta) -> TokenDelta:
        """Two deltas of a sequence, one after the other, as one."""
        plan = self.plan if later.plan is None else later.plan
        tokens, notes = self.tokens + later.tokens, self.notes + later.notes
        return TokenDelta(tokens, notes, later.finish, plan, later.reason, self.seq)


class Request:
    """One sequence as its client sees it.

    Attributes:
        log: Prompt and delivered output.
        router: Who has it now; None while nobody can be reached.
        last_seen_s: When its router last said anything of it.
        wanted_s: When it was last submitted or wanted.
        numeric: As in :class:`specdec.core.messages.Submit`.
    """

    __slots__ = ("attempt", "last_seen_s", "log", "numeric", "router", "seq", "spec", "wanted_s")

    def __init__(self, seq: str, prompt: SharedTokens | Iterable[int], spec: SequenceSpec) -> None:
        self.seq = seq
        self.spec = spec
        self.log = TokenLog(prompt)
        self.attempt = 0
        self.numeric = ""
        self.router: str | None = None
        self.last_seen_s = 0.0
        self.wanted_s = 0.0

    def ended(self) -> Finish | None:
        """How its delivered tokens end it, if they do; requests that a model's length would end have a limit below."""
        start, limit = self.spec.output_start, self.spec.output_start + self.spec.max_tokens
        return StopCondition.of(self.spec, limit).of_log(start, self.log.tail(start))


class IngressMachine:
    """Submits, renews, and resubmits under a higher attempt when a router is gone; delivers each token once.

    Driven like the other machines; deliveries are taken by ``take_deliveries``.

    Args:
        name: By which routers know it.
        times: The protocol's clock.
        fingerprints: What decides the tokens of its requests (rule 14).

    Attributes:
        is_draining: Whether new requests are refused: they end at once, with an error.
    """

    def __init__(self, name: str, times: Times, *, fingerprints: Fingerprints = UNKNOWN) -> None:
        self.name = name
        self.fingerprints = fingerprints
        self.is_draining = False
        self._times = times
        self._requests: dict[str, Request] = {}
        self._routers: dict[str, set[str]] = {}  # each with why it refuses: "draining", "model"
        self._num_held: Counter[str] = Counter()
        self._outbox = Outbox()
        self._deliveries: list[TokenDelta] = []
        self.num_resubmitted = 0
        self.num_errors = 0
        self.num_refused_draining = 0
        self.num_dropped_messages = 0

    def set_times(self, times: Times) -> None:
        """Go by other times from now on."""
        self._times = times
        for request in self._requests.values():
            request.wanted_s = float("-inf")  # routers renew by the new lease before the old one runs out

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by router."""
        return self._outbox.take()

    def take_deliveries(self) -> list[TokenDelta]:
        """Deliveries since the last call, in order."""
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def __len__(self) -> int:
        return len(self._requests)

    def metrics(self) -> dict[str, float]:
        """Counters and what is open now, by name."""
        return {
            "num_requests": float(len(self._requests)),
            "num_resubmitted": float(self.num_resubmitted),
            "num_sequence_errors": float(self.num_errors),
            "num_refused_draining": float(self.num_refused_draining),
            "num_dropped_messages": float(self.num_dropped_messages),
            "is_draining": float(self.is_draining),
        }

    def drain(self, now_s: float) -> None:
        """Take no requests any more; those that are open go on to their end (rule 15)."""
        self.is_draining = True

    @property
    def is_drained(self) -> bool:
        """Whether it drains, and no request is open."""
        return self.is_draining and not self._requests

    def start(self, seq: str, prompt: SharedTokens | Iterable[int], spec: SequenceSpec, now_s: float) -> None:
        """Take a request in, and submit it as soon as there is a router; while it drains, it ends with an error.

        Samples of one prompt that are given the same :class:`SharedTokens` hold it, and send it, once.
        """
        if self.is_draining:
            self.num_refused_draining += 1
            self._deliveries.append(TokenDelta(finish="error", reason=DRAINING, seq=seq))
            return
        request = Request(seq, prompt, spec)
        self._requests[seq] = request
        self._submit(request, now_s)

    def cancel(self, seq: str) -> None:
        """The client wants no more of a sequence; unknown ones are ignored."""
        self._forget(seq)

    def router_refused(self, name: str, now_s: float) -> None:
        """A router is of another model, so that there is no link to it; it counts until it is lost."""
        self._routers[name] = {"model"}
        for request in list(self._requests.values()):
            if request.router is None:
                self._submit(request, now_s)

    def router_joined(self, name: str, now_s: float) -> None:
        """A router can be reached."""
        self._routers[name] = set()
        for request in list(self._requests.values()):
            if request.router is None:
                self._submit(request, now_s)

    def router_lost(self, name: str, now_s: float) -> None:
        """A router is gone: its sequences are submitted to another, with the tokens their clients have (rule 8)."""
        self._routers.pop(name, None)
        for request in list(self._requests.values()):
            if request.router in (name, None):
                self._submit(request, now_s)

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        match message:
            case NewTokens(seq, attempt):
                request = self._current(seq, attempt)
                if request is not None:
                    self._on_tokens(request, message, now_s)
            case End(seq, attempt, prefix_hash, finish, reason):
                request = self._current(seq, attempt)
                if request is not None and request.log.prefix_hash() == prefix_hash:
                    self._finish(request, finish, reason)
                elif request is not None and prefix_hash.length <= len(request.log):
                    self._submit(request, now_s)  # another life of a router has used this attempt
            case Gone(seq, attempt, why):
                request = self._current(seq, attempt)
                if request is not None:
                    self._on_gone(request, why, now_s)

    def unsendable(self, message: Message, reason: str, now_s: float) -> None:
        """A message is too long to be sent: its request ends with an error."""
        if isinstance(message, Submit):
            request = self._current(message.seq, message.attempt)
            if request is not None:
                self._finish(request, "error", reason)

    def step(self, now_s: float) -> bool:
        """Timers: renewals and silence. Always False."""
        for request in list(self._requests.values()):
            if request.router is not None and now_s - request.last_seen_s > self._times.peer_timeout_s:
                self._submit(request, now_s)
            elif now_s - request.wanted_s >= self._times.renew_interval_s:
                self._want(request, now_s)
        return False

    def _current(self, seq: str, attempt: int) -> Request | None:
        request = self._requests.get(seq)
        if request is not None and request.attempt == attempt:
            return request
        self.num_dropped_messages += 1
        return None

    def _on_gone(self, request: Request, why: str, now_s: float) -> None:
        """Submit elsewhere; a router that refuses what is new is not asked again until it is another."""
        if why != "unknown" and request.router in self._routers:
            self._routers[request.router].add(why)
        self._submit(request, now_s)

    def _on_tokens(self, request: Request, message: NewTokens, now_s: float) -> None:
        request.last_seen_s = now_s
        request.numeric = message.numeric or request.numeric
        length = len(request.log)
        match request.log.extend_to(message.base, message.tokens, message.prefix_hash):
            case Extension.EXTENDED:
                new = request.log.tail(length)
                notes = message.notes.last(len(new))
                delta = TokenDelta(new, notes, plan=message.plan, seq=request.seq)
                self._deliveries.append(delta)
                self._want_soon(request, now_s)
            case Extension.GAP:  # what was sent before is lost
                self._want_soon(request, now_s)
            case Extension.MISMATCH:  # another life of a router has used this attempt
                self._submit(request, now_s)

    def _want_soon(self, request: Request, now_s: float) -> None:
        """Acknowledge now and then, so that what is repeated stays short; not every time: it costs a message."""
        if now_s - request.wanted_s >= self._times.retry_interval_s:
            self._want(request, now_s)

    def _submit(self, request: Request, now_s: float) -> None:
        """Submit a request to the next router, or end it where none but those of another model stay (rule 14).

        One that drains is of its own model: the router that takes its place may be there in a second.
        """
        if self._routers and all("model" in refused for refused in self._routers.values()):
            finish = request.ended()  # the end that the lost router had sent may be lost, too
            self._finish(request, finish or "error", "" if finish else MODEL_REPLACED)
            return
        if request.attempt > 0:
            self.num_resubmitted += 1
            logger.info("The sequence %s is submitted again, with %d tokens", label(request), len(request.log))
        request.attempt += 1
        request.last_seen_s = request.wanted_s = now_s
        self._hold(request, self._choose_router(request))
        if request.router is not None:
            prompt, decision = request.log.prompt, self.fingerprints.decision
            output = request.log.tail(len(prompt))
            submit = Submit(
                request.seq, request.attempt, self.name, prompt, request.spec, decision, output, request.numeric
            )
            self._outbox.put(request.router, submit)

    def _able_routers(self) -> list[str]:
        return [name for name, refused in self._routers.items() if refused.isdisjoint(("draining", "model"))]

    def _choose_router(self, request: Request) -> str | None:
        """Another than the last one, where there is another."""
        able = self._able_routers()
        loads = {name: self._num_held[name] for name in able if name != request.router or len(able) == 1}
        if not loads:
            return None
        group = request.spec.prefix_group(request.spec.adapter)
        return choose_router(loads, request.log, group, request.seq, ROUTER_SLACK)

    def _hold(self, request: Request, router: str | None) -> None:
        for name, change in ((request.router, -1), (router, 1)):
            if name is not None:
                self._num_held[name] += change
        request.router = router

    def _want(self, request: Request, now_s: float) -> None:
        request.wanted_s = now_s
        if request.router is not None:
            want = Want(request.seq, request.attempt, self.name, len(request.log))
            self._outbox.put(request.router, want)

    def _finish(self, request: Request, finish: Finish, reason: str) -> None:
        self.num_errors += finish == "error"
        self._deliveries.append(TokenDelta(finish=finish, reason=reason, seq=request.seq))
        self._forget(request.seq)

    def _forget(self, seq: str) -> None:
        request = self._requests.pop(seq, None)
        if request is not None and request.router is not None:
            self._outbox.put(request.router, Cancel(seq, request.attempt))
            self._hold(request, None)
