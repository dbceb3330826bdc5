"""Ingress, routers, targets and drafters of the real code under a random adversary."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.core.messages import DRAFTER, Message, Plan, PlanUpdate
from specdec.core.params import SequenceSpec
from specdec.core.types import Fingerprints
from specdec.drafting.ngram import NgramOptions
from specdec.engine.pair import PairedTarget
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from tests.letters import ACCEPTED, spelled
from tests.specdec.protocol.network import Network
from tests.specdec.protocol.scripted import (
    PROMPT,
    DiesError,
    DraftModel,
    Script,
    ScriptedDraft,
    ScriptedTarget,
    ViolationError,
    expect,
)
from tests.specdec.protocol.watch import Client, Node, Watch

TIMES = Times(
    lease_s=8, renew_interval_s=3, retry_interval_s=3, renew_grace_s=2, peer_timeout_s=10, max_unacked_tokens=6
)
INGRESS, ROUTERS, TARGETS, DRAFTERS = "I", ("R0", "R1"), ("T0", "T1"), ("D0", "D1")
REQUESTS = ("s0", "s1", "s2")
MOST_BRANCHES = 6
QUIET_STEPS, OPENS, DRAFT_OPENS, DEATHS = 300, 24, 14, 16
OURS, THEIRS = "this model", "another model"
"""Bounds on a request once the adversary has stopped."""


@dataclass
class Adversary:
    """How likely each misfortune is, in a step, for the process that is looked at."""

    crash: float
    lapse: float
    cancel: float
    stall: float
    rumour: float
    plan: float
    drain: float = 0
    failing: float = 0
    update: float = 0

    @classmethod
    def random(cls, rng: random.Random) -> Adversary:
        pick = rng.choice
        return cls(
            crash=pick((0, 0.05, 0.2)),
            lapse=pick((0, 0.08, 0.2)),
            cancel=pick((0, 0.04)),
            stall=pick((0, 0, 0.1)),
            rumour=pick((0, 0.04)),
            plan=pick((0, 0.2)),
            drain=pick((0, 0.03)),
            failing=pick((0, 0, 0.1)),
            update=pick((0, 0, 0, 0.3)),
        )


NOTHING = Adversary(crash=0, lapse=0, cancel=0, stall=0, rumour=0, plan=0)


@dataclass
class Result:
    """What became of a schedule."""

    seed: int
    violation: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    worst: tuple[int, int, int] = (0, 0, 0)


class World:
    """One schedule. Time counts steps; ``seed`` gives all randomness. With even seeds targets repeat themselves."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.repeats, self.now = seed % 2 == 0, 0
        self.net, self.adversary = Network(rng), Adversary.random(rng)
        self.skill, self.room = rng.choice((0.0, 0.7, 0.95, 1.0)), rng.choice((1, 1, 2))
        self.target_period, self.drafts_per_step = rng.choice((1, 1, 2, 4)), rng.choice((1, 3))
        max_model_len = rng.choice((16, 64))
        self.draft_max_model_len = rng.choice((10, max_model_len))
        self.scripts = {seq: Script.random(rng, seq, max_model_len) for seq in REQUESTS}
        self.draft_model = DraftModel(self.scripts, seed, skill=self.skill)
        self.takes_trees = seed // 16 % 2 == 0
        self.is_paired = seed % 16 in (4, 5)  # beside drafters of their own
        self.draft_room = rng.choice((2, 6, 30))
        self.num_step_tokens = 3 if seed % 3 == 1 else 1
        self.watch = Watch(self.scripts, TIMES, repeats=self.repeats, most_branches=MOST_BRANCHES)
        self.counts: Counter[str] = Counter()
        self.worst = (0, 0, 0)
        self.num_deaths: Counter[str] = Counter()
        self._news: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._lost: set[tuple[str, str]] = set()
        self.nodes: dict[str, Node] = {}
        for name in (INGRESS, *ROUTERS, *TARGETS, *DRAFTERS):
            self._begin(name, 0)
        for listener in (INGRESS, *ROUTERS):
            self._introduce(listener)

    def run(self) -> None:
        """A hostile time, a quiet one until all requests are finished, and a last check that nothing is left."""
        for _ in range(self.rng.randint(20, 70)):
            self.step()
            self.disturb()
        for name in self.rng.sample(ROUTERS + TARGETS + DRAFTERS, self.rng.randint(0, 3)):
            self._restart(self.nodes[name])  # so that the quiet begins where it is hardest
        for node in list(self.nodes.values()):
            if node.is_draining:
                self._restart(node)  # who drains is replaced
        self._calm_down()
        self.await_clients()
        self._drain(20)
        self.now += self.rng.choice((0, int(TIMES.tombstone_s) + 1))
        # Before the tombstones are gone nothing of this may come back to the same life; after that, for a lease.
        self.net.repeat_all_openings(self.now)
        self._drain(0)

    def step(self) -> None:
        """All mail of this step, then a step of every machine."""
        self.now += 1
        self.counts["steps"] += 1
        for tell in self._news.pop(self.now, []):
            tell()
        for name, message in self.net.arrivals(self.now):
            node = self.nodes[name]
            if node.stalled_until > self.now:
                self.net.hold(name, message, node.stalled_until)
                continue
            node.machine.receive(message, self.now)
            self.watch.received(node, message, self.now)
        for node in self.nodes.values():
            if node.stalled_until > self.now:
                continue
            try:
                for _ in range(self._pace(node)):
                    node.machine.step(self.now)
                    self.watch.moved(node, self.now)
            except DiesError as death:
                self.counts["deaths"] += 1
                self.num_deaths[death.seq] += not self.net.is_hostile
                self._restart(node, is_told=True)
                continue
            except OverflowError as error:
                raise ViolationError("an id that no token can have fails a process") from error
            if isinstance(node.machine, IngressMachine):
                self.watch.delivered(node.machine.take_deliveries())
            for peer, messages in node.machine.take_outbox().items():
                for message in messages:
                    self._send(node.name, peer, message)
        if not self.net.is_hostile:
            self.watch.followed(self.nodes, self.now)

    def _pace(self, node: Node) -> int:
        """How many steps a machine makes now: a target is slow, a drafter may be fast."""
        if node.name in TARGETS:
            return int(self.now % self.target_period == 0)
        return self.drafts_per_step if node.name in DRAFTERS else 1

    def _send(self, sender: str, peer: str, message: Message) -> None:
        self.watch.sent(sender, peer, message, is_hostile=self.net.is_hostile)
        self.net.send(sender, peer, message, self.now)

    # Processes, and who hears of them.

    def _begin(self, name: str, life: int, model: str = OURS) -> None:
        node = self.nodes[name] = Node(name, life, IngressMachine(name, TIMES, fingerprints=_fingerprints(OURS)))
        match name[0]:
            case "R":
                router = node.machine = RouterMachine(name, self._plan, TIMES, fingerprints=_fingerprints(model))
                self.watch.follow(router)
            case "T":
                backend = self._target_backend()
                node.backends, decides = (backend,), backend
                if self.is_paired:
                    beside = self._draft_backend()
                    node.backends, decides = (backend, beside), PairedTarget(backend, beside, 5)
                node.machine = TargetMachine(
                    name,
                    decides,
                    TIMES,
                    fingerprint=_fingerprints(model).decision,
                    ngram=NgramOptions(5),
                )
            case "D":
                drafter = self._draft_backend()
                node.backends = (drafter,)
                node.machine = DrafterMachine(name, drafter, TIMES)

    def _target_backend(self) -> ScriptedTarget:
        backend = ScriptedTarget(
            self.scripts,
            self.rng,
            repeats=self.repeats,
            room=self.room,
            draft_models=(self.draft_model,),
            takes_trees=self.takes_trees,
        )
        backend.failing, backend.num_alone = self.adversary.failing, self.watch.num_alone
        return backend

    def _draft_backend(self) -> ScriptedDraft:
        return ScriptedDraft(
            self.draft_model,
            room=self.draft_room,
            max_model_len=self.draft_max_model_len,
            num_step_tokens=self.num_step_tokens,
        )

    def _plan(self, spec: SequenceSpec) -> Plan:
        pick = self.rng.choice
        return Plan(
            num_draft_tokens=pick((0, 2, 5, 5)),
            num_branches=pick((0, 1, MOST_BRANCHES)),
            acceptance_rate=pick((0.0, 0.7, 1.0)),
            mode=pick(("overlap", "overlap", "sequential")),
            draft_wait_s=pick((0, 0, 6)),
        )

    def _listeners(self, name: str) -> tuple[str, ...]:
        return (INGRESS,) if name in ROUTERS else ROUTERS

    def _introduce(self, listener: str) -> None:
        """A new process is told of all its peers, of some of them late."""
        for name in ROUTERS if listener == INGRESS else TARGETS + DRAFTERS:
            self._lost.add((listener, name))
            self._tell_later(listener, name, self.rng.choice((0, 0, 0, 10)))

    def _tell(self, listener: str, name: str, *, joined: bool) -> None:
        machine = self.nodes[listener].machine
        if isinstance(machine, IngressMachine):
            (machine.router_joined if joined else machine.router_lost)(name, self.now)
        elif isinstance(machine, RouterMachine) and joined:
            machine.worker_joined(name, "target" if name in TARGETS else DRAFTER, self.now)
        elif isinstance(machine, RouterMachine):
            machine.worker_lost(name, self.now)
        (self._lost.discard if joined else self._lost.add)((listener, name))

    def _tell_later(self, listener: str, name: str, steps: int) -> None:
        if steps:
            self._news[self.now + steps].append(lambda: self._tell(listener, name, joined=True))
        else:
            self._tell(listener, name, joined=True)

    def _lose(self, listener: str, name: str) -> None:
        """A listener takes a process for dead, rightly or not, and meets it again later."""
        self._tell(listener, name, joined=False)
        self._tell_later(listener, name, self.rng.randint(1, 20))

    # The adversary.

    def disturb(self) -> None:
        for seq, script in self.scripts.items():
            if seq not in self.watch.clients and script.arrival <= self.now:
                self.watch.clients[seq] = Client()
                self._ingress.start(seq, PROMPT, script.spec, self.now)
        node = self.rng.choice(list(self.nodes.values()))
        if node.name == INGRESS:
            self._maybe_cancel()
        elif self.rng.random() < self.adversary.crash:
            self._restart(node)
        elif self.rng.random() < self.adversary.drain and not isinstance(node.machine, IngressMachine):
            self.watch.drains(node)
            node.machine.drain(self.now)
            self.counts["drains"] += 1
        elif node.sequences and self.rng.random() < self.adversary.lapse:
            self.rng.choice(node.sequences).lease_until_s = 0
            self.counts["lapses"] += 1
        elif self.rng.random() < self.adversary.stall:
            node.stalled_until = self.now + self.rng.randint(2, 15)
            self.counts["stalls"] += 1
        elif self.rng.random() < self.adversary.rumour:
            self._lose(self.rng.choice(self._listeners(node.name)), node.name)
            self.counts["rumours"] += 1
        elif node.sequences and node.backends and self.rng.random() < self.adversary.plan:
            sequence: Any = self.rng.choice(node.sequences)
            self._send(
                sequence.router,
                node.name,
                PlanUpdate(sequence.seq, sequence.epoch, self._plan(self.scripts[sequence.seq].spec)),
            )

    @property
    def _ingress(self) -> IngressMachine:
        machine = self.nodes[INGRESS].machine
        assert isinstance(machine, IngressMachine)
        return machine

    def _maybe_cancel(self) -> None:
        for seq, client in self.watch.clients.items():
            if client.state == "live" and self.rng.random() < self.adversary.cancel / 2:
                client.state = "cancelled"
                self._ingress.cancel(seq)

    def _restart(self, node: Node, *, is_told: bool = False) -> None:
        """A process dies, and its address is taken by another, of which not everybody is told.

        In an update it is of another model; then everybody is told, as its address is never taken again.
        """
        self.counts["restarts"] += 1
        was_ours = node.model == OURS
        is_update = self.net.is_hostile and self.rng.random() < self.adversary.update
        model = THEIRS if is_update and node.name not in DRAFTERS else OURS
        self._begin(node.name, node.life + 1, model)
        self.nodes[node.name].model = model
        self.counts["updates"] += model == THEIRS
        if node.name in ROUTERS:
            self._introduce(node.name)
        if self.rng.random() < 0.5 and self.net.is_hostile:
            self.net.repeat_openings(node.name, self.now)
        if self.rng.random() < 0.5:
            self.net.repeat_last_words(node.name, self.now)
        for listener in self._listeners(node.name):
            is_told |= not (was_ours and model == OURS) or node.is_draining
            match "lost" if is_told else self.rng.choice(("lost", "joined", "joined", "untold")):
                case "lost":
                    self._lose(listener, node.name)
                case "joined":
                    self._tell_later(listener, node.name, self.rng.choice((0, 0, 2, 10)))

    # The quiet after it.

    def _calm_down(self) -> None:
        self.net.calm_down(self.now)
        self.adversary.failing = 0
        for node in self.nodes.values():
            for backend in node.backends:
                if isinstance(backend, ScriptedTarget):
                    backend.failing = 0
        self._news.clear()
        for listener, name in sorted(self._lost):
            self._tell_later(listener, name, self.rng.randint(1, 20))

    def await_clients(self) -> None:
        began, clients, watch = self.now, self.watch.clients.values(), self.watch
        while any(client.state == "live" for client in clients):
            expect(self.now - began < QUIET_STEPS * self.target_period, "a request does not finish")
            self.step()
            opens, draft_opens = (
                max(watch.num_opens.values(), default=0),
                max(watch.num_draft_opens.values(), default=0),
            )
            self.worst = self.now - began, opens, draft_opens
            expect(opens <= OPENS, "opened again and again")
            expect(draft_opens <= DRAFT_OPENS, "a drafter is never in step again")
            expect(max(self.num_deaths.values(), default=0) <= DEATHS, "a sequence kills process after process")
        for client in clients:
            self.counts[client.state] += 1
            self.counts["errors"] += client.finish == "error"
            self.counts["tokens"] += len(client.tokens)
            how = spelled(client.notes)
            self.counts["accepted"] += sum(letter in ACCEPTED for letter in how)
            self.counts["predicted"] += how.count("x")
        for node in self.nodes.values():
            if isinstance(node.machine, DrafterMachine):
                self.counts["promoted"] += node.machine.counters.num_promoted
            elif isinstance(node.machine, TargetMachine):
                counters = node.machine.counters
                self.counts["branch hits"] += counters.num_branch_hits
                if self.is_paired:
                    self.counts["of pairs"] += counters.by_source["model"].num_accepted_tokens

    def _drain(self, steps: int) -> None:
        for _ in range(steps + 3 * int(TIMES.lease_s) + 5):
            self.step()
        expect(not any(node.sequences for node in self.nodes.values()), "a sequence is held for ever")
        expect(not len(self._ingress), "the ingress keeps a request for ever")
        held = [backend.held for node in self.nodes.values() for backend in node.backends]
        expect(not any(held), "a backend keeps a sequence")
        for node in self.nodes.values():
            node.machine.drain(self.now)
            expect(node.machine.is_drained, "a process with nothing left is not drained")
            node.machine.is_draining = False


def run_schedule(seed: int) -> Result:
    """Run one schedule; a violation, or whatever else the machines raise, is named in the result."""
    world, result = World(seed), Result(seed)
    try:
        world.run()
    except ViolationError as violation:
        result.violation = str(violation)
    except Exception as error:
        result.violation = f"raised {error!r}"
    result.counts, result.worst = world.counts, world.worst
    result.counts["messages"] = world.net.num_messages
    return result


def _fingerprints(model: str) -> Fingerprints:
    return Fingerprints(decision=model)
