"""The controller in a simulation, against every fixed plan and the target alone.

python -m tests.specdec.control.simulate [--all] [--batch 1,8,64] [--every N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.control.controller import Controller
from specdec.control.estimates import Round
from specdec.engine.timing import StepTimer
from specdec.protocol.branches import branch_share
from specdec.protocol.messages import Plan
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.control.pairs import MEAN_NOISE, ONE_WAY_S, Pairs, Scenario, Script

WARM_UP_STEPS = 700
SHORT, LONG = 800, 3200
ARRIVAL_STEPS = 8
MOST_ROWS = 1 << 15
SPEC = SequenceSpec(SamplingParams(), 0, 1, 1 << 20)


@dataclass(frozen=True)
class Case:
    """A plan that all sequences of a point are given."""

    scenario: Scenario
    script: Script
    plan: Plan


def fixed(cases: Sequence[Case], num_steps: int, seed: int = 1) -> list[float]:
    """Tokens per second of each case; all of one batch size.

    Sequences come one after another, as requests do. Were all to come at once, those that draft in turn would go on in
    step for ever; as it is they end up in two halves of which one is verified while the other drafts.
    """
    batch = cases[0].scenario.batch
    most = max(1, MOST_ROWS // batch)
    if len(cases) > most:
        return [rate for i in range(0, len(cases), most) for rate in fixed(cases[i : i + most], num_steps, seed + i)]
    pairs = Pairs([case.scenario for case in cases], [case.script for case in cases], seed)
    for step in range(ARRIVAL_STEPS):
        for i in range(batch):
            if i * ARRIVAL_STEPS // batch == step:
                for p, case in enumerate(cases):
                    pairs.plan(p, i, case.plan)
        pairs.replanned()
        pairs.step()
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
        for branches in [b for b in (2, 4, 8, 16, 32) if b <= branch_share(scenario.batch)]:
            draft_s = scenario.draft_s(scenario.batch * (1 + branches))
            step_s = scenario.target_s(scenario.batch * (1 + n))
            fit = int((0.95 * step_s - 2 * ONE_WAY_S) / draft_s)
            plans += [Plan(n, branches, min(k, n + 1), a) for k in (fit, fit - 1) if k > 0]
            chain_s = n * draft_s + 2 * ONE_WAY_S
            if chain_s > 0.8 * step_s:
                plans.append(Plan(n, branches, n, a, draft_wait_s=1.1 * max(chain_s, (step_s + chain_s) / 2)))
            plans.append(Plan(n, branches, n, a, draft_wait_s=1.1 * (step_s + chain_s)))
    return list(dict.fromkeys(plans))


def best_fixed(scenarios: Sequence[Scenario], scripts: Sequence[Script]) -> list[tuple[float, Plan]]:
    """The best fixed plan of each: all for a short time, the best of them for longer ones, the very best once more.

    That last time decides: the best figure of several would be the luckiest one.
    """
    batch = scenarios[0].batch
    plans = [fixed_plans(scenario) for scenario in scenarios]

    def cases() -> list[Case]:
        points = zip(scenarios, scripts, plans, strict=True)
        return [Case(scenario, script, plan) for scenario, script, some in points for plan in some]

    for num_steps, kept in ((80, 12), (400, 3), (max(800, 4000 // batch), 1)):
        rates = iter(fixed(cases(), num_steps, num_steps))
        rated = [{plan: next(rates) for plan in some} for some in plans]
        plans = [sorted(one, key=one.__getitem__, reverse=True)[:kept] for one in rated]
    return list(zip(fixed(cases(), max(2400, 12000 // batch)), (some[0] for some in plans), strict=True))


def alone(scenario: Scenario) -> float:
    """Tokens per second of the target alone: a token per sequence and step."""
    return scenario.batch / (scenario.target_s(scenario.batch) * MEAN_NOISE)


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
            self.plans.append([controller.opened(name, SPEC) for name in self.names])
            for i, plan in enumerate(self.plans[p]):
                self.pairs.plan(p, i, plan)
        self.pairs.replanned()
        self.reported_s, self.reviewed_s = [0.0] * len(scenarios), [0.0] * len(scenarios)
        self.num_changes = [0] * len(scenarios)
        # Rounds of each sequence that the router has not heard of yet, and when the last of them ended.
        self.pending: list[list[list[Round]]] = [[[] for _ in self.names] for _ in scenarios]
        self.decided_s = [[0.0] * len(self.names) for _ in scenarios]

    def run(self, num_steps: int, warm_up: int = WARM_UP_STEPS) -> np.ndarray:
        """Tokens per second of every pair, in the time of so many of its plain steps after those of the warm-up.

        No pair waits for another in between: what its controller is not told of would look like a slow round to it.
        """
        pairs = self.pairs
        plain_s = np.array([one.target_s(one.batch) for one in self.scenarios])
        began_s, began_tokens = np.full(len(plain_s), np.inf), np.zeros(len(plain_s))
        rates = np.zeros(len(plain_s))
        while not rates.all():
            result = pairs.step()
            for p, entry in enumerate(zip(*result, strict=True)):
                if rates[p]:
                    continue
                self._note(p, *entry)
                if began_s[p] == np.inf and pairs.now[p] >= warm_up * plain_s[p]:
                    began_s[p], began_tokens[p], self.num_changes[p] = pairs.now[p], pairs.num_tokens[p], 0
                elapsed_s = pairs.now[p] - began_s[p]
                if elapsed_s >= num_steps * plain_s[p]:
                    rates[p] = (pairs.num_tokens[p] - began_tokens[p]) / elapsed_s
        return rates

    def _note(self, p: int, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, duration_s: float) -> None:
        """What the router learns of a step: reports with the next heartbeat, verdicts before the next review."""
        pairs = self.pairs
        target_timer, draft_timer = self.timers[p]
        now_s = float(pairs.now[p])
        there = rows.nonzero()[0].tolist()
        target_timer.add(len(there), len(there) + int(drafted.sum()), float(duration_s))
        num_draft_rows = int(pairs.draft_rows[p])
        if num_draft_rows:
            draft_timer.add(num_draft_rows, num_draft_rows, float(pairs.draft_s[p]))
        pending, decided_s, n, m = self.pending[p], self.decided_s[p], drafted.tolist(), accepted.tolist()
        for i in there:
            pending[i].append(Round(n[i], m[i]))
            decided_s[i] = now_s + ONE_WAY_S / 2
        if now_s >= self.reported_s[p] + 1.0:
            self._report(p, now_s)
        if now_s >= self.reviewed_s[p] + 0.25:
            self._tell(p)
            self._review(p, now_s)

    def _tell(self, p: int) -> None:
        controller = self.controllers[p]
        for name, rounds, decided_s in zip(self.names, self.pending[p], self.decided_s[p], strict=True):
            if rounds:
                controller.judged(name, rounds, decided_s)
                rounds.clear()

    def _report(self, p: int, now_s: float) -> None:
        pairs, controller = self.pairs, self.controllers[p]
        self.reported_s[p] = now_s
        count = {"num_sequences": float(len(self.names))}
        hits = {"num_branch_hits": float(pairs.hits[p]), "num_branch_misses": float(pairs.misses[p])}
        controller.reported("T", "target", {**self.timers[p][0].report(), **hits, **count})
        busy_s = self.scenarios[p].target_s(len(self.names))
        controller.echoed("T", ONE_WAY_S + busy_s * self.rng.random())
        if pairs.draft_rows[p]:
            controller.reported("D", "drafter", {**self.timers[p][1].report(), **count})
            controller.echoed("D", ONE_WAY_S + float(pairs.draft_s[p]) * (1 + self.rng.random()))

    def _review(self, p: int, now_s: float) -> None:
        self.reviewed_s[p] = now_s
        changed = self.controllers[p].review(dict.fromkeys(self.names, ("T", "D")), now_s)
        for name, plan in changed.items():
            i = int(name[1:])
            self.num_changes[p] += 1
            self.plans[p][i] = plan
            self.pairs.plan(p, i, plan)
        if changed:
            self.pairs.replanned()


@dataclass(frozen=True)
class Result:
    """Tokens per second at a point; of several runs the mean, and the plans of the first.

    Attributes:
        runs: Auto over the best fixed plan, of each run.
    """

    scenario: Scenario
    auto: float
    best: float
    alone: float
    plan: Plan
    choice: Plan
    num_changes: int
    runs: tuple[float, ...]

    @property
    def over_best(self) -> float:
        return self.auto / self.best

    @property
    def over_alone(self) -> float:
        return self.auto / self.alone


def measure(scenarios: Sequence[Scenario], seeds: Sequence[int] = (0,), num_steps: int = LONG) -> list[Result]:
    """Auto, the best fixed plan and the target alone: the means over a script for each seed."""
    found = zip(*(_measured(scenarios, seed, num_steps) for seed in seeds), strict=True)
    return [
        replace(
            ones[0],
            auto=statistics.mean(one.auto for one in ones),
            best=statistics.mean(one.best for one in ones),
            alone=statistics.mean(one.alone for one in ones),
            runs=tuple(one.over_best for one in ones),
        )
        for ones in found
    ]


def _measured(scenarios: Sequence[Scenario], seed: int, num_steps: int) -> list[Result]:
    """Auto after its warm-up, the best fixed plan, and the target alone, over the same scripts; of one batch size.

    One step in a hundred takes twice as long, so that the figure of a time of 800 steps is uncertain by a half percent.
    Arms that are three percent apart are told apart after hundreds of rounds of each: a short time may be one arm's.
    """
    scripts = [Script(scenario, seed) for scenario in scenarios]
    auto = Auto(scenarios, scripts, 2 + seed)
    rates = auto.run(max(num_steps, 2400 // scenarios[0].batch))
    results = []
    for p, (scenario, (best, plan)) in enumerate(zip(scenarios, best_fixed(scenarios, scripts), strict=True)):
        choice, num_changes, plain = auto.plans[p][0], auto.num_changes[p], alone(scenario)
        rate, most = float(rates[p]), max(best, plain)
        results.append(Result(scenario, rate, most, plain, plan, choice, num_changes, (rate / most,)))
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
    figures = f"auto/best {result.over_best:.3f} ({min(result.runs):.3f} to {max(result.runs):.3f}) "
    figures += f"auto/alone {result.over_alone:.3f} best/alone {result.best / result.alone:.2f}"
    return (
        f"{point}  {figures}  best: {described(result.plan)}; auto: {described(result.choice)} ({result.num_changes})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", default="1,2,4,8,16,32,64")
    parser.add_argument("--all", action="store_true", help="print every point, not the worst alone")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seeds", default="0", help="one script and one run for each")
    parser.add_argument("--steps", type=int, default=LONG, help="target steps after the warm-up")
    arguments = parser.parse_args()
    batches, seeds = ([int(number) for number in text.split(",")] for text in (arguments.batch, arguments.seeds))
    results = []
    for batch in batches:
        results += measure(grid((batch,))[:: arguments.every], seeds, arguments.steps)
    results.sort(key=lambda result: result.over_best)
    for result in results if arguments.all else results[:24]:
        sys.stdout.write(line(result) + "\n")
    low, runs = min(result.over_alone for result in results), [one for result in results for one in result.runs]
    sys.stdout.write(
        f"{len(results)} points: auto/best min {results[0].over_best:.3f}, "
        f"median {results[len(results) // 2].over_best:.3f}; auto/alone min {low:.3f}; "
        f"below .97: {sum(result.over_best < 0.97 for result in results)}, "
        f"below .98: {sum(result.over_alone < 0.98 for result in results)}; "
        f"single runs: min {min(runs):.3f}, below .97: {sum(run < 0.97 for run in runs)} of {len(runs)}\n"
    )


if __name__ == "__main__":
    main()
