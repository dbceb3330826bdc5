"""What any target backend must do: decide as our own target decides from the same log and the same draft."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.emulation import Around
from specdec.core.backends import Status, TargetBackend, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import TokenLogprobs
from tests.specdec.engine.margins import MOST_OFF, MOST_SHORT, rule_asked, shortfall

SAMPLINGS = {
    "T0": SamplingParams(temperature=0.0, ignore_eos=True),
    "T1": SamplingParams(temperature=1.0, ignore_eos=True, logprobs=2),
    "mixed": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((17, 2.0), (300, -3.0)),
        min_tokens=8,
        prompt_logprobs=1,
    ),
}


class Shadow(Around):
    """Asks another target the same as soon as the inner one has decided, and compares.

    Args:
        inner: Under test.
        reference: Our own.
        most_rounded: How many decisions may be others by rounding: see :mod:`tests.specdec.engine.margins`.

    Attributes:
        seen: How many jobs ended in each status, and what decisions were like; ``rounded`` counts those that differ.
    """

    def __init__(self, inner: TargetBackend, reference: TargetBackend, most_rounded: int = 0) -> None:
        super().__init__(inner)
        self._reference = reference
        self._most_rounded = most_rounded
        self.seen: Counter[str] = Counter()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step, each decision of it replayed on the other."""
        results = self._inner.verify(jobs)
        assert len(results) == len(jobs)
        for job, result in zip(jobs, results, strict=True):
            self.seen[result.status.value] += 1
            if result.status is Status.DECIDED:
                self._compare(job, result)
        return results

    def release(self, key: str) -> None:
        """In both."""
        self._inner.release(key)
        self._reference.release(key)

    def _compare(self, job: VerifyJob, result: Verification) -> None:
        count = result.num_drafted
        # What a grammar forces is drafted by each backend itself.
        draft = () if result.is_forced and job.source == "" and job.room else job.draft[:count]
        asked = job._replace(draft=draft, room=0 if draft else count)
        with rule_asked() as rule:
            want = decided(self._reference, asked)
        where = f"{job.key} at {len(job.log)}, draft {job.draft}"
        assert (want.status, want.num_drafted) == (Status.DECIDED, count), where
        if (result.run, result.num_accepted) == (want.run, want.num_accepted):
            assert_near(result.logprobs, want.logprobs)
        else:
            where += f": {result.run} for {want.run}"
            assert rule, where
            short = shortfall(*rule[-1], run=result.run, num_accepted=result.num_accepted)
            assert short < MOST_SHORT, f"{where}, which is {short:.1e} away"
            self.seen["rounded"] += 1
            assert self.seen["rounded"] <= self._most_rounded, f"{where}, one too many"
        if want.prompt_logprobs is not None:
            assert result.prompt_logprobs is not None
            assert result.prompt_logprobs[0] is None is want.prompt_logprobs[0]
            assert_near(result.prompt_logprobs[1:], want.prompt_logprobs[1:])
        self.seen["drafted"] += count
        self.seen["accepted"] += result.num_accepted
        self.seen["logprobs"] += len(result.logprobs or ())
        self.seen["prompt_logprobs"] += len(result.prompt_logprobs or ())
        self.seen["cached"] += result.num_cached_tokens
        self.seen["forced"] += result.is_forced
        self.seen[f"drafts of {count}"] += 1


def assert_near(found: Sequence[TokenLogprobs | None] | None, wanted: Sequence[TokenLogprobs | None] | None) -> None:
    """The same tokens, but for ties, and log probabilities as near as rounding leaves them."""
    assert (found is None) == (wanted is None)
    for one, other in zip(found or (), wanted or (), strict=True):
        assert one is not None and other is not None  # noqa: PT018
        assert abs(one.logprob - other.logprob) < MOST_OFF
        for (_, mine), (_, theirs) in zip(one.top, other.top, strict=True):
            assert abs(mine - theirs) < MOST_OFF


def decided(target: TargetBackend, job: VerifyJob) -> Verification:
    """What comes of a job that is given until it is decided."""
    for _ in range(1000):
        result = target.verify([job])[0]
        if result.status in (Status.DECIDED, Status.FAILED):
            return result
    raise AssertionError(f"never decided: {job}")


class Soak:
    """Sequences at random: held back, let go, opened again; drafts right, wrong, and wrong somewhere.

    Args:
        target: Under test.
        reference: Our own, roomy; it also says what right drafts are.
        prompts: Beginnings of sequences.
        vocab_size: Of which wrong tokens are drawn.
        samplings: Parameters of sequences, one of these each.
        most_draft: Longest draft.
        most_rounded: Of decisions: see :class:`Shadow`.
    """

    def __init__(
        self,
        target: TargetBackend,
        reference: TargetBackend,
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        samplings: Sequence[SamplingParams] = tuple(SAMPLINGS.values()),
        most_draft: int = 4,
        most_open: int = 10,
        most_rounded: int = 0,
        seed: int = 1,
    ) -> None:
        self.shadow = Shadow(target, reference, most_rounded)
        self._reference = reference
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._samplings = samplings
        self._most_draft = most_draft
        self._most_open = most_open
        self._rng = random.Random(seed)
        self._open: dict[str, tuple[TokenLog, SequenceSpec]] = {}
        self.num_opened = 0

    def run(self, num_decisions: int) -> Counter[str]:
        """Go on until so many were compared; gives what was seen."""
        rng, seen = self._rng, self.shadow.seen
        while seen["decided"] < num_decisions:
            if len(self._open) < self._most_open and rng.random() < 0.3:
                self._begin()
            keys = sorted((key for key in self._open if rng.random() < 0.7), key=lambda key: self._open[key][1].order)
            if not keys:
                continue
            for key, result in zip(keys, self.shadow.verify([self._job(key) for key in keys]), strict=True):
                log, spec = self._open[key]
                log.extend(result.run)
                if len(log) - spec.output_start > spec.max_tokens - 10 or rng.random() < 0.01:
                    self.shadow.release(key)
                    del self._open[key]
                elif rng.random() < 0.01:
                    self.shadow.release(key)  # the same sequence goes on from its log
                    seen["released"] += 1
        for key in self._open:
            self.shadow.release(key)
        return seen

    def _begin(self) -> None:
        self.num_opened += 1
        prompt = self._rng.choice(self._prompts)
        tokens = [*prompt[: self._rng.randrange(1, len(prompt))], self._rng.randrange(self._vocab_size)]
        sampling = self._rng.choice(self._samplings)
        arrival_s, priority = float(self.num_opened), self.num_opened % 3 - 1
        spec = SequenceSpec(sampling, self.num_opened, len(tokens), 90, (0,), arrival_s, priority)
        self._open[f"s{self.num_opened}"] = TokenLog(tokens), spec

    def _job(self, key: str) -> VerifyJob:
        log, spec = self._open[key]
        draft = [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(self._most_draft + 1))]
        if self._rng.random() < 0.6:
            draft = self._right(log, spec)
            if draft and self._rng.random() < 0.3:
                draft[self._rng.randrange(len(draft))] = self._rng.randrange(self._vocab_size)
        room = self._most_draft if self._rng.random() < 0.5 else 0
        return VerifyJob(key, log, tuple(draft), spec, "chain" if draft else "", room)

    def _right(self, log: TokenLog, spec: SequenceSpec) -> list[int]:
        """What the reference would say next."""
        spec = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=None))
        probe, draft = TokenLog(log.tokens), list[int]()
        for _ in range(self._rng.randrange(1, self._most_draft + 1)):
            run = decided(self._reference, VerifyJob("probe", probe, (), spec)).run
            draft += run
            probe.extend(run)
        self._reference.release("probe")
        return draft


def generate(
    target: TargetBackend,
    prompts: Sequence[Sequence[int]],
    spec_of: Callable[[int], SequenceSpec],
    drafts: Callable[[int, TokenLog], Sequence[int]] = lambda i, log: (),
) -> tuple[list[list[int]], Counter[str]]:
    """All prompts at once, to their ``max_tokens``; gives the outputs, and what was counted."""
    logs, specs = [TokenLog(prompt) for prompt in prompts], [spec_of(i) for i in range(len(prompts))]
    seen: Counter[str] = Counter()
    left = list(range(len(prompts)))
    while left:
        rooms = {i: specs[i].output_start + specs[i].max_tokens - len(logs[i]) - 1 for i in left}
        jobs = [VerifyJob(f"g{i}", logs[i], tuple(drafts(i, logs[i]))[: rooms[i]], specs[i]) for i in left]
        seen["steps"] += 1
        for i, result in zip(list(left), target.verify(jobs), strict=True):
            seen[result.status.value] += 1
            seen["drafted"] += result.num_drafted
            seen["accepted"] += result.num_accepted
            logs[i].extend(result.run)
            if len(logs[i]) >= specs[i].output_start + specs[i].max_tokens:
                target.release(f"g{i}")
                left.remove(i)
    return [list(log.tail(spec.output_start)) for log, spec in zip(logs, specs, strict=True)], seen
