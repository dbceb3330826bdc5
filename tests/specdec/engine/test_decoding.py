"""Steps in which all sequences decode are scheduled with less work than others, and as they would be."""

from __future__ import annotations

import random

import pytest

from specdec.core.backends import Status, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.models.families import VOCAB_SIZE, make_model

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(logprobs=2),
    SamplingParams(logit_bias=((3, 5.0),), min_tokens=20),
)


class Watched(ModelTarget):
    """Notes what each step is, and whether it was scheduled with less work."""

    is_general, num_quick = False, 0

    def _schedule_decoding(self, jobs):
        step = None if self.is_general else super()._schedule_decoding(jobs)
        self.num_quick += step is not None
        return step

    def _schedule(self, jobs):
        step = super()._schedule(jobs)
        self.rows = [(one[0], one.row.tokens, len(one.row.sequence), *one.row[2:], *one[2:]) for one in step]
        self.held = [sorted(map(len, one.row.sequence.tables)) for one in step]
        return step


class World:
    """Sequences with drafts that are sometimes right; some join late, some end early, and one is read anew."""

    def __init__(self, family: str, is_general: bool, seed: int, num_blocks: int) -> None:
        runner = ModelRunner(prepare_model(make_model(family), family), num_blocks=num_blocks, block_size=4)
        sampler = Sampler(VOCAB_SIZE)
        self.target = Watched(runner, sampler, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=8)
        self.target.is_general = is_general
        self.rng = random.Random(seed)
        self.jobs: list[VerifyJob] = []
        self.foreseen: dict[str, tuple[int, ...]] = {}

    def join(self) -> None:
        number, length = len(self.foreseen), self.rng.randint(2, 9)
        spec = SequenceSpec(self.rng.choice(PARAMS), number, length, 50, arrival_s=float(number))
        self.foreseen[f"{number}"] = ()
        self.jobs.append(VerifyJob(f"{number}", TokenLog([(number * 7 + i) % 5 + 3 for i in range(length)]), (), spec))

    def step(self) -> list[Verification]:
        jobs = [job._replace(draft=self._draft(job), source="ngram") for job in self.jobs]
        results = self.target.verify(jobs)
        for job, result in zip(self.jobs, results, strict=True):
            assert result.status in (Status.DECIDED, Status.PREFILLING, Status.WAITING)
            # A text may end before what was decided does.
            run = result.run[: self.rng.choice([1, 9, 9, 9])]
            if run and self.rng.random() < 0.1:  # a log that goes on otherwise than was decided here
                run = tuple((token + 1) % 5 + 3 for token in run)
            job.log.extend(run)
        return results

    def _draft(self, job: VerifyJob) -> tuple[int, ...]:
        room = 60 - len(job.log)
        return tuple(self.rng.choice([3, 4, 5]) for _ in range(self.rng.choice([0, 0, 2, 3])))[: max(0, room)]

    def change(self) -> None:
        """What happens between steps."""
        kind = self.rng.random()
        if (kind < 0.15 and len(self.jobs) < 8) or not self.jobs:
            self.join()
        elif kind < 0.2:
            self.target.release(self.jobs[0].key)
        elif kind < 0.25:
            self.jobs[0] = self.jobs[0]._replace(log=TokenLog(self.jobs[0].log.tokens[:-1]))
        for job in [job for job in self.jobs if len(job.log) > 55]:
            self.target.release(job.key)
            self.jobs.remove(job)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("num_blocks", [80, 26])
def test_steps_and_results_are_those_of_the_general_way(family: str, num_blocks: int) -> None:
    worlds = [World(family, is_general, 7, num_blocks) for is_general in (True, False)]
    for _ in range(40):
        for world in worlds:
            world.change()
        general, quick = [world.step() for world in worlds]
        assert worlds[0].target.rows == worlds[1].target.rows
        assert worlds[0].target.held == worlds[1].target.held
        assert general == quick
    assert worlds[0].target.metrics() == worlds[1].target.metrics()
    assert worlds[0].target.num_quick == 0 < worlds[1].target.num_quick
