"""The real router, target and drafter in virtual time, with scripted backends: what the simulated pair is held against.

A worker's step takes its messages at its start and sends its own at its end, as an engine's thread does; a message
takes half a way to the router and half a way from it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from specdec.control.controller import Controller
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.engine.timing import StepTimer
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.messages import Message, Plan
from specdec.protocol.plans import PlanController, Planner
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.control.pairs import NOISE, ONE_WAY_S, PAUSE, PAUSE_RATE, Scenario

MAX_LEN = 1 << 16
STAGGER = 0.7
MOST_S = 1000.0
TICK_S = 0.05
Machine = RouterMachine | TargetMachine | DrafterMachine | IngressMachine


class Machines:
    """One pair, all sequences under one plan."""

    poll_s, renew_s = 0.001, 1e5

    def __init__(self, scenario: Scenario, plan: Plan, seed: int = 0) -> None:
        self.scenario = scenario
        self.rng = np.random.default_rng(seed)
        times = self.times = Times(lease_s=1e6, silence_s=1e6, renew_s=self.renew_s)
        script = self.script = Script(scenario.alpha, scenario.hit, tuple(range(64)))
        self.timers = {"target": StepTimer(), "drafter": StepTimer()}
        self.target = TargetMachine("target", ScriptedTarget(script, MAX_LEN), times, self.timers["target"].report)
        self.target.meanwhile = self._meanwhile
        self.drafter = self._new_drafter("drafter")
        self.ingress = IngressMachine("ingress", times)
        self.router = RouterMachine("router", self._planner(plan), times)
        self.machines: dict[str, Machine] = {
            "target": self.target,
            "drafter": self.drafter,
            "ingress": self.ingress,
            "router": self.router,
        }
        self.now_s = 0.0
        self.free_s = {"target": 0.0, "drafter": 0.0}
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, list[Message] | None]] = []
        self.ingress.router_joined("router", 0.0)
        for name in ("target", "drafter"):
            self.router.worker_joined(name, name, 0.0)
            self._at(0.0, name, None)
        for i in range(scenario.batch):
            self._at(i * STAGGER * scenario.target_s(1), f"start {i}", None)

    def _planner(self, plan: Plan) -> Planner | PlanController:
        return lambda spec: plan

    def _new_drafter(self, name: str) -> DrafterMachine:
        timer = self.timers[name] = StepTimer()
        return DrafterMachine(name, ScriptedDrafter(self.script, MAX_LEN), self.times, timer.report)

    def tokens_per_s(self, num_steps: int, warm_up: int = 20) -> float:
        """Over so many target steps."""
        self._run(warm_up)
        began_s, began = self.now_s, self.target.counters.num_committed_tokens
        self._run(num_steps)
        return (self.target.counters.num_committed_tokens - began) / (self.now_s - began_s)

    def _run(self, num_steps: int) -> None:
        until = self.target.counters.num_steps + num_steps
        while self.target.counters.num_steps < until:
            self._next()

    def _next(self) -> None:
        """The next event."""
        self.now_s, _, name, messages = heapq.heappop(self.events)
        if name.startswith("start"):
            self._start(int(name.split()[1]))
        if name not in self.machines:  # a start, or what was on its way to a worker that is gone
            return
        for message in messages or ():
            self.machines[name].receive(message, self.now_s)
        if messages is not None and name in ("router", "ingress"):
            self._send(name, self.now_s)
        elif messages is None and name == "router":
            self._tick()
        elif messages is None and self.now_s >= self.free_s[name]:
            self._step(name)

    def _tick(self) -> None:
        self.router.step(self.now_s)
        self._send("router", self.now_s)
        self._at(self.now_s + TICK_S, "router", None)

    def _start(self, i: int, max_tokens: int = MAX_LEN - 8, bound: int | None = None) -> None:
        spec = SequenceSpec(SamplingParams(ignore_eos=True), i, 1, max_tokens, num_speculative_tokens=bound)
        self.ingress.start(f"s{i}", (1,), spec, self.now_s)
        self.ingress.step(self.now_s)
        self._send("ingress", self.now_s)

    def _step(self, name: str) -> None:
        machine, now_s = self.machines[name], self.now_s
        before = self.target.counters.num_steps, self.target.counters.num_rounds, self.target.counters.num_draft_tokens
        proposed = self.drafter.counters.num_proposed_tokens
        worked = machine.step(now_s)
        end_s = now_s + self.poll_s
        if worked:
            if name == "target":
                counters = self.target.counters
                num_rows = counters.num_rounds - before[1]
                num_tokens = num_rows + counters.num_draft_tokens - before[2]
                duration_s = self.scenario.target_s(num_tokens) * self._noise()
            else:
                num_rows = num_tokens = self.drafter.counters.num_proposed_tokens - proposed
                duration_s = self.scenario.draft_s(num_rows) * self._noise()
            if num_rows:
                self.timers[name].add(num_rows, num_tokens, duration_s)
            end_s = now_s + duration_s
        self.free_s[name] = end_s
        self._send(name, end_s)
        self._at(end_s, name, None)

    @contextmanager
    def _meanwhile(self) -> Iterator[None]:
        """What a target has said goes out as its step begins."""
        self._send("target", self.now_s)
        yield

    def _send(self, name: str, at_s: float) -> None:
        for peer, messages in self.machines[name].take_outbox().items():
            self._at(at_s + ONE_WAY_S / 2, peer, messages)

    def _at(self, at_s: float, name: str, messages: list[Message] | None) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), name, messages))

    def _noise(self) -> float:
        return float(self.rng.lognormal(0.0, NOISE) * (PAUSE if self.rng.random() < PAUSE_RATE else 1.0))


class Service(Machines):
    """The same under the controller: requests come and end, a drafter is lost and another comes."""

    poll_s, renew_s = 0.004, 1.0

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.controller = Controller()
        super().__init__(scenario, Plan(), seed)
        self.num_requests = scenario.batch
        self._at(0.0, "router", None)

    def _planner(self, plan: Plan) -> PlanController:
        return self.controller

    def request(self, num_tokens: int, bound: int | None = None) -> None:
        """A request for so many tokens comes."""
        self._start(self.num_requests, num_tokens, bound)
        self.num_requests += 1

    def run_for(self, seconds: float) -> None:
        """So much virtual time."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self._next()

    def run_until_idle(self) -> None:
        """Until every request has ended, those among them that are on their way to the router."""
        self.run_for(2 * ONE_WAY_S)
        until_s = self.now_s + MOST_S
        while any(session.finish is None for session in self.router._sessions):
            assert self.now_s < until_s, "requests do not end"
            self._next()

    def lose_drafter(self) -> None:
        """It is gone, with what it held and had measured."""
        del self.machines[self.drafter.name]
        self.router.worker_lost(self.drafter.name, self.now_s)
        self._send("router", self.now_s)

    def new_drafter(self, name: str) -> None:
        """Another comes, of which nothing is known."""
        self.drafter = self.machines[name] = self._new_drafter(name)
        self.free_s[name] = self.now_s
        self.router.worker_joined(name, "drafter", self.now_s)
        self._send("router", self.now_s)
        self._at(self.now_s, name, None)
