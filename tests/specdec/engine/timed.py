"""The real machines with scripted tokens on a virtual clock: what is left when computing takes no time but steps do."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.messages import Message, Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine

IDLE_S = 0.005
PROMPT = range(8)


def one_way(mean_s: float, seed: int = 0, spread: float = 0.3) -> Callable[[], float]:
    """One-way times between a worker and the router, drawn from a log-normal distribution."""
    rng = random.Random(seed)
    return lambda: mean_s * rng.lognormvariate(0.0, spread)


class TimedService:
    """Ingress, router, target and drafter; each worker is deaf while it is in a step, and says what it has after it.

    Args:
        plan: Of every sequence.
        step_s: Of the target and of the drafter.
        latency: Gives the one-way time of each batch between a worker and the router.
    """

    def __init__(self, plan: Plan, script: Script, step_s: dict[str, float], latency: Callable[[], float]) -> None:
        times = Times(lease_s=1e6, peer_timeout_s=1e6)
        self.now_s = 0.0
        self.target = TargetMachine("target", ScriptedTarget(script, 1 << 20), times)
        self.drafter = DrafterMachine("drafter", ScriptedDrafter(script, 1 << 20), times)
        self.router = RouterMachine("router", lambda spec: plan, times)
        self.ingress = IngressMachine("ingress", times)
        self._machines: dict[str, Any] = {m.name: m for m in (self.target, self.drafter, self.router, self.ingress)}
        self._step_s, self._latency = step_s, latency
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._inbox: dict[str, list[Message]] = {"target": [], "drafter": []}
        self._is_busy = {"target": False, "drafter": False}
        self._num_turns = {"target": 0, "drafter": 0}
        self._link_s: dict[tuple[str, str], float] = {}
        self.arrivals: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
        self._num_finished = 0
        for kind in ("target", "drafter"):
            self.router.worker_joined(kind, kind, 0.0)
        self.ingress.router_joined("router", 0.0)

    def run(self, num_sequences: int, max_tokens: int, first_seed: int) -> float:
        """Tokens per second of all sequences, each from its first tokens to its last."""
        for i in range(num_sequences):
            spec = SequenceSpec(SamplingParams(temperature=0.0), first_seed + i, len(PROMPT), max_tokens)
            self.ingress.start(f"s{i}", PROMPT, spec, 0.0)
        self._send("ingress")
        for worker in self._inbox:
            self._turn(worker)
        while self._num_finished < num_sequences:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        return sum(
            sum(len(tokens) for _, tokens in came[1:]) / (came[-1][0] - came[0][0]) for came in self.arrivals.values()
        )

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action))

    def _send(self, name: str) -> None:
        for peer, messages in self._machines[name].take_outbox().items():
            delay_s = 0.0 if "ingress" in (peer, name) else self._latency()
            arrival_s = self._link_s[name, peer] = max(self.now_s + delay_s, self._link_s.get((name, peer), 0.0))
            self._at(arrival_s, lambda peer=peer, messages=messages: self._deliver(peer, messages))

    def _deliver(self, peer: str, messages: list[Message]) -> None:
        if peer in self._inbox:
            self._inbox[peer] += messages
            if not self._is_busy[peer]:
                self._turn(peer)
            return
        for message in messages:
            self._machines[peer].receive(message, self.now_s)
        self._machines[peer].step(self.now_s)
        self._send(peer)
        for delivery in self.ingress.take_deliveries():
            self.arrivals.setdefault(delivery.seq, []).append((self.now_s, tuple(delivery.tokens)))
            self._num_finished += delivery.finish is not None

    def _turn(self, worker: str) -> None:
        """What came, then a step; its results go out when it is over."""
        machine = self._machines[worker]
        self._num_turns[worker] += 1
        for message in self._inbox[worker]:
            machine.receive(message, self.now_s)
        self._inbox[worker] = []
        if machine.step(self.now_s):
            self._is_busy[worker] = True
            self._at(self.now_s + self._step_s[worker], lambda: self._end(worker))
        else:
            self._send(worker)
            turn = self._num_turns[worker]
            self._at(self.now_s + IDLE_S, lambda: self._turn(worker) if turn == self._num_turns[worker] else None)

    def _end(self, worker: str) -> None:
        self._is_busy[worker] = False
        self._send(worker)
        self._turn(worker)
