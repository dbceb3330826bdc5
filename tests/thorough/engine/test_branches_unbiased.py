"""With branches over outcomes that were sampled, output has the target's own distribution, and a seed's own tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as joined
from itertools import cycle, pairwise

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.messages import Ack, Commit, Epoch, Open, Plan, Verdict
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine
from specdec.sampling.acceptance import decide, propose
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.sizes import sized

VOCAB, NUM_TOKENS, END = 6, 12, 5
NUM_DRAWS = sized(1_000, 50_000)
PROMPT = (1, 2, 3, 4, 0) * 2
PLAN = Plan(num_draft_tokens=2, num_branches=4, acceptance_rate=0.9)


class Backend:
    """Both backends, of a model of order one, without state: logits [VOCAB, VOCAB], by the last token."""

    max_model_len = 1000
    sampler = Sampler(VOCAB)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def rows(self, groups: Sequence[RowGroup]) -> Tensor:
        return self.logits[[token for group in groups for token in (group.tokens[-1], *group.draft)]]

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        groups = [RowGroup(job.spec, job.log.tokens, job.draft, parents=job.parents) for job in jobs]
        runs = decide(self.sampler, self.rows(groups), groups).runs
        return [
            Verification(Status.DECIDED, run.run, run.num_accepted, len(job.draft))
            for job, run in zip(jobs, runs, strict=True)
        ]

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        groups = [RowGroup(job.spec, job.tokens) for job in jobs]
        count = max(job.num_guesses for job in jobs)
        return [Proposal(Status.DECIDED, *drawn) for drawn in propose(self.sampler, self.rows(groups), groups, count)]

    def rest(self) -> None:
        pass

    def rename(self, key: str, new_key: str) -> None:
        pass

    def release(self, key: str) -> None:
        pass


@dataclass(frozen=True)
class Setup:
    """What drafts there are.

    Attributes:
        draft_steps: Of the drafter for each step of the target, in turn.
        ends: Whether a token ends a text.
        noise: How far the draft's logits are from the target's.
    """

    plan: Plan = PLAN
    draft_steps: tuple[int, ...] = (3,)
    ends: bool = True
    noise: float = 0.3

    def logits(self) -> tuple[Tensor, Tensor]:
        """Of the target and the drafter, each [VOCAB, VOCAB]."""
        generator = torch.Generator().manual_seed(5)
        if not self.ends:
            return self._with_noise(torch.randn(VOCAB, VOCAB, generator=generator), generator)
        logits = 0.3 * torch.randn(VOCAB, VOCAB, generator=generator)
        logits[:, END] += 2.5
        for token, following in pairwise((*range(END), 0)):
            logits[token, following] += 3.0
        return self._with_noise(logits, generator)

    def _with_noise(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return logits, logits + self.noise * torch.randn(VOCAB, VOCAB, generator=generator)

    def spec(self, seed: int) -> SequenceSpec:
        return SequenceSpec(SamplingParams(), seed, len(PROMPT), NUM_TOKENS, (END,) if self.ends else ())


class Line:
    """A target, and a drafter that hears of its verdicts a step late, without anybody between them."""

    def __init__(self, setup: Setup, seeds: range) -> None:
        logits, draft_logits = setup.logits()
        self.target = TargetMachine("T", Backend(logits), Times(lease_s=1e6))
        self.drafter = DrafterMachine("D", Backend(draft_logits), Times(lease_s=1e6), branches_in_all=1 << 16)
        self.draft_steps = cycle(setup.draft_steps)
        for seed in seeds:
            opening = Open(str(seed), Epoch(0, 0), "R", PROMPT, setup.spec(seed), setup.plan, 1e6)
            self.target.receive(opening, 0.0)
            self.drafter.receive(opening, 0.0)

    def run(self) -> dict[int, list[int]]:
        """The output of each seed."""
        outputs: dict[int, list[int]] = {}
        while len(self.target._sequences):
            self.target.step(0.0)
            verdicts = self.target.take_outbox()["R"]
            for _ in range(next(self.draft_steps)):
                self.drafter.step(0.0)
            for offer in self.drafter.take_outbox().get("R", []):
                self.target.receive(offer, 0.0)
            for verdict in verdicts:
                assert isinstance(verdict, Verdict)
                outputs.setdefault(int(verdict.seq), []).extend(verdict.tokens)
                self._pass_on(verdict)
        return outputs

    def _pass_on(self, verdict: Verdict) -> None:
        seq, epoch, length = verdict.seq, verdict.epoch, verdict.prefix_hash.length
        self.drafter.receive(Commit(seq, epoch, verdict.base, verdict.tokens, verdict.prefix_hash), 0.0)
        if verdict.finish is not None:
            self.target._dropped(self.target._sequences.drop(seq, epoch, 0.0))
            self.drafter._dropped(self.drafter._sequences.drop(seq, epoch, 0.0))
        self.target.receive(Ack(seq, epoch, length), 0.0)


def plainly(setup: Setup, seed: int) -> list[int]:
    """The output of a seed without drafts."""
    logits, log = setup.logits()[0], list(PROMPT)
    while len(log) < len(PROMPT) + NUM_TOKENS and not (setup.ends and log[-1] == END):
        log.append(int(Backend.sampler.sample(logits[log[-1:]], [RowGroup(setup.spec(seed), log)])))
    return log[len(PROMPT) :]


AHEAD = Plan(num_draft_tokens=3, num_branches=4, acceptance_rate=0.5)
SETUPS = {
    "branches": Setup(),
    "texts_without_end": Setup(ends=False, noise=0.8),
    "sequential_and_often_late": Setup(plan=Plan(num_draft_tokens=3, mode="sequential"), draft_steps=(2, 3)),
    "ahead_and_uneven": Setup(plan=AHEAD, draft_steps=(0, 3, 6, 1), noise=0.8),
}


@pytest.mark.parametrize("name", SETUPS)
def test_output_is_the_targets_in_distribution_and_the_seeds_own(name: str) -> None:
    """Chi-square over all transitions: each token was drawn from the target's row of the one before."""
    setup, counters, outputs = SETUPS[name], Counter[str](), dict[int, list[int]]()
    while sum(map(len, outputs.values())) < NUM_DRAWS:
        line = Line(setup, range(len(outputs), len(outputs) + 250))
        outputs |= line.run()
        counters.update({key: getattr(line.target.counters, key) for key in ("num_branch_hits", "num_used_offers")})
        counters["num_promoted"] += line.drafter.counters.num_promoted
    assert all(outputs[seed] == plainly(setup, seed) for seed in range(100))
    assert counters["num_used_offers"] > NUM_DRAWS / 50, counters
    assert not setup.plan.num_branches or min(counters["num_branch_hits"], counters["num_promoted"]) > NUM_DRAWS / 50
    pairs = torch.tensor(list(joined.from_iterable(pairwise((PROMPT[-1], *output)) for output in outputs.values()))).T
    counts = torch.bincount(pairs[0] * VOCAB + pairs[1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()
    expected = counts.sum(1, keepdim=True) * setup.logits()[0].double().softmax(1)
    is_possible = expected > 0  # nothing follows what ends a text
    statistic = float(((counts - expected) ** 2 / expected)[is_possible].sum())
    assert chi2.sf(statistic, int(is_possible.any(1).sum()) * (VOCAB - 1)) > 1e-3
