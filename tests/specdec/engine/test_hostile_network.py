"""Real models behind a network that loses, doubles, delays and reorders, with workers that restart: no token changes.

The protocol itself is tested with scripted tokens, in many more schedules (``tests/specdec/protocol``); here its
rows have caches and recurrent states.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from specdec.core.messages import Plan, PlanUpdate
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.heads import DraftHeads, HeadDrafter
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from specdec.sampling.pipeline import LogitsProcessor, Sampler
from tests.sizes import some
from tests.specdec.engine.pairs import add_noise, collect, make_model, run
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.specdec.protocol.network import Network
from tests.specdec.protocol.world import TIMES
from tests.thorough.engine.test_recurrent import NOISE, make_cases, make_runner, make_service
from tests.thorough.engine.test_recurrent_branches import LENGTHS

NUM_HOSTILE_STEPS = 100
TARGET_PERIOD = 3
ROUTER, TARGET, DRAFTER, INGRESS = "R", "T", "D", "I"


class HostileService:
    """A ``pump`` is a step of time, in which the drafter makes a few of its own; the target is slower.

    Args:
        target: Makes a target's model with its caches, for each of its lives.
        draft: The same for the draft.
        seed: Of everything random.
        processors: Hooks on the logits of both models.
        max_num_batched_tokens: Of both models.
        restart_rate: How likely a worker is to restart in a step; a sequence gives up after several.
        sampler: Makes each of their lives' way from logits to tokens.
        ngram: Of the target; None for none.
        heads: On the target, with how far, and in trees of how many tokens, they draft; None for none.
    """

    def __init__(
        self,
        target: Callable[[], ModelRunner],
        draft: Callable[[], ModelRunner],
        seed: int,
        processors: Sequence[LogitsProcessor] = (),
        max_num_batched_tokens: int = LENGTHS["max_num_batched_tokens"],
        restart_rate: float = 0.05,
        sampler: Callable[[], Sampler] | None = None,
        ngram: NgramOptions | None = None,
        heads: tuple[DraftHeads, int, int] | None = None,
    ) -> None:
        self._heads = heads
        self._ngram = ngram
        self._restart_rate = restart_rate
        self._make_sampler = sampler or partial(Sampler, VOCAB_SIZE, processors)
        self._lengths = {**LENGTHS, "max_num_batched_tokens": max_num_batched_tokens}
        self._rng = random.Random(seed)
        self._net = Network(self._rng)
        self._make = {TARGET: target, DRAFTER: draft}
        self._now = 0
        self.counts: Counter[str] = Counter()
        self._sequences: dict[str, SequenceSpec] = {}
        self._ingress = IngressMachine(INGRESS, TIMES)
        self._router = RouterMachine(ROUTER, self._plan, TIMES)
        self._begin(TARGET)
        self._begin(DRAFTER)
        self._ingress.router_joined(ROUTER, 0)

    def start(self, seq: str, prompt: Iterable[int], spec: SequenceSpec) -> None:
        self._ingress.start(seq, prompt, spec, self._now)

    def pump(self) -> list[TokenDelta]:
        self._now += 1
        if self._now == NUM_HOSTILE_STEPS:
            self._net.calm_down(self._now)
        if self._net.is_hostile:
            self._disturb()
        machines = {INGRESS: self._ingress, ROUTER: self._router, TARGET: self._target, DRAFTER: self._drafter}
        for name, message in self._net.arrivals(self._now):
            machines[name].receive(message, self._now)
        for _ in range(self._rng.randrange(4)):
            self._drafter.step(self._now)
        if self._now % TARGET_PERIOD == 0:
            self._target.step(self._now)
        self._router.step(self._now)
        self._ingress.step(self._now)
        for name, machine in machines.items():
            for peer, messages in machine.take_outbox().items():
                for message in messages:
                    self._net.send(name, peer, message, self._now)
        return self._ingress.take_deliveries()

    def count(self, name: str) -> None:
        """Add up what the present life of a worker has done."""
        if name == DRAFTER:
            self.counts["promoted"] += self._drafter.counters.num_promoted
            return
        gauges = self._target._backend.metrics()
        self.counts["evicted"] += int(gauges["num_evictions"])
        self.counts["reused"] += int(gauges["num_reused_tokens"])
        by_source = self._target.counters.by_source
        self.counts["accepted"] += self._target.counters.num_accepted_tokens
        self.counts["looked up"] += sum(by_source[name].num_accepted_tokens for name in ("ngram", "prediction"))
        self.counts["of heads"] += by_source["heads"].num_accepted_tokens
        self.counts["stale"] += self._target.counters.num_stale_offers

    def _disturb(self) -> None:
        if self._rng.random() < self._restart_rate:
            name = self._rng.choice((TARGET, DRAFTER))
            self.counts[f"{name} restarted"] += 1
            self.count(name)
            self._router.worker_lost(name, self._now)
            self._begin(name)
        if self._rng.random() < 0.1:
            machine = self._rng.choice((self._target, self._drafter))
            for row in machine._sequences:
                update = PlanUpdate(row.seq, row.epoch, self._plan(row.spec))
                self._net.send(ROUTER, machine.name, update, self._now)

    def _begin(self, name: str) -> None:
        runner, sampler = self._make[name](), self._make_sampler()
        if name == TARGET:
            heads = None if self._heads is None else HeadDrafter(self._heads[0], runner, sampler, *self._heads[1:])
            backend = ModelTarget(runner, sampler, **self._lengths, heads=heads)
            self._target = TargetMachine(name, backend, TIMES, ngram=self._ngram)
        else:
            self._drafter = DrafterMachine(name, ModelDrafter(runner, sampler, **self._lengths), TIMES)
        self._router.worker_joined(name, "target" if name == TARGET else "drafter", self._now)

    def _plan(self, spec: SequenceSpec) -> Plan:
        pick = self._rng.choice
        return Plan(
            num_draft_tokens=pick((0, 2, 4, 4)),
            num_branches=pick((0, 4, 8)),
            acceptance_rate=0.5,
            mode=pick(("overlap", "overlap", "sequential")),
            draft_wait_s=pick((0, 0, 4)),
        )


def runner(family: str, noise: float, num_blocks: int = 300, heads: DraftHeads | None = None) -> ModelRunner:
    model = make_model(family) if family == "llama" else make_recurrent(family)
    model = add_noise(model, noise) if noise else model
    return make_runner(model, num_state_slots=16, num_blocks=num_blocks, heads=heads)


MODELS = [
    ("llama", "llama", 0.0),
    ("qwen3_5", "qwen3_5", 0.0),
    ("bamba", "bamba", 0.0),
    ("llama", "llama", 1.0),
    ("qwen3_5", "qwen3_5", 1.0),
    ("llama", "qwen3_5", 1.0),
    ("bamba", "bamba", 1.0),
    ("qwen3_5", "llama", 1.0),
]


@pytest.mark.parametrize(("target", "draft", "temperature"), some(MODELS, 4))
def test_no_token_changes(target: str, draft: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    cases = [replace(case, max_tokens=40) for case in make_cases(sampling)]
    makers = partial(runner, target, 0.0), partial(runner, draft, NOISE)
    wanted, _ = run(make_service(*(make() for make in makers), num_draft_tokens=0), cases)
    counts: Counter[str] = Counter()
    for seed in (1, 2):
        service = HostileService(*makers, seed)
        for output, tokens in zip(collect(service, cases), wanted, strict=True):
            # A sequence gives up if each target that tried it alone was restarted.
            counts["given up"] += output.finish == "error"
            length = len(output.tokens) if output.finish == "error" else len(tokens)
            assert output.tokens == tokens[:length], f"seed {seed}"
        service.count(TARGET)
        service.count(DRAFTER)
        counts += service.counts
    assert counts["given up"] <= 1
    for what in ("promoted", "accepted", "stale", "T restarted", "D restarted"):
        assert counts[what] > 0, f"the schedules are too kind: nothing {what}"
