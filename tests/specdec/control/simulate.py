"""A pair of workers in virtual time: target steps, draft steps, branches, messages on their way.

It shares no formula with the controller, which sees only what the simulated workers report: noisy step times, verdicts,
hits and misses, echoes of heartbeats. What is simulated follows the real machines: the target takes whatever offer
has arrived at a step's boundary, holds a row back as long as its plan says, and goes on plainly otherwise; the drafter
prepares while the target verifies, from the moment the last verdict has reached it, and what it drafts reaches the
target one way later.

    python -m tests.specdec.control.simulate [--all] [--batch 1,8,64]
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.control.controller import Controller
from specdec.control.estimates import Round
from specdec.engine.timing import StepTimer
from specdec.protocol.messages import Plan

STEP_S = 0.030
ONE_WAY_S = 0.0015
SCRIPT_LENGTH = 4000
NOT_GUESSED = 9
MOST = 16
NEVER_S = 1e9
GUESS_SHARES = (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class Scenario:
    """A point of the grid.

    Attributes:
        batch: Sequences.
        alpha: How often the draft's token is the target's.
        cost: Draft step over target step.
        hit: How often the true token is among the draft's next three guesses where its first is refused.
        is_compute_bound: Whether a target step grows with its tokens beyond 16.
    """

    batch: int
    alpha: float
    cost: float
    hit: float
    is_compute_bound: bool

    def target_s(self, num_tokens: int) -> float:
        if not self.is_compute_bound:
            return STEP_S
        return STEP_S * (max(1.0, num_tokens / 16) + 0.01 * num_tokens)

    def draft_s(self, num_rows: int) -> float:
        return self.cost * STEP_S * max(1.0, num_rows / 64)


class Script:
    """True tokens, as the draft's rank of them: 0 its own, 1..3 a guess. Exact shares in every hundred tokens."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        rng = np.random.default_rng(seed)
        refused = round(100 * (1 - scenario.alpha))
        counts = [100 - refused, *(round(refused * scenario.hit * share) for share in GUESS_SHARES)]
        block = np.repeat([0, 1, 2, 3, NOT_GUESSED], [*counts, 100 - sum(counts)])
        blocks = np.tile(block, (scenario.batch, SCRIPT_LENGTH // 100, 1))
        self.ranks = rng.permuted(blocks, axis=2).reshape(scenario.batch, SCRIPT_LENGTH).astype(np.int64)
        alive = ok = self.ranks == 0
        self.runs = np.zeros_like(self.ranks)
        for i in range(1, 18):
            self.runs += alive
            alive = alive & np.roll(ok, -i, axis=1)


@lru_cache(maxsize=4096)
def fan_out(num_branches: int, acceptance_rate: float) -> np.ndarray:
    """Branches by draft length and number accepted: the likeliest outcomes first, three guesses at most at a place."""
    a = min(acceptance_rate, 0.98)
    table = np.zeros((MOST + 1, MOST + 1), dtype=np.int64)
    for length in range(MOST + 1):
        wanted = [(-(a**n) * 0.5**j, n) for n in range(length + 1) for j in range(3)]
        for _, n in heapq.nsmallest(num_branches, wanted):
            table[length, n] += 1
    return table


class Pairs:
    """Pairs of a target and a drafter that have nothing to do with each other, each in a time of its own.

    They are stepped together, as arrays of shape [pairs, sequences], which is many times faster than one by one.
    """

    def __init__(self, scenarios: Sequence[Scenario], scripts: Sequence[Script], seed: int) -> None:
        unique = {id(script): script for script in scripts}
        self.rng = np.random.default_rng(seed)
        self.scenarios = scenarios
        shape = len(scenarios), scenarios[0].batch
        self.ranks = np.stack([script.ranks for script in unique.values()]).ravel()
        self.runs = np.stack([script.runs for script in unique.values()]).ravel()
        which = np.array([list(unique).index(id(script)) for script in scripts])
        self.base = (which[:, None] * shape[1] + np.arange(shape[1])) * SCRIPT_LENGTH
        self.is_bound = np.array([one.is_compute_bound for one in scenarios])
        self.cost_s = np.array([one.cost * STEP_S for one in scenarios])
        self.now, self.draft_s = np.zeros(shape[0]), self.cost_s.copy()
        self.num_tokens = np.zeros(shape[0], dtype=np.int64)
        self.hits, self.misses = np.zeros(shape[0]), np.zeros(shape[0])
        ints = (np.zeros(shape, dtype=np.int64) for _ in range(7))
        self.at, self.length, self.branches, self.fit, self.spent, self.lead, self.next_lead = ints
        self.fan = np.zeros(shape, dtype=np.int64)
        self.fans = fan_out(0, 0.5)[None]
        self._fans: dict[tuple[int, float], int] = {(0, 0.5): 0}
        self.in_turn = np.zeros(shape, dtype=bool)
        self.hit = np.zeros(shape, dtype=bool)  # the outcome of the last step was prepared
        self.since = np.full(shape, NEVER_S)  # start of the preparation for the last outcome
        self.next_since = np.full(shape, NEVER_S)  # ... for the next one
        self.began, self.wait = np.zeros(shape), np.zeros(shape)
        self._replan()

    def plan(self, p: int, i: int, plan: Plan) -> None:
        """A plan reaches the workers; ``replanned`` must be called before the next step."""
        if plan.num_draft_tokens and not self.length[p, i]:  # the drafter reads the prompt first
            self.next_since[p, i] = self.now[p] + ONE_WAY_S + 3 * self.cost_s[p]
            self.hit[p, i], self.next_lead[p, i] = False, 0
        self.length[p, i], self.branches[p, i] = plan.num_draft_tokens, plan.num_branches
        self.fit[p, i] = plan.num_fit_steps
        self.in_turn[p, i], self.wait[p, i] = plan.mode == "in_turn", plan.draft_wait_s
        self.hit[p, i] &= plan.mode == "overlap"
        kind = plan.num_branches, round(plan.acceptance_rate, 2)
        if kind not in self._fans:
            self._fans[kind] = len(self._fans)
            self.fans = np.concatenate([self.fans, fan_out(*kind)[None]])
        self.fan[p, i] = self._fans[kind]

    def _replan(self) -> None:
        self.draft_rows = ((1 + self.branches) * (self.length > 0)).sum(1)
        self.half = np.maximum(1, -(-self.length // 2))
        self.is_ahead = (self.length > 0) & ~self.in_turn
        self.mean_draft_s = self.cost_s * np.maximum(1.0, self.draft_rows / 64)

    replanned = _replan

    def _offered(self, at_s: np.ndarray) -> np.ndarray:
        """Length of the draft that has reached the target."""
        since = np.where(self.hit, self.since, self.next_since)
        drafted = np.maximum((at_s[:, None] - ONE_WAY_S - since) / self.draft_s[:, None] + 1e-9, 0).astype(np.int64)
        drafted += np.where(self.hit, self.lead, 0)
        spent = np.where(self.hit, self.spent, 0)
        full = self.length + spent
        parts = np.where(self.in_turn | (self.branches > 0), 0, drafted // self.half * self.half)
        at_fit = (self.fit > 0) & (drafted >= self.fit) & self.is_ahead
        parts = np.where(at_fit, np.maximum(parts, self.fit), parts)
        sent = np.where(drafted >= full, full, np.minimum(parts, full))
        return np.clip(sent - spent, 0, self.length)

    def _ready(self, offered: np.ndarray) -> np.ndarray:
        """When each row may go on: now, or with the next offer, or when its patience ends."""
        now, spent = self.now[:, None], np.where(self.hit, self.spent, 0)
        since = np.where(self.hit, self.since, self.next_since)
        first = np.where((self.fit > spent) & self.is_ahead, np.minimum(self.fit, self.length + spent), self.length + spent)
        comes = since + (first - np.where(self.hit, self.lead, 0)) * self.draft_s[:, None] + ONE_WAY_S
        until = np.minimum(np.where(comes < now, np.inf, comes), self.began + self.wait)
        return np.where((offered > 0) | (self.length == 0), now, np.maximum(now, until))

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One target step of every pair: which rows, drafted, accepted [pairs, sequences]; seconds [pairs]."""
        self.draft_s = self.mean_draft_s * self._noise()
        ready = self._ready(self._offered(self.now))
        self.now = np.maximum(self.now, ready.min(1))
        rows = ready <= self.now[:, None] + 1e-12
        drafted = np.where(rows, self._offered(self.now), 0)
        accepted = np.minimum(drafted, self.runs.take(self.base + self.at % SCRIPT_LENGTH))
        ranks = self.ranks.take(self.base + (self.at + accepted) % SCRIPT_LENGTH)
        num_tokens = rows.sum(1) + drafted.sum(1)
        growth = np.maximum(1.0, num_tokens / 16) + 0.01 * num_tokens
        duration_s = STEP_S * np.where(self.is_bound, growth, 1.0) * self._noise()
        self._begin_after_the_chain(rows, drafted)
        self._prepare(rows, drafted, accepted, ranks, self.now + duration_s)
        self.began = np.where(rows, self.now[:, None], self.began)
        self.at += np.where(rows, accepted + 1, 0)
        self.now = self.now + duration_s
        self.num_tokens += rows.sum(1) + accepted.sum(1)
        return rows, drafted, accepted, duration_s

    def _begin_after_the_chain(self, rows: np.ndarray, drafted: np.ndarray) -> None:
        """Nothing is prepared for the outcomes of a chain before the chain itself is drafted: a row that waits shows."""
        since = np.where(self.hit, self.since, self.next_since)
        steps = drafted + np.where(self.hit, self.spent - self.lead, 0)
        done = since + steps * self.draft_s[:, None]
        self.next_since = np.where(rows & (drafted > 0), np.maximum(self.next_since, done), self.next_since)

    def _prepare(
        self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, ranks: np.ndarray, end_s: np.ndarray
    ) -> None:
        """Was the outcome of this step prepared, and when does the preparation for the next one begin?"""
        end, draft_s = end_s[:, None], self.draft_s[:, None]
        known = self.next_since < end
        whole = accepted == drafted
        prepares = rows & self.is_ahead
        hit = prepares & known & ((whole & (ranks == 0)) | ((ranks > 0) & (ranks <= self.fans[self.fan, drafted, accepted])))
        # Without branches the accepted path is drafted on and on: what the last chain has left is a lead.
        gap_s = np.where(self.hit & known, self.next_since - self.since, 0.0)
        left = np.clip((gap_s / draft_s).astype(np.int64) + self.lead - self.spent - drafted, 0, self.length + 1)
        counted = prepares & known & (self.branches > 0)
        self.hits += (hit & counted).sum(1)
        self.misses += (counted & ~hit).sum(1)
        self.lead = np.where(rows, np.where(self.hit & (self.branches == 0), left, 0), self.lead)
        self.hit = np.where(rows, hit, self.hit)
        self.spent = np.where(rows, whole, self.spent)
        self.since = np.where(rows, self.next_since, self.since)
        phase_s = np.where(self.is_ahead.any(1), self.rng.random(len(end_s)) * self.draft_s, 0.0)[:, None]
        begin_s = np.maximum(end + ONE_WAY_S + phase_s, np.where(known, 0.0, self.next_since))
        self.next_since = np.where(rows & (self.length > 0), begin_s, self.next_since)

    def _noise(self) -> np.ndarray:
        count = len(self.scenarios)
        return self.rng.lognormal(0.0, 0.05, count) * np.where(self.rng.random(count) < 0.01, 2.0, 1.0)


def fixed(scenario: Scenario, script: Script, plans: Sequence[Plan], num_steps: int, seed: int = 1) -> list[float]:
    """Tokens per second under each plan, given to all sequences."""
    pairs = Pairs([scenario] * len(plans), [script] * len(plans), seed)
    for p, plan in enumerate(plans):
        for i in range(scenario.batch):
            pairs.plan(p, i, plan)
    pairs.replanned()
    for _ in range(20):
        pairs.step()
    began_s, began_tokens = pairs.now, pairs.num_tokens.copy()
    for _ in range(num_steps):
        pairs.step()
    return list((pairs.num_tokens - began_tokens) / (pairs.now - began_s))


def fixed_plans(scenario: Scenario) -> list[Plan]:
    """The grid of fixed plans, with the true times for those that need a deadline."""
    a = round(scenario.alpha, 2)
    lengths = (1, 2, 3, 4, 6, 8, 12, 16)
    plans = [Plan()]
    plans += [Plan(n, acceptance_rate=a, mode="in_turn", draft_wait_s=1.0) for n in lengths]
    plans += [Plan(n, acceptance_rate=a) for n in lengths]
    for n in lengths:
        for branches in (2, 4, 8, 16, 32):
            draft_s = scenario.draft_s(scenario.batch * (1 + branches))
            step_s = scenario.target_s(scenario.batch * (1 + n))
            fit = int((0.95 * step_s - 2 * ONE_WAY_S) / draft_s)
            plans += [Plan(n, branches, min(k, n + 1), a) for k in (fit, fit - 1) if k > 0]
            chain_s = n * draft_s + 2 * ONE_WAY_S
            if chain_s > 0.8 * step_s:
                plans.append(Plan(n, branches, n, a, draft_wait_s=1.1 * max(chain_s, (step_s + chain_s) / 2)))
            plans.append(Plan(n, branches, n, a, draft_wait_s=1.1 * (step_s + chain_s)))
    return list(dict.fromkeys(plans))


def best_fixed(scenario: Scenario, script: Script) -> tuple[float, Plan]:
    """The best of the fixed plans: all for a short time, the best of them for a long one."""
    plans = fixed_plans(scenario)
    for num_steps, kept in ((100, 12), (600, 1)):
        rates = dict(zip(plans, fixed(scenario, script, plans, num_steps), strict=True))
        plans = sorted(plans, key=rates.__getitem__, reverse=True)[:kept]
    return rates[plans[0]], plans[0]


class Auto:
    """Pairs under a controller each."""

    def __init__(self, scenarios: Sequence[Scenario], scripts: Sequence[Script], seed: int = 2) -> None:
        self.pairs = Pairs(scenarios, scripts, seed)
        self.rng = random.Random(seed)
        self.scenarios = scenarios
        self.controllers = [Controller() for _ in scenarios]
        self.timers = [(StepTimer(), StepTimer()) for _ in scenarios]
        self.names = [f"s{i}" for i in range(scenarios[0].batch)]
        self.plans: list[list[Plan]] = []
        for p, controller in enumerate(self.controllers):
            self.plans.append([controller.opened(name, None) for name in self.names])
            for i, plan in enumerate(self.plans[p]):
                self.pairs.plan(p, i, plan)
        self.pairs.replanned()
        self.reported_s, self.reviewed_s = [0.0] * len(scenarios), [0.0] * len(scenarios)
        self.num_changes = [0] * len(scenarios)

    def run(self, seconds: float) -> np.ndarray:
        """Tokens per second of every pair in its next so many seconds."""
        pairs = self.pairs
        began_s, began_tokens = pairs.now.copy(), pairs.num_tokens.copy()
        rates = np.zeros(len(self.scenarios))
        while not rates.all():
            result = pairs.step()
            for p, entry in enumerate(zip(*result, strict=True)):
                if not rates[p]:
                    self._tell(p, *entry)
                    elapsed_s = pairs.now[p] - began_s[p]
                    if elapsed_s >= seconds:
                        rates[p] = (pairs.num_tokens[p] - began_tokens[p]) / elapsed_s
        return rates

    def _tell(self, p: int, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, duration_s: float) -> None:
        """What the router learns of a step, at once or with the next heartbeat."""
        pairs, controller = self.pairs, self.controllers[p]
        target_timer, draft_timer = self.timers[p]
        now_s = float(pairs.now[p])
        num_rows = int(rows.sum())
        target_timer.add(num_rows, num_rows + int(drafted.sum()), float(duration_s))
        num_draft_rows = int(pairs.draft_rows[p])
        if num_draft_rows:
            draft_timer.add(num_draft_rows, num_draft_rows, float(pairs.draft_s[p]))
        for name, is_there, n, m in zip(self.names, rows.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            if is_there:
                controller.decided(name, (Round(n, m),), now_s + ONE_WAY_S / 2)
        if now_s >= self.reported_s[p] + 1.0:
            self._report(p, now_s)
        if now_s >= self.reviewed_s[p] + 0.25:
            self._review(p, now_s)

    def _report(self, p: int, now_s: float) -> None:
        pairs, controller = self.pairs, self.controllers[p]
        self.reported_s[p] = now_s
        count = {"num_sequences": float(len(self.names))}
        hits = {"num_branch_hits": float(pairs.hits[p]), "num_branch_misses": float(pairs.misses[p])}
        controller.reported("T", "target", {**self.timers[p][0].report(), **hits, **count})
        busy_s = self.scenarios[p].target_s(len(self.names))
        controller.echoed("T", ONE_WAY_S + busy_s * (1 + self.rng.random()))
        if pairs.draft_rows[p]:
            controller.reported("D", "drafter", {**self.timers[p][1].report(), **count})
            controller.echoed("D", ONE_WAY_S + float(pairs.draft_s[p]) * (1 + self.rng.random()))

    def _review(self, p: int, now_s: float) -> None:
        self.reviewed_s[p] = now_s
        changed = self.controllers[p].review({name: ("T", "D") for name in self.names}, now_s)
        for name, plan in changed.items():
            i = int(name[1:])
            self.num_changes[p] += 1
            self.plans[p][i] = plan
            self.pairs.plan(p, i, plan)
        if changed:
            self.pairs.replanned()


@dataclass(frozen=True)
class Result:
    """Tokens per second at a point."""

    scenario: Scenario
    auto: float
    best: float
    alone: float
    plan: Plan
    choice: Plan
    num_changes: int

    @property
    def over_best(self) -> float:
        return self.auto / self.best

    @property
    def over_alone(self) -> float:
        return self.auto / self.alone


def measure(scenarios: Sequence[Scenario], seed: int = 0, warm_up_s: float = 12.0, run_s: float = 12.0) -> list[Result]:
    """Auto after its warm-up, the best fixed plan, and the target alone, over the same scripts; of one batch size."""
    scripts = [Script(scenario, seed) for scenario in scenarios]
    auto = Auto(scenarios, scripts)
    auto.run(warm_up_s)
    changes = list(auto.num_changes)
    rates = auto.run(run_s)
    results = []
    for p, (scenario, script) in enumerate(zip(scenarios, scripts, strict=True)):
        alone = fixed(scenario, script, [Plan()], 400)[0]
        best, plan = best_fixed(scenario, script)
        choice, num_changes = auto.plans[p][0], auto.num_changes[p] - changes[p]
        results.append(Result(scenario, float(rates[p]), max(best, alone), alone, plan, choice, num_changes))
    return results


def grid(batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> list[Scenario]:
    """All points."""
    return [
        Scenario(batch, alpha, cost, hit, bound)
        for batch in batches
        for alpha in (0.0, 0.5, 0.8, 0.95)
        for cost in (0.05, 0.1, 0.3, 1.0)
        for hit in (0.5, 0.9)
        for bound in (False, True)
    ]


def described(plan: Plan) -> str:
    if not plan.num_draft_tokens:
        return "off"
    wait = f" wait {plan.draft_wait_s:.3f}" if plan.draft_wait_s and plan.mode == "overlap" else ""
    fan = f" x{plan.num_branches} fit {plan.num_fit_steps}" if plan.mode == "overlap" else ""
    return f"{plan.mode} {plan.num_draft_tokens}{fan}{wait}"


def line(result: Result) -> str:
    one = result.scenario
    point = f"B {one.batch:2d} alpha {one.alpha:.2f} c {one.cost:.2f} hit {one.hit:.1f} "
    point += "compute" if one.is_compute_bound else "flat   "
    figures = f"auto/best {result.over_best:.3f} auto/alone {result.over_alone:.3f} best/alone {result.best / result.alone:.2f}"
    return f"{point}  {figures}  best: {described(result.plan)}; auto: {described(result.choice)} ({result.num_changes})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", default="1,2,4,8,16,32,64")
    parser.add_argument("--all", action="store_true", help="print every point, not the worst alone")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batches = tuple(int(batch) for batch in arguments.batch.split(","))
    results = []
    for batch in batches:
        results += measure(grid((batch,))[:: arguments.every], arguments.seed)
    results.sort(key=lambda result: result.over_best)
    for result in results if arguments.all else results[:24]:
        sys.stdout.write(line(result) + "\n")
    low = min(result.over_alone for result in results)
    sys.stdout.write(
        f"{len(results)} points: auto/best min {results[0].over_best:.3f}, "
        f"median {results[len(results) // 2].over_best:.3f}; auto/alone min {low:.3f}; "
        f"below .97: {sum(result.over_best < 0.97 for result in results)}, "
        f"below .98: {sum(result.over_alone < 0.98 for result in results)}\n"
    )


if __name__ == "__main__":
    main()
