"""What a drafter gains that is slow, what a second one adds, and what bad ones cost, on emulated devices.

    python -m benchmarks.several_drafters [--pairs 12] [--target 300] [--draft 60] [CASE ...]

Router, ingress, target and drafters are the service's own, each worker on a thread of its own, and their messages
travel as bytes within this process. A step takes its time by the clock; tokens come from scripts. Every pair decodes
the same texts in two ways, one after the other, and has a ratio of tokens per second. Rows give means, with their 95%
intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.emulation import EmulatedDevice, EmulatedDrafter, EmulatedTarget, step_cost
from benchmarks.limits import ScriptedPair
from benchmarks.scripted import ErringScript, Script, ScriptedDrafter, ScriptedTarget
from deployments.transport.host import Host, LoopHost, WorkerHost
from deployments.transport.wire import FrameReader, Messages, frames
from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.messages import DRAFTER
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.controller import Controller
from specdec.drafting.modes import Bounds
from specdec.drafting.plans import PlanController, Planner, fixed_plan
from specdec.engine.observed import ObservedDrafter, ObservedTarget
from specdec.engine.timing import StepMetrics, profile_drafter, profile_target
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import TargetSequence

VOCABULARY, MAX_LEN, ALPHA, NEXT_GUESS_RATE = tuple(range(64)), 4096, 0.7, 0.95
NUM_DRAFT_TOKENS, NUM_BRANCHES = 5, 16
KILLED_EVERY_S, REPLACED_AFTER_S = 5.0, 2.0
STUDENT = 2.201
"""95% of Student's distribution lies within so many deviations for twelve pairs, and more than 95% for more."""
TIMES = Times()
SCRIPT = Script(ALPHA, NEXT_GUESS_RATE, VOCABULARY)
LIAR = Script(0.0, 0.0, VOCABULARY)
OUTCOMES = fixed_plan(NUM_DRAFT_TOKENS, "overlap", num_branches=NUM_BRANCHES)


class RunsTarget(TargetMachine):
    """Notes for each round with drafts how many tokens of each drafter's chain were right.

    Attributes:
        runs: By round; who had no draft is not there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs: list[dict[str, int]] = []

    def _credit_drafters(self, sequence: TargetSequence, run: Tokens, num_accepted: int, num_drafted: int) -> list[str]:
        credited = super()._credit_drafters(sequence, run, num_accepted, num_drafted)
        said = {name: tokens for name, tokens, *_ in sequence.proposed}
        self.runs.append({name: _num_same(tokens, run[:num_accepted]) for name, tokens in said.items()})
        return credited


def _num_same(tokens: Sequence[int], run: Sequence[int]) -> int:
    return next(
        (i for i, (one, other) in enumerate(zip(tokens, run, strict=False)) if one != other), min(len(tokens), len(run))
    )


class Rates(NamedTuple):
    """Tokens per second of texts that begin at once: each text's own, summed; and by the last text to end."""

    each: float
    last: float


@dataclass
class Workers:
    """A target and its drafters under a router, and the ingress that asks it; what they are a subclass says.

    Args:
        planner: Of the router; a controller has its workers profile their steps.
        names: Of the drafters.
    """

    planner: Planner | PlanController
    names: tuple[str, ...] = (DRAFTER,)
    hosts: dict[str, Host[Any]] = field(default_factory=dict)
    _links: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)
    _ended: dict[str, asyncio.Future[float]] = field(default_factory=dict)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _num_requests: int = 0

    def make_target(self) -> TargetBackend:
        """The target's backend."""
        raise NotImplementedError

    def make_drafter(self, name: str) -> DraftBackend:
        """The backend of a drafter."""
        raise NotImplementedError

    def prompt(self, seed: int) -> Tokens:
        """Of the text of a seed."""
        raise NotImplementedError

    def check(self, seed: int, tokens: Sequence[int]) -> None:
        """Look at the text of a seed."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start all, and link them."""
        self.router = RouterMachine("router", self.planner, TIMES, drafters=self.names)
        self.hosts["router"] = LoopHost(self.router)
        ingress = IngressMachine("ingress", TIMES)
        self.hosts["ingress"] = LoopHost(ingress, after=lambda machine: self._deliver(machine.take_deliveries()))
        for host in self.hosts.values():
            host.start()
        self._link("ingress")
        self.hosts["ingress"].tell(lambda machine, now_s: machine.router_joined("router", now_s))
        self.target = RunsTarget("target", *await self._observed(self.make_target(), ObservedTarget, profile_target))
        self._join("target", "target", self.target)
        for name in self.names:
            await self.start_drafter(name)

    async def _observed(self, backend: Any, observed: Any, profile: Any) -> tuple[Any, Times, Any]:
        """What a machine takes: its backend, the protocol's times, and how to read what was measured."""
        steps = StepMetrics()
        if isinstance(self.planner, PlanController):
            await asyncio.to_thread(profile, backend, steps.profiled)
        return observed(backend, [steps]), TIMES, steps.metrics

    async def start_drafter(self, kind: str, replica: str = "") -> None:
        """Start a drafter's replica."""
        name = kind + replica
        machine = DrafterMachine(name, *await self._observed(self.make_drafter(kind), ObservedDrafter, profile_drafter))
        self._join(name, kind, machine)

    async def keep_killing(self, kind: str) -> None:
        """A drafter's replica dies every few seconds, and is replaced a while later."""
        name, number = kind, 0
        while True:
            await asyncio.sleep(KILLED_EVERY_S)
            self.hosts.pop(name).stop()
            for link in self._links.pop(name):
                link.cancel()
            self.hosts["router"].tell(lambda machine, now_s, name=name: machine.worker_lost(name, now_s))
            await asyncio.sleep(REPLACED_AFTER_S)
            number += 1
            name = f"{kind}#{number}"
            await self.start_drafter(kind, f"#{number}")

    def stop(self) -> None:
        """Stop all."""
        for links in self._links.values():
            for link in links:
                link.cancel()
        for host in self.hosts.values():
            host.stop()

    def _join(self, name: str, kind: str, machine: Any) -> None:
        self.hosts[name] = WorkerHost(machine)
        self.hosts[name].start()
        self._link(name)
        self.hosts["router"].tell(lambda router, now_s: router.worker_joined(name, kind, now_s))

    def _link(self, name: str) -> None:
        ends = (name, "router"), ("router", name)
        self._links[name] = [asyncio.create_task(self._carry(*end)) for end in ends]

    async def _carry(self, sender: str, receiver: str) -> None:
        """Messages as bytes, from one host to the other."""
        to, reader = self.hosts[receiver], FrameReader()
        async for batch in self.hosts[sender].attach(receiver).batches(TIMES.peer_timeout_s):
            for data in frames(batch, self.hosts[sender].unsendable):
                to.post(reader.decode(data, Messages).batch)

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self._tokens[delta.seq] += delta.tokens
            if delta.finish is not None:
                self._ended.pop(delta.seq).set_result(time.monotonic())

    async def decode(self, seeds: Sequence[int], num_tokens: int, most_drafted: int | None) -> Rates:
        """Decode texts at once; raises what :meth:`check` does."""
        began_s, seqs = time.monotonic(), []
        ended: list[asyncio.Future[float]] = []
        for seed in seeds:
            prompt = self.prompt(seed)
            self._num_requests += 1
            seq = f"s{self._num_requests}"
            seqs.append(seq)
            sampling = SamplingParams(ignore_eos=True)
            spec = SequenceSpec(sampling, seed, len(prompt), num_tokens, num_speculative_tokens=most_drafted)
            self._tokens[seq] = []
            self._ended[seq] = asyncio.get_running_loop().create_future()
            ended.append(self._ended[seq])
            self.hosts["ingress"].tell(
                lambda machine, now_s, of=(seq, prompt, spec): machine.start(*of, now_s)  # type: ignore[misc]
            )
        rates = [num_tokens / (ended_s - began_s) for ended_s in await asyncio.gather(*ended)]
        for seq, seed in zip(seqs, seeds, strict=True):
            self.check(seed, self._tokens.pop(seq))
        return Rates(sum(rates), len(rates) * min(rates))


class Swarm(Workers):
    """Scripted tokens on emulated devices.

    Args:
        planner: Of the router.
        drafters: By name, what each says and how long its step takes, in ms.
        target_cost: As in ``100+0.5/token``, in ms.
    """

    def __init__(
        self, planner: Planner | PlanController, drafters: dict[str, tuple[Script, str]], target_cost: str
    ) -> None:
        super().__init__(planner, tuple(drafters))
        self.drafters = drafters
        self.target_cost = target_cost

    def make_target(self) -> TargetBackend:
        """The target's backend."""
        return EmulatedTarget(ScriptedTarget(SCRIPT, MAX_LEN), EmulatedDevice(step_cost(self.target_cost)))

    def make_drafter(self, name: str) -> DraftBackend:
        """The backend of a drafter."""
        script, cost = self.drafters[name]
        return EmulatedDrafter(ScriptedDrafter(script, MAX_LEN), EmulatedDevice(step_cost(cost)))

    def prompt(self, seed: int) -> Tokens:
        """One token."""
        return (1,)

    def check(self, seed: int, tokens: Sequence[int]) -> None:
        """Compare a text with the script's.

        Raises:
            AssertionError: It is another.
        """
        assert tokens == [SCRIPT.true_token(seed, 1 + i) for i in range(len(tokens))]


@dataclass(frozen=True)
class Work:
    """How much is decoded."""

    num_pairs: int
    num_tokens: int
    target_cost: str
    draft_cost: str

    def late_cost(self) -> str:
        """Of a drafter whose step takes five of the target's."""
        return f"{5e3 * step_cost(self.target_cost).seconds(1, 1):g}"


Turn = Callable[[Sequence[int]], Coroutine[Any, Any, Rates]]
"""Decodes texts of some seeds."""
Case = Callable[[Work], Coroutine[Any, Any, str]]
"""Gives a row of the table."""


def seeds_of(pair: int, num_streams: int) -> list[int]:
    """Of the texts of a pair."""
    return [1000 * (pair + 1) + i for i in range(num_streams)]


async def ratios(work: Work, num_streams: int, plain: Turn, drafted: Turn) -> list[Rates]:
    """Of each pair, after one to warm up: tokens per second of the second way over those of the first."""
    found: list[Rates] = []
    for pair in range(work.num_pairs + 1):
        seeds = seeds_of(pair, num_streams)
        turns = (plain, drafted) if pair % 2 else (drafted, plain)
        rates = {turn: await turn(seeds) for turn in turns}
        found.append(Rates(*(one / other for one, other in zip(rates[drafted], rates[plain], strict=True))))
    return found[1:]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and the ends of its 95% interval."""
    logs = [math.log(value) for value in values]
    mean, count = statistics.fmean(logs), len(logs)
    reach = STUDENT * statistics.stdev(logs) / count**0.5
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)


async def slow(work: Work) -> str:
    """One drafter over outcomes, beside plain decoding and the limit of the script."""
    swarm = Swarm(OUTCOMES, {DRAFTER: (SCRIPT, work.draft_cost)}, work.target_cost)
    await swarm.start()
    found = await ratios(
        work,
        1,
        lambda seeds: swarm.decode(seeds, work.num_tokens // 3, 0),
        lambda seeds: swarm.decode(seeds, work.num_tokens, None),
    )
    swarm.stop()
    pair = ScriptedPair(ALPHA, NEXT_GUESS_RATE, step_cost(work.target_cost), step_cost(work.draft_cost))
    limit = pair.outcomes(NUM_DRAFT_TOKENS, NUM_BRANCHES) / pair.alone()
    return _row("one drafter over plain", found, f"limit {limit:.2f}")


def tokens_a_round(scripts: Sequence[Script], work: Work) -> float:
    """Mean over the texts' places of what a round gives that verifies a chain of each script, with the target's own."""
    found = []
    for seed in (seeds_of(pair, 1)[0] for pair in range(1, work.num_pairs + 1)):
        runs = [[0] * (work.num_tokens + 1) for _ in scripts]
        for at in range(work.num_tokens - 1, -1, -1):
            for of, script in zip(runs, scripts, strict=True):
                is_right = script.draft_tokens(seed, 1 + at, 0)[0] == script.true_token(seed, 1 + at)
                of[at] = 1 + of[at + 1] if is_right else 0
            found.append(1 + min(NUM_DRAFT_TOKENS, max(of[at] for of in runs)))
    return statistics.fmean(found)


def correlated(correlation: float) -> Case:
    """Two drafters whose errors are correlated so much, beside one."""

    async def run(work: Work) -> str:
        scripts = [ErringScript(0.0, 0.0, VOCABULARY, number, correlation) for number in range(2)]
        drafters = {name: (script, work.draft_cost) for name, script in zip((DRAFTER, "second"), scripts, strict=True)}
        one, two = (Swarm(OUTCOMES, part, work.target_cost) for part in ({DRAFTER: drafters[DRAFTER]}, drafters))
        await one.start()
        await two.start()
        found = await ratios(
            work,
            1,
            lambda seeds: one.decode(seeds, work.num_tokens, None),
            lambda seeds: two.decode(seeds, work.num_tokens, None),
        )
        one.stop()
        two.stop()
        alone = [statistics.fmean(1 + runs.get(name, 0) for runs in two.target.runs) for name in drafters]
        union = statistics.fmean(1 + max(runs.values()) for runs in two.target.runs)
        of_texts = tokens_a_round(scripts, work) / max(tokens_a_round([script], work) for script in scripts)
        shown = f"tokens a round {alone[0]:.2f}, {alone[1]:.2f}, of both {union:.2f}; by the texts {of_texts:.3f}"
        return _row(f"two drafters over one, correlation {correlation:g}", found, shown)

    return run


def bad(what: str, num_streams: int) -> Case:
    """Drafters of no use, under the controller, beside plain decoding."""

    async def run(work: Work) -> str:
        kinds = {
            "killed": (SCRIPT, work.draft_cost),
            "lies": (LIAR, work.draft_cost),
            "late": (SCRIPT, work.late_cost()),
        }
        chosen = [*kinds] if what == "all" else [what]
        drafters = {DRAFTER if not i else kind: kinds[kind] for i, kind in enumerate(chosen)}
        swarm = Swarm(Controller(Bounds(num_branches=NUM_BRANCHES)), drafters, work.target_cost)
        await swarm.start()
        killing = asyncio.create_task(swarm.keep_killing(DRAFTER)) if "killed" in chosen else None
        found = await ratios(
            work,
            num_streams,
            lambda seeds: swarm.decode(seeds, work.num_tokens // 2, 0),
            lambda seeds: swarm.decode(seeds, work.num_tokens // 2, None),
        )
        if killing is not None:
            killing.cancel()
        swarm.stop()
        num_deaths = sum(swarm.router.counters.num_worker_deaths.values())
        return _row(f"{what}, {num_streams} streams, over plain", found, f"{num_deaths} deaths")

    return run


CASES: dict[str, Case] = {
    "slow": slow,
    **{f"correlated-{correlation}": correlated(correlation) for correlation in (0.5, 0.8)},
    **{f"{what}-{count}": bad(what, count) for what in ("killed", "lies", "late", "all") for count in (1, 16)},
}


def _row(name: str, found: Sequence[Rates], shown: str) -> str:
    of_each, of_last = ("{:.3f} ({:.3f} to {:.3f})".format(*interval(values)) for values in zip(*found, strict=True))
    return f"| {name} | {of_each} | {of_last} | {shown} |"


def main() -> None:
    """Run cases, and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=192, help="of a text")
    parser.add_argument("--target", default="300", help="time of a step in ms, such as 300+3/token")
    parser.add_argument("--draft", default="60")
    given = parser.parse_args()
    work = Work(given.pairs, given.tokens, given.target, given.draft)
    print("| what | rate, each text's own | by the last text to end | |\n|---|---|---|---|")
    for name in given.cases:
        print(asyncio.run(CASES[name](work)), flush=True)


if __name__ == "__main__":
    main()
