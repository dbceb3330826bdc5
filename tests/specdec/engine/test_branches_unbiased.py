"""Rule 9: with branches chosen by outcomes that were sampled, the output still has the target's own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from scipy.stats import chi2
from torch import Tensor

from specdec.engine.heads import HeadDrafter
from specdec.engine.rules import propose, tree_rows, verify
from specdec.protocol import lookup as lookup_module
from specdec.protocol import target as target_module
from specdec.protocol.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.drafts import Draft, remaining_draft
from specdec.protocol.leases import Times
from specdec.protocol.lookup import LookUpOptions
from specdec.protocol.marks import TokenLog
from specdec.protocol.messages import Ack, Candidates, Commit, Inc, Message, Offer, Open, Plan, Verdict
from specdec.protocol.target import TargetMachine
from specdec.sampling.params import SamplingParams, SequenceSpec
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.types import Tokens
from tests.specdec.engine.test_heads import LinearHeads

VOCAB, NUM_TOKENS, DRAFT_STEPS = 6, 12, 3
NUM_DRAWS = (25_000, pytest.param(250_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]))
"""Under the rejection rule; under the coupled one equal tokens are asked for, by the tests of each kind of draft."""
PROMPT = (0,)
PLAN = Plan(num_draft_tokens=2, num_branches=4, acceptance_rate=0.9)


class Chain:
    """A model of order one: logits [VOCAB, VOCAB], by the last token."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def rows(self, groups: Sequence[RowGroup]) -> Tensor:
        return self.logits[[token for group in groups for token in (group.tokens[-1], *group.draft)]]


class Backend(Chain):
    """Both backends, without state."""

    max_model_len = 1000
    sampler = Sampler(VOCAB)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        groups = [RowGroup(job.spec, job.log.tokens, job.draft) for job in jobs]
        trees = {i: tree_rows(groups[i], job.parents) for i, job in enumerate(jobs) if job.parents}
        runs = verify(self.sampler, self.rows(groups), groups, [job.candidates for job in jobs], trees)
        return [self.verification(job, *run[:2]) for job, run in zip(jobs, runs, strict=True)]

    def verification(self, job: VerifyJob, run: tuple[int, ...], num_accepted: int) -> Verification:
        return Verification(Status.DECIDED, run, num_accepted, len(job.draft))

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


class WithHeads(Backend):
    """Two heads, which know little."""

    weights = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(6))
    heads = HeadDrafter(LinearHeads(weights), Sampler(VOCAB), 2)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = super().verify(jobs)
        logs = [[*job.log.tokens, *result.run] for job, result in zip(jobs, results, strict=True)]
        hidden = torch.nn.functional.one_hot(torch.tensor([log[-2] for log in logs]), VOCAB).float()
        drafts = self.heads.drafts(hidden, [(job.spec, log) for job, log in zip(jobs, logs, strict=True)])
        return [replace(result, next_draft=self.told(draft)) for result, draft in zip(results, drafts, strict=True)]

    def told(self, draft: Draft) -> Draft:
        return draft


class WithTrees(WithHeads):
    """The drafts of heads are trees."""

    heads = HeadDrafter(LinearHeads(WithHeads.weights), Sampler(VOCAB), 2, 7)


class HeadsToldWrong(WithHeads):
    """What a token was drawn from is told as if it had been another token's distribution."""

    def told(self, draft: Draft) -> Draft:
        wrong = tuple(Candidates(ids, (*probs[1:], probs[0])) for ids, probs in draft.candidates)
        return draft._replace(candidates=wrong)


class BonusTestedAgain(Backend):
    """After full acceptance it draws the bonus token, takes the branch by it, and gives it the ratio test as well."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self.drawn: dict[tuple[str, int], int] = {}

    def verification(self, job: VerifyJob, run: tuple[int, ...], num_accepted: int) -> Verification:
        if num_accepted == len(job.draft) > 0:
            self.drawn[job.key, len(job.log) + num_accepted] = run[-1]
            run = run[:-1]
        return super().verification(job, run, num_accepted)

    def remaining(self, offer: Offer, log: TokenLog, *, needs_candidates: bool) -> Draft:
        n, drawn = len(log) - offer.mark.length, self.drawn.get((offer.seq, len(log)))
        for i, (outcome, chain) in enumerate(offer.branches):
            if outcome == (n, drawn) and log.has(offer.mark) and len(offer.candidates) > n:
                return Draft((drawn, *chain), (offer.candidates[n], *offer.branch_candidates[i]))
        return remaining_draft(offer, log, needs_candidates=needs_candidates)


class Line:
    """A target, and a drafter that hears of its verdicts a step late, without anybody between them."""

    def __init__(
        self,
        target: Backend,
        draft: Backend,
        acceptance: str,
        seeds: range,
        lookup: LookUpOptions | None = None,
        prediction: Tokens = (),
        num_siblings: int = 0,
    ) -> None:
        self.target = TargetMachine("T", target, Times(lease_s=1e6), lookup=lookup)
        self.drafter = DrafterMachine("D", draft, Times(lease_s=1e6), branches_in_all=1 << 16)
        self.backend = target
        self.logs: dict[str, TokenLog] = {}
        sampling = SamplingParams(acceptance=acceptance)
        plan = structs.replace(PLAN, num_siblings=num_siblings)
        for seed in seeds:
            spec = SequenceSpec(sampling, seed, len(PROMPT), NUM_TOKENS, prediction=prediction)
            opening = Open(str(seed), Inc(0, 0), "R", PROMPT, spec, plan, 1e6)
            self.target.receive(opening, 0.0)
            self.drafter.receive(opening, 0.0)

    def run(self) -> list[list[int]]:
        outputs: dict[str, list[int]] = {}
        while len(self.target._rows):
            self.target.step(0.0)
            verdicts = self.target.take_outbox()["R"]
            for _ in range(DRAFT_STEPS):
                self.drafter.step(0.0)
            for offer in self.drafter.take_outbox().get("R", []):
                self.target.receive(offer, 0.0)
            for verdict in verdicts:
                assert isinstance(verdict, Verdict)
                outputs.setdefault(verdict.seq, []).extend(verdict.tokens)
                self._pass_on(verdict)
        return list(outputs.values())

    def _pass_on(self, verdict: Verdict) -> None:
        seq, inc, length = verdict.seq, verdict.inc, verdict.mark.length
        messages: list[Message] = [Ack(seq, inc, length)]
        self.drafter.receive(Commit(seq, inc, verdict.base, verdict.tokens, verdict.mark), 0.0)
        if verdict.finish is not None:
            for machine in (self.target, self.drafter):
                machine._dropped(machine._rows.drop(seq, inc, 0.0))
        for message in messages:
            self.target.receive(message, 0.0)


def p_value(
    kind: Callable[[Tensor], Backend],
    acceptance: str,
    num_sequences: int,
    lookup: LookUpOptions | None = None,
    prediction: Tokens = (),
    num_siblings: int = 0,
) -> float:
    """Chi-square over all transitions: each token was drawn from the target's row of the one before."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = Backend(logits + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator))
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    num_hits = num_promoted = num_looked_up = num_of_heads = 0
    for start in range(0, num_sequences, 2000):
        seeds = range(start, min(start + 2000, num_sequences))
        line = Line(kind(logits), draft, acceptance, seeds, lookup, prediction, num_siblings)
        outputs = torch.tensor([[*PROMPT, *output] for output in line.run()])
        pairs = torch.stack((outputs[:, :-1].flatten(), outputs[:, 1:].flatten()))
        counts += torch.bincount(pairs[0] * VOCAB + pairs[1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
        num_hits += line.target.counters.num_branch_hits
        num_looked_up += line.target.counters.num_lookup_drafts
        num_of_heads += line.target.counters.num_heads_drafts
        num_promoted += line.drafter.counters.num_promoted
    assert counts.sum() == num_sequences * NUM_TOKENS
    assert min(num_hits, num_promoted) > num_sequences / 2
    assert lookup is None or num_looked_up > num_sequences
    assert num_of_heads > num_sequences / 4 or not isinstance(line.backend, WithHeads)
    expected = counts.sum(1, keepdim=True) * logits.double().softmax(1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, VOCAB * (VOCAB - 1)))


@pytest.mark.parametrize(
    ("acceptance", "num_draws"),
    [
        ("rejection", 25_000),
        ("coupled", 20_000),
        pytest.param("rejection", 250_000, marks=pytest.mark.soak),
    ],
)
def test_output_is_the_targets_in_distribution(acceptance: str, num_draws: int) -> None:
    assert p_value(Backend, acceptance, num_draws // NUM_TOKENS + 1) > 1e-3


@pytest.mark.parametrize("num_draws", NUM_DRAWS)
def test_with_drafts_by_look_up_among_them_it_is_so_as_well(num_draws: int) -> None:
    """A prediction is drafted at every sequence's beginning, and matches of the few kinds of tokens later on."""
    lookup, prediction = LookUpOptions(4), (1, 2, 3, 4, 5, 0, 2, 4)
    assert p_value(Backend, "rejection", num_draws // NUM_TOKENS + 1, lookup, prediction) > 1e-3


@pytest.mark.parametrize("num_draws", NUM_DRAWS)
@pytest.mark.parametrize("kind", [WithHeads, WithTrees])
def test_with_drafts_of_heads_among_them_it_is_so_as_well(kind: Callable[[Tensor], Backend], num_draws: int) -> None:
    assert p_value(kind, "rejection", num_draws // NUM_TOKENS + 1) > 1e-3


@pytest.mark.parametrize("num_draws", NUM_DRAWS)
def test_with_siblings_beside_draft_tokens_it_is_so_as_well(num_draws: int) -> None:
    assert p_value(Backend, "rejection", num_draws // NUM_TOKENS + 1, num_siblings=2) > 1e-3


def test_a_sibling_that_is_kept_too_often_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point mass that is told as less is kept more often than the target says it."""

    def biased(draft: Draft, siblings: Sequence[Tokens]) -> Draft:
        tree, count = beside(draft, siblings), len(draft.tokens)
        told = (Candidates((token, (token + 1) % VOCAB), (0.6, 0.4)) for token in tree.tokens[count:])
        return tree._replace(candidates=(*tree.candidates[:count], *told))

    beside = Draft.beside
    monkeypatch.setattr(Draft, "beside", biased)
    assert p_value(Backend, "rejection", 2_000, num_siblings=2) < 1e-6


def test_heads_that_tell_another_distribution_than_they_drew_from_would_be_found() -> None:
    assert p_value(HeadsToldWrong, "rejection", 2_000) < 1e-6


def test_a_looked_up_token_that_is_kept_too_often_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point mass that is told as less is kept more often than the target says it."""

    def biased(spec: SequenceSpec, tokens: Tokens) -> tuple[Candidates, ...]:
        return tuple(Candidates((token, (token + 1) % VOCAB), (0.6, 0.4)) for token in tokens)

    monkeypatch.setattr(lookup_module, "point_masses", biased)
    assert p_value(Backend, "rejection", 2_000, LookUpOptions(4), (1, 2, 3, 4, 5, 0, 2, 4)) < 1e-6


def test_a_bonus_that_chooses_the_branch_and_is_tested_again_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: Tensor) -> Backend:
        backend = BonusTestedAgain(logits)
        monkeypatch.setattr(target_module, "remaining_draft", backend.remaining)
        return backend

    assert p_value(broken, "rejection", 2_000) < 1e-6
