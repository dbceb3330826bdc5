"""The real router, target and drafter in virtual time, with scripted backends: what the simulated pair is held against.

A worker's step takes its messages at its start and sends its own at its end, as an engine's thread does; a message
takes half a way to the router and half a way from it.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.messages import Message, Plan
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.control.pairs import NOISE, ONE_WAY_S, PAUSE, PAUSE_RATE, Scenario

MAX_LEN = 1 << 16
POLL_S = 0.001
STAGGER = 0.7
Machine = RouterMachine | TargetMachine | DrafterMachine | IngressMachine


class Machines:
    """One pair, all sequences under one plan."""

    def __init__(self, scenario: Scenario, plan: Plan, seed: int = 0) -> None:
        self.scenario = scenario
        self.rng = np.random.default_rng(seed)
        times = Times(lease_s=1e6, silence_s=1e6, renew_s=1e5)
        script = Script(scenario.alpha, scenario.hit, tuple(range(64)))
        self.target = TargetMachine("target", ScriptedTarget(script, MAX_LEN), times)
        self.drafter = DrafterMachine("drafter", ScriptedDrafter(script, MAX_LEN), times)
        self.ingress = IngressMachine("ingress", times)
        self.router = RouterMachine("router", lambda spec: plan, times)
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

    def tokens_per_s(self, num_steps: int, warm_up: int = 20) -> float:
        """Over so many target steps."""
        self._run(warm_up)
        began_s, began = self.now_s, self.target.counters.num_committed_tokens
        self._run(num_steps)
        return (self.target.counters.num_committed_tokens - began) / (self.now_s - began_s)

    def _run(self, num_steps: int) -> None:
        until = self.target.counters.num_steps + num_steps
        while self.target.counters.num_steps < until:
            self.now_s, _, name, messages = heapq.heappop(self.events)
            if name.startswith("start"):
                self._start(int(name.split()[1]))
                continue
            for message in messages or ():
                self.machines[name].receive(message, self.now_s)
            if messages is not None and name in ("router", "ingress"):
                self._send(name, self.now_s)
            elif messages is None and self.now_s >= self.free_s[name]:
                self._step(name)

    def _start(self, i: int) -> None:
        spec = SequenceSpec(SamplingParams(ignore_eos=True), i, 1, MAX_LEN - 8)
        self.ingress.start(f"s{i}", (1,), spec, self.now_s)
        self.ingress.step(self.now_s)
        self._send("ingress", self.now_s)

    def _step(self, name: str) -> None:
        machine, now_s = self.machines[name], self.now_s
        before = self.target.counters.num_steps, self.target.counters.num_rounds, self.target.counters.num_draft_tokens
        proposed = self.drafter.counters.num_proposed_tokens
        worked = machine.step(now_s)
        end_s = now_s + POLL_S
        if worked and name == "target":
            counters = self.target.counters
            num_tokens = counters.num_rounds - before[1] + counters.num_draft_tokens - before[2]
            end_s = now_s + self.scenario.target_s(num_tokens) * self._noise()
        elif worked:
            end_s = now_s + self.scenario.draft_s(self.drafter.counters.num_proposed_tokens - proposed) * self._noise()
        self.free_s[name] = end_s
        self._send(name, end_s)
        self._at(end_s, name, None)

    def _send(self, name: str, at_s: float) -> None:
        for peer, messages in self.machines[name].take_outbox().items():
            self._at(at_s + ONE_WAY_S / 2, peer, messages)

    def _at(self, at_s: float, name: str, messages: list[Message] | None) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), name, messages))

    def _noise(self) -> float:
        return float(self.rng.lognormal(0.0, NOISE) * (PAUSE if self.rng.random() < PAUSE_RATE else 1.0))
