"""A pair of workers in virtual time: target steps, draft steps, branches, messages on their way.

It shares no formula with the controller, which sees only what the simulated workers report: noisy step times, verdicts,
hits and misses, echoes of heartbeats. What is simulated follows the real machines: the target takes whatever offer
has arrived at a step's boundary, holds a row back as long as its plan says, and goes on plainly otherwise; the drafter
prepares while the target verifies, from the moment the last verdict has reached it, and what it drafts reaches the
target one way later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.protocol.branches import BRANCHES_IN_ALL
from specdec.protocol.draft_row import offer_spacing
from specdec.protocol.messages import Plan

STEP_S = 0.030
ONE_WAY_S = 0.0015
SCRIPT_LENGTH = 4000
NOT_GUESSED = 9
MOST = 16
NEVER_S = 1e9
GUESS_SHARES = (0.7, 0.2, 0.1)
NOISE, PAUSE_RATE, PAUSE = 0.05, 0.01, 2.0
MEAN_NOISE = math.exp(NOISE**2 / 2) * (1 + PAUSE_RATE * (PAUSE - 1))


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
        self.ranks = rng.permuted(blocks, axis=2).reshape(scenario.batch, SCRIPT_LENGTH).astype(np.int8)
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
        self.wanted, self.rate = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self.fan = np.zeros(shape, dtype=np.int64)
        self.fans = fan_out(0, 0.5)[None]
        self.spacing = np.ones(shape, dtype=np.int64)
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
        self.length[p, i], self.wanted[p, i] = plan.num_draft_tokens, plan.num_branches
        self.fit[p, i] = plan.num_fit_steps
        self.in_turn[p, i], self.wait[p, i] = plan.mode == "in_turn", plan.draft_wait_s
        self.hit[p, i] &= plan.mode == "overlap"
        self.rate[p, i] = round(100 * plan.acceptance_rate)

    def _replan(self) -> None:
        has_branches = (self.wanted > 0) & (self.length > 0) & ~self.in_turn
        share = BRANCHES_IN_ALL // np.maximum(1, has_branches.sum(1))
        self.branches = np.where(has_branches, np.minimum(self.wanted, share[:, None]), 0)
        self._fan_out()
        self.draft_rows = ((1 + self.branches) * (self.length > 0)).sum(1)
        self.half = np.maximum(1, -(-self.length // 2))
        self.is_ahead = (self.length > 0) & ~self.in_turn
        seldom, often = (offer_spacing(self.wait.shape[1], waits=waits) for waits in (True, False))
        self.spacing = np.where(self.wait > 0, seldom, often)
        unbound = np.maximum(self.half, np.minimum(self.spacing - 1, self.length))
        self.first = np.where(self.fit > 0, np.maximum(1, self.fit - 1), unbound)
        self.awaits_deadline = (self.spacing > 1) & (self.fit > 0) & (self.wait == 0) & (self.branches > 0)
        self.mean_draft_s = self.cost_s * np.maximum(1.0, self.draft_rows / 64)

    replanned = _replan

    def _fan_out(self) -> None:
        kinds, self.fan = np.unique(1000 * self.branches + self.rate, return_inverse=True)
        self.fan = self.fan.reshape(self.branches.shape)
        self.fans = np.stack([fan_out(int(kind) // 1000, int(kind) % 1000 / 100) for kind in kinds])

    def _offered(self, at_s: np.ndarray) -> np.ndarray:
        """Length of the draft that has reached the target."""
        since = np.where(self.hit, self.since, self.next_since)
        drafted = np.maximum((at_s[:, None] - ONE_WAY_S - since) / self.draft_s[:, None] + 1e-9, 0).astype(np.int64)
        drafted += np.where(self.hit, self.lead, 0)
        spent = np.where(self.hit, self.spent, 0)
        full = self.length + spent
        # A chain is offered in parts, and so are branches from the step before the deadline on; with many sequences
        # whatever has one.
        in_parts = np.where(self.in_turn, 0, drafted // self.half * self.half)
        later = (drafted - self.first) // self.spacing * self.spacing
        is_branch = (self.hit & (self.branches > 0)) | self.awaits_deadline
        parts = np.where(is_branch, np.where(drafted >= self.first, self.first + later, 0), in_parts)
        sent = np.where(drafted >= full, full, np.minimum(parts, full))
        return np.clip(sent - spent, 0, self.length)

    def _ready(self, offered: np.ndarray) -> np.ndarray:
        """When each row may go on: now, or with the next offer, or when its patience ends."""
        now, spent = self.now[:, None], np.where(self.hit, self.spent, 0)
        since = np.where(self.hit, self.since, self.next_since)
        full = self.length + spent
        is_branch = (self.hit & (self.branches > 0)) | self.awaits_deadline
        first = np.where(is_branch & (self.first > spent), np.minimum(self.first, full), full)
        first = np.where(self.is_ahead & ~is_branch, np.minimum(self.half, full), first)
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
        """Nothing is prepared for the outcomes of a chain before the chain is drafted; rows that wait show it."""
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
        hit = (
            prepares
            & known
            & ((whole & (ranks == 0)) | ((ranks > 0) & (ranks <= self.fans[self.fan, drafted, accepted])))
        )
        # The accepted path is drafted on and on: what the last chain has left is a lead. Both preparations begin where
        # a draft step does, so that the steps between are whole ones, but for the noise of their times.
        gap_s = np.where(self.hit & known, self.next_since - self.since, 0.0)
        num_steps = np.rint(gap_s / draft_s).astype(np.int64)
        left = np.clip(num_steps + self.lead - self.spent - drafted, 0, self.length + 1)
        counted = prepares & known & (self.branches > 0)
        self.hits += (hit & counted).sum(1)
        self.misses += (counted & ~hit).sum(1)
        self.lead = np.where(rows, np.where(self.hit & whole & (ranks == 0), left, 0), self.lead)
        self.hit = np.where(rows, hit, self.hit)
        self.spent = np.where(rows, whole, self.spent)
        self.since = np.where(rows, self.next_since, self.since)
        # A drafter that has something left to draft begins with the next outcome after the step that runs.
        is_busy = self.is_ahead & (end + ONE_WAY_S - self.next_since < (self.length + 1) * draft_s)
        phase_s = np.where(is_busy.any(1), self.rng.random(len(end_s)) * self.draft_s, 0.0)[:, None]
        begin_s = np.maximum(end + ONE_WAY_S + phase_s, np.where(known, 0.0, self.next_since))
        self.next_since = np.where(rows & (self.length > 0), begin_s, self.next_since)

    def _noise(self) -> np.ndarray:
        count = len(self.scenarios)
        return self.rng.lognormal(0.0, NOISE, count) * np.where(self.rng.random(count) < PAUSE_RATE, PAUSE, 1.0)
