"""The scheduler over real block accounting, in virtual time and without a model.

As a script it replays a trace of conversations and prints what users would wait:

    python -m tests.specdec.engine.simulator
    python -m tests.specdec.engine.simulator --long-prompt 100000 --num-short 32
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from specdec.cache.blocks import BlockPool, CachedSequence
from specdec.engine.scheduler import Request, ScheduledRow, Scheduler
from specdec.engine.sequences import DECIDED, SequenceStates
from specdec.executor.runner import ModelRunner

LAUNCH_S, TOKEN_S, KEY_S = 6e-3, 30e-6, 2e-9
"""A step's time: about an 8B model on one H200; each token's own, and each key that each token reads."""


class Arrival(NamedTuple):
    """A request of a trace; of ``prompt`` each token counts, of the output only how many tokens it has."""

    arrival_s: float
    prompt: tuple[int, ...]
    num_output_tokens: int
    num_draft_tokens: int = 0
    delay_s: float = 0.0
    """On its way from the ingress, which says when it arrived, to the worker."""

    @property
    def reaches_s(self) -> float:
        return self.arrival_s + self.delay_s


@dataclass
class Running:
    """A request under way."""

    key: str
    arrival: Arrival
    tokens: list[int]
    token_times: list[float] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def num_left(self) -> int:
        return len(self.arrival.prompt) + self.arrival.num_output_tokens - len(self.tokens)

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or self.num_left <= 0


@dataclass(frozen=True)
class Step:
    """What a step had in it, and which sequences got tokens by it."""

    rows: list[ScheduledRow]
    numbers: list[int]
    decided: list[int]
    end_s: float

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new_tokens + row.num_draft_tokens for row in self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def tokens_of(self, number: int) -> int:
        return sum(row.num_new_tokens for row, n in zip(self.rows, self.numbers, strict=True) if n == number)


class Pool:
    """What :class:`SequenceStates` wants of a runner: blocks, and no tensors."""

    states = None
    shares_prefixes = True

    def __init__(self, num_blocks: int, block_size: int, windows: dict[int, int]) -> None:
        self.pool = BlockPool(num_blocks, block_size, windows, lookahead_tokens=8)
        self.reserve, self.fits, self.truncate = self.pool.reserve, self.pool.fits, self.pool.truncate
        self.fork, self.free, self.keep_prefix = self.pool.fork, self.pool.free, self.pool.keep_prefix
        self.find_prefix, self.reuse_prefix = self.pool.find_prefix, self.pool.reuse_prefix

    def new_sequence(self, salt: bytes | None = b"") -> CachedSequence:
        return self.pool.new_sequence(salt)


class Simulator:
    """Runs a trace to its end.

    Args:
        scheduler: Under test.
        num_blocks: Of the cache.
        block_size: Tokens in a block.
        acceptance: How likely a draft token is accepted.
        seed: Of acceptance.
        windows: Blocks for layers with each length of sliding window.
        is_quick: Whether steps in which all decode are chosen as a whole, where they can be.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_blocks: int,
        block_size: int,
        acceptance: float = 0.0,
        seed: int = 0,
        windows: dict[int, int] | None = None,
        is_quick: bool = False,
    ) -> None:
        runner = Pool(num_blocks, block_size, windows or {})
        self.scheduler, self.pool, self.sequences = scheduler, runner.pool, list[Running]()
        self.states = SequenceStates(cast(ModelRunner, runner))
        self.now_s, self._acceptance, self._random = 0.0, acceptance, random.Random(seed)
        self._is_quick, self.num_quick = is_quick, 0

    def run(self, traffic: Sequence[Arrival]) -> Iterator[Step]:
        ordered = sorted(traffic, key=lambda arrival: arrival.arrival_s)
        self.sequences = [Running(str(i), arrival, list(arrival.prompt)) for i, arrival in enumerate(ordered)]
        while any(not sequence.is_done for sequence in self.sequences):
            self.now_s = max(self.now_s, min(s.arrival.reaches_s for s in self.sequences if not s.is_done))
            yield self._step()

    def cancel(self, number: int) -> None:
        self.sequences[number].is_cancelled = True
        self.states.release(str(number))

    def cache_of(self, tokens: dict[str, tuple[int, ...]]) -> SequenceStates:
        """A cache of which these sequences want these tokens."""
        for key, wanted in tokens.items():
            self.states.want(key, list(wanted), 0, b"", (DECIDED, 0, 0.0, key))
        return self.states

    def _step(self) -> Step:
        active = [s for s in self.sequences if not s.is_done and s.arrival.reaches_s <= self.now_s]
        self.states.begin_step()
        requests: list[Request] = []
        for s in active:
            num_held = self.states.want(s.key, s.tokens, 0, b"", (DECIDED, 0, s.arrival.arrival_s, s.key.zfill(9)))
            num_drafted = min(s.arrival.num_draft_tokens, s.num_left - 1)
            requests.append(Request(s.key, len(s.tokens), num_drafted, num_computed_tokens=num_held))
        rows = self._whole(requests)
        if not rows:
            rows = self.scheduler.schedule(requests, self.states)
        num_keys = 0
        for row in rows:
            s = active[row.request]
            sequence = self.states.sequence(s.key)
            assert len(sequence) == row.num_computed_tokens
            assert self.pool.is_reserved(sequence, len(sequence) + row.num_new_tokens + row.num_draft_tokens)
            num_keys += (row.num_new_tokens + row.num_draft_tokens) * len(sequence)
            sequence.tokens.extend(s.tokens[len(sequence) : len(sequence) + row.num_new_tokens])
        step = Step(rows, [int(active[row.request].key) for row in rows], [], 0.0)
        self.now_s += LAUNCH_S + step.num_tokens * TOKEN_S + num_keys * KEY_S
        for row in rows:
            s = active[row.request]
            self.states.keep_prefix(s.key, len(s.tokens))
            if row.num_computed_tokens + row.num_new_tokens == len(s.tokens):
                self._decide(s, row.num_draft_tokens)
                step.decided.append(int(s.key))
        return Step(step.rows, step.numbers, step.decided, self.now_s)

    def _whole(self, requests: Sequence[Request]) -> list[ScheduledRow]:
        """A row for each request, if all decode and the step is chosen as a whole."""
        if not self._is_quick or any(r.num_computed_tokens != r.num_tokens - 1 or r.num_tokens == 1 for r in requests):
            return []
        keys, lengths = [r.key for r in requests], [r.num_tokens + r.num_draft_tokens for r in requests]
        num_draft_tokens = sum(r.num_draft_tokens for r in requests)
        if not self.scheduler.schedule_decoding(keys, lengths, num_draft_tokens, self.states):
            return []
        self.num_quick += 1
        return [ScheduledRow(i, r.num_computed_tokens, 1, r.num_draft_tokens) for i, r in enumerate(requests)]

    def _decide(self, s: Running, num_draft_tokens: int) -> None:
        count = 1
        while count <= num_draft_tokens and self._random.random() < self._acceptance:
            count += 1
        s.tokens += [-1 - int(s.key)] * count
        s.token_times += [self.now_s] * count
        self.states.truncate(s.key, len(self.states.sequence(s.key)))  # gives back what was reserved for drafts
        if s.is_done:
            self.states.release(s.key)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of the sorted values the one at ``percent``, the nearest."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def conversations(count: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals with prompts and answers as long as ShareGPT's are: log-normal, medians 60 and 150 tokens."""
    rng, now_s, traffic = random.Random(seed), 0.0, []
    for i in range(count):
        now_s += rng.expovariate(rate)
        num_prompt, num_output = (
            max(4, min(4000, round(rng.lognormvariate(mu, sigma)))) for mu, sigma in ((4.1, 1.4), (5.0, 1.0))
        )
        traffic.append(Arrival(now_s, tuple(range(i * 10_000, i * 10_000 + num_prompt)), num_output, 4))
    return traffic


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits of a replayed trace, in virtual time.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--long-prompt", type=int, default=0, help="one prompt of so many tokens instead of the trace")
    parser.add_argument("--num-short", type=int, default=32, help="prompts of 500 tokens beside it")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.long_prompt:
        long = Arrival(0.0, tuple(range(args.long_prompt)), 8, 4)
        shorts = [Arrival(0.01, tuple(range(10**6 * i, 10**6 * i + 500)), 100, 4) for i in range(1, 1 + args.num_short)]
        traffic = [long, *shorts]
    else:
        traffic = conversations(args.requests, args.rate, args.seed)
    scheduler = Scheduler(args.max_num_batched_tokens, args.max_num_seqs)
    world = Simulator(scheduler, 40_000, 16, acceptance=0.7, seed=args.seed)
    num_steps = sum(1 for _ in world.run(traffic))
    measured = world.sequences[1:] if args.long_prompt else world.sequences
    first = [s.token_times[0] - s.arrival.arrival_s for s in measured]
    between = [b - a for s in measured for a, b in zip(s.token_times, s.token_times[1:], strict=False) if b > a]
    preempted = f"{world.states.num_evictions} preempted"
    print(f"{len(world.sequences)} requests, {num_steps} steps, {world.now_s:.2f} s, {preempted}")
    for name, values in (("time to first token", first), ("time between steps with tokens", between)):
        print(f"{name}: p50 {percentile(values, 50) * 1e3:.1f} ms, p99 {percentile(values, 99) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
