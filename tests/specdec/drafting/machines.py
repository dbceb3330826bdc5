"""The real router, target and drafter in virtual time, with scripted backends and the controller between them.

A worker's step takes its messages at its start and sends its own at its end, as an engine's thread does; a message
takes half a way to the router and half a way from it.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.messages import DRAFTER, Message
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.controller import Controller
from specdec.drafting.modes import Bounds
from specdec.drafting.plans import PlanController, Planner
from specdec.engine.timing import StepTimer
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine

STEP_S, ONE_WAY_S = 0.030, 0.001
MAX_LEN = 1 << 17
TIMES = Times(lease_s=1e6, peer_timeout_s=1e6, renew_interval_s=1.0)
TICK_S, POLL_S = 0.02, 0.004
PROFILED = (1, 2, 4, 8, 16, 32, 64, 128)
NOISE = 0.05
Machine = RouterMachine | TargetMachine | DrafterMachine | IngressMachine


@dataclass(frozen=True)
class Pair:
    """A pair of models.

    Attributes:
        alpha: How often the draft's token is the target's.
        cost: A draft step over a target step.
        hit: How often the true token is among the draft's next three guesses where its first is refused.
        free_tokens: A target step grows in proportion to its tokens beyond so many.
        beside: How many times longer a target step takes while the drafter works, as on processors that they share.
        step_s: A target step of few tokens, in seconds.
    """

    alpha: float
    cost: float
    hit: float = 0.9
    free_tokens: int = 512
    beside: float = 1.0
    step_s: float = STEP_S

    def target_s(self, num_tokens: int) -> float:
        return self.step_s * max(1.0, num_tokens / self.free_tokens)

    def draft_s(self, num_rows: int) -> float:
        return self.cost * self.step_s * max(1.0, num_rows / 64)


class Service:
    """One target and its drafter under a planner; by default a controller.

    Args:
        pair: Of models.
        planner: By default a controller whose workers have profiled their steps.
        seed: Of the noise of step times.
    """

    def __init__(self, pair: Pair, planner: Planner | PlanController | None = None, seed: int = 0) -> None:
        self.pair = pair
        self.controller = Controller(Bounds(num_branches=16))
        script = Script(pair.alpha, pair.hit, tuple(range(64)))
        self.timers = {name: StepTimer() for name in ("target", DRAFTER)}
        for rows in PROFILED:
            for tokens in (rows, 5 * rows):
                self.timers["target"].add(rows, tokens, pair.target_s(tokens))
            self.timers[DRAFTER].add(rows, rows, pair.draft_s(rows))
        self.target = TargetMachine("target", ScriptedTarget(script, MAX_LEN), TIMES, self.timers["target"].metrics)
        backend = ScriptedDrafter(script, MAX_LEN)
        self.drafter = DrafterMachine(DRAFTER, backend, TIMES, self.timers[DRAFTER].metrics)
        self.ingress = IngressMachine("ingress", TIMES)
        self.router = RouterMachine("router", planner or self.controller, TIMES)
        self.machines: dict[str, Machine] = {
            "target": self.target,
            DRAFTER: self.drafter,
            "ingress": self.ingress,
            "router": self.router,
        }
        self.rng = np.random.default_rng(seed)
        self.now_s = 0.0
        self.free_s = dict.fromkeys(self.timers, 0.0)
        self.num_requests = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, list[Message] | None]] = []
        self.ingress.router_joined("router", 0.0)
        for name in self.timers:
            self.router.worker_joined(name, name, 0.0)
            self._at(0.0, name, None)
        self._at(0.0, "router", None)
        self.run_for(2 * TIMES.renew_interval_s)

    def begin(self, num_requests: int, num_tokens: int = MAX_LEN - 8, temperature: float = 1.0) -> None:
        """So many requests come at once."""
        for _ in range(num_requests):
            self.num_requests += 1
            sampling = SamplingParams(ignore_eos=True, temperature=temperature)
            spec = SequenceSpec(sampling, self.num_requests, 1, num_tokens)
            self.ingress.start(f"s{self.num_requests}", (1,), spec, self.now_s)
        self.ingress.step(self.now_s)
        self._send("ingress", self.now_s)

    def run_for(self, seconds: float) -> None:
        """So much virtual time."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self._next()

    def run_rounds(self, num_rounds: int) -> tuple[int, int, float]:
        """Until so many rows were verified; gives those with drafts, tokens committed and seconds."""
        counters, began_s = self.target.counters, self.now_s
        rounds, drafts, tokens = counters.num_rounds, counters.num_drafts, counters.num_committed_tokens
        while self.target.counters.num_rounds < rounds + num_rounds:
            self._next()
        counters = self.target.counters
        return counters.num_drafts - drafts, counters.num_committed_tokens - tokens, self.now_s - began_s

    def burst(self, num_requests: int, num_tokens: int, temperature: float = 1.0) -> float:
        """So many requests from their coming to the end of the last; tokens per second."""
        began_s = self.now_s
        self.begin(num_requests, num_tokens, temperature)
        done = self.target.counters.num_committed_tokens + num_requests * num_tokens
        while self.target.counters.num_committed_tokens < done:
            self._next()
        rate = num_requests * num_tokens / (self.now_s - began_s)
        self.run_for(3 * ONE_WAY_S)
        return rate

    def _next(self) -> None:
        self.now_s, _, name, messages = heapq.heappop(self._events)
        machine = self.machines[name]
        for message in messages or ():
            machine.receive(message, self.now_s)
        if isinstance(machine, RouterMachine | IngressMachine):
            machine.step(self.now_s)
            self._send(name, self.now_s)
            if messages is None:
                self._at(self.now_s + TICK_S, name, None)
        elif messages is None and self.now_s >= self.free_s[name]:
            self._step(name)

    def _step(self, name: str) -> None:
        counters, draft_counters = self.target.counters, self.drafter.counters
        before = counters.num_rounds, counters.num_draft_tokens, draft_counters.num_proposed_tokens
        worked, end_s = self.machines[name].step(self.now_s), self.now_s + POLL_S
        if worked:
            counters = self.target.counters
            if name == "target":
                num_rows = counters.num_rounds - before[0]
                num_tokens = num_rows + counters.num_draft_tokens - before[1]
                is_beside = self.free_s["drafter"] > self.now_s
                seconds = self.pair.target_s(num_tokens) * (self.pair.beside if is_beside else 1.0)
            else:
                num_rows = num_tokens = draft_counters.num_proposed_tokens - before[2]
                seconds = self.pair.draft_s(num_rows)
            seconds *= float(self.rng.lognormal(0.0, NOISE))
            if num_rows:
                self.timers[name].add(num_rows, num_tokens, seconds)
            end_s = self.now_s + seconds
        self.free_s[name] = end_s if worked else 0.0
        self._send(name, end_s)
        self._at(end_s, name, None)

    def _send(self, name: str, at_s: float) -> None:
        for peer, messages in self.machines[name].take_outbox().items():
            self._at(at_s + ONE_WAY_S / 2, peer, messages)

    def _at(self, at_s: float, name: str, messages: list[Message] | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), name, messages))
