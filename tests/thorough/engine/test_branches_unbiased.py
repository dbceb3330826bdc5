"""Rule 9: with branches chosen by outcomes that were sampled, the output still has the target's own distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as joined
from itertools import cycle, pairwise
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace as replace_struct
from scipy.stats import chi2
from torch import Tensor

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.drafts import Draft, DraftChooser, remaining_draft
from specdec.core.log import TokenLog
from specdec.core.messages import DRAFTER, Ack, Candidates, Commit, Epoch, Message, Offer, Open, Plan, Verdict
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens, TokenBuffer
from specdec.core.types import Tokens
from specdec.drafting.heads import HeadDrafter, HeadRow
from specdec.drafting.length.estimates import DraftGains
from specdec.drafting.ngram import NgramOptions
from specdec.engine.pair import PairedTarget
from specdec.models.hidden import AFTER_NORM
from specdec.models.probe import AttentionLayer
from specdec.protocol import target as target_module
from specdec.protocol.draft_sequence import DraftSequence, Path
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import TargetSequence
from specdec.sampling.acceptance import propose, verify
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.sizes import sized
from tests.specdec.engine.test_hostile_network import runner
from tests.thorough.engine.test_heads import LinearHeads

VOCAB, NUM_TOKENS, END = 6, 12, 5
NUM_DRAWS = sized(1_000, 250_000)
"""Under the rejection rule; under the coupled one equal tokens are asked for, by the tests of each kind of draft."""
PROMPT = (1, 2, 3, 4, 0) * 2
PLAN = Plan(num_draft_tokens=2, num_branches=4, acceptance_rate=0.9)
PREDICTION = (1, 2, 3, 4, 0) * 3
"""What the model is likely to say, if it does not end."""


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
        groups = [RowGroup(job.spec, job.log.tokens, job.draft, parents=job.parents) for job in jobs]
        runs = verify(self.sampler, self.rows(groups), groups, [job.candidates for job in jobs])
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
    tree_tokens = 0

    @cached_property
    def heads(self) -> HeadDrafter:
        """They cache nothing, and so make no use of the runner."""
        return HeadDrafter(LinearHeads(self.weights), runner("llama", 0.0), Sampler(VOCAB), 2, self.tree_tokens)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = super().verify(jobs)
        logs = [[*job.log.tokens, *result.run] for job, result in zip(jobs, results, strict=True)]
        hidden = torch.nn.functional.one_hot(torch.tensor([int(log[-2]) for log in logs]), VOCAB).float()
        rows = [
            HeadRow(None, len(log) - 2, [i], log[-1:], job.spec, TokenBuffer(log), 2)
            for i, (job, log) in enumerate(zip(jobs, logs, strict=True))
        ]
        drafts = self.drafted(hidden, rows)
        return [result._replace(next_draft=self.told(draft)) for result, draft in zip(results, drafts, strict=True)]

    def drafted(self, hidden: Tensor, rows: Sequence[HeadRow]) -> list[Draft]:
        return self.heads.drafts([hidden], rows)

    def told(self, draft: Draft) -> Draft:
        return draft


class WithTrees(WithHeads):
    """The drafts of heads are trees."""

    tree_tokens = 7


class RecursiveHeads:
    """A model of order one that drafts by its own tokens, in passes over the cache of which it reads nothing."""

    hidden_layers, num_tokens, num_bytes = (AFTER_NORM,), None, 0
    cache_layers = (AttentionLayer(99, 1, 1, 1, None, torch.float32, torch.device("cpu")),)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, **caches: object) -> Tensor:
        return torch.nn.functional.one_hot(tokens.long(), VOCAB).float()

    def logits(self, features: Tensor, place: int) -> Tensor:
        return features @ WithHeads.weights[0]


class WithRecursiveHeads(WithHeads):
    """Chains of heads that cache; every step reads anew the last token."""

    @cached_property
    def heads(self) -> HeadDrafter:
        """Of another target, whose blocks they lie in."""
        made, heads = runner("llama", 0.0, 6 * 2100, RecursiveHeads()), RecursiveHeads()
        self.runner = made
        return HeadDrafter(heads, made, Sampler(VOCAB), 3, self.tree_tokens)

    def drafted(self, hidden: Tensor, rows: Sequence[HeadRow]) -> list[Draft]:
        heads, sequences = self.heads, [self.runner.new_sequence() for _ in rows]
        for row, sequence in zip(rows, sequences, strict=True):
            assert self.runner.reserve(sequence, len(row.text))
        made = heads.drafts(
            [hidden], [row._replace(sequence=of, num_tokens=3) for row, of in zip(rows, sequences, strict=True)]
        )
        for sequence in sequences:
            self.runner.truncate(sequence, 0)
        return made


class WithRecursiveTrees(WithRecursiveHeads):
    """Trees of them, which grow."""

    tree_tokens = 7


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
        n, drawn = len(log) - offer.prefix_hash.length, self.drawn.get((offer.seq, len(log)))
        for i, (outcome, chain) in enumerate(offer.branches):
            if outcome == (n, drawn) and log.has(offer.prefix_hash) and len(offer.candidates) > n:
                return Draft((drawn, *chain), (offer.candidates[n], *offer.branch_candidates[i]))
        return remaining_draft(offer, log, needs_candidates=needs_candidates)


class AlwaysPaired(Backend):
    """With a draft model in its process, which is all that drafts."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))
        self.pair = PairedTarget(Backend(logits), Backend(logits + 0.5 * noise), 3)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        return self.pair.verify(jobs)

    def release(self, key: str) -> None:
        self.pair.release(key)


@dataclass(frozen=True)
class Setup:
    """What drafts there are, and who chooses among them.

    Attributes:
        kind: The target's backend; one with heads drafts as well.
        draft_steps: Of the drafter for each step of the target, in turn.
        chooses: Whether a chooser compares drafts by what they promise; it learns from all sequences.
        ends: Whether a token ends a text.
        noise: How far the draft's logits are from the target's.
        drafters: Names of those that draft, each with logits of its own, and with steps of its own.
    """

    kind: Callable[[Tensor], Backend] = Backend
    acceptance: Literal["coupled", "rejection"] = "rejection"
    plan: Plan = PLAN
    draft_steps: tuple[int, ...] = (3,)
    ngram: NgramOptions | None = None
    prediction: Tokens = ()
    chooses: bool = False
    ends: bool = True
    noise: float = 0.3
    drafters: tuple[str, ...] = (DRAFTER,)

    def logits(self) -> tuple[Tensor, ...]:
        """Of the target and each drafter, each [VOCAB, VOCAB]."""
        generator = torch.Generator().manual_seed(5)
        if not self.ends:
            return self._with_noise(torch.randn(VOCAB, VOCAB, generator=generator), generator)
        logits = 0.3 * torch.randn(VOCAB, VOCAB, generator=generator)
        logits[:, END] += 2.5
        for token, following in pairwise((*range(END), 0)):
            logits[token, following] += 3.0
        return self._with_noise(logits, generator)

    def _with_noise(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        noise = [torch.randn(VOCAB, VOCAB, generator=generator) for _ in self.drafters]
        return logits, *(logits + self.noise * one for one in noise)


class Line:
    """A target, and drafters that hear of its verdicts a step late, without anybody between them."""

    def __init__(self, setup: Setup, seeds: range, chooser: DraftChooser | None) -> None:
        logits, *draft_logits = setup.logits()
        self.target = TargetMachine("T", setup.kind(logits), Times(lease_s=1e6), ngram=setup.ngram, chooser=chooser)
        self.drafters = {
            name: DrafterMachine(name, Backend(logits), Times(lease_s=1e6), branches_in_all=1 << 16)
            for name, logits in zip(setup.drafters, draft_logits, strict=True)
        }
        self.draft_steps = cycle(setup.draft_steps)
        sampling, eos = SamplingParams(acceptance=setup.acceptance), (END,) if setup.ends else ()
        for seed in seeds:
            spec = SequenceSpec(sampling, seed, len(PROMPT), NUM_TOKENS, eos, prediction=SharedTokens(setup.prediction))
            opening = Open(str(seed), Epoch(0, 0), "R", PROMPT, spec, setup.plan, 1e6)
            self.target.receive(opening, 0.0)
            for name, drafter in self.drafters.items():
                drafter.receive(replace_struct(opening, drafter=name), 0.0)

    def run(self) -> list[list[int]]:
        outputs: dict[str, list[int]] = {}
        while len(self.target._sequences):
            self.target.step(0.0)
            verdicts = self.target.take_outbox()["R"]
            for drafter in self.drafters.values():
                for _ in range(next(self.draft_steps)):
                    drafter.step(0.0)
                for offer in drafter.take_outbox().get("R", []):
                    self.target.receive(offer, 0.0)
            for verdict in verdicts:
                assert isinstance(verdict, Verdict)
                outputs.setdefault(verdict.seq, []).extend(verdict.tokens)
                self._pass_on(verdict)
        return list(outputs.values())

    def _pass_on(self, verdict: Verdict) -> None:
        seq, epoch, length = verdict.seq, verdict.epoch, verdict.prefix_hash.length
        messages: list[Message] = [Ack(seq, epoch, length)]
        for drafter in self.drafters.values():
            drafter.receive(Commit(seq, epoch, verdict.base, verdict.tokens, verdict.prefix_hash), 0.0)
        if verdict.finish is not None:
            self.target._dropped(self.target._sequences.drop(seq, epoch, 0.0))
            for drafter in self.drafters.values():
                drafter._dropped(drafter._sequences.drop(seq, epoch, 0.0))
        for message in messages:
            self.target.receive(message, 0.0)


def p_value(setup: Setup, num_draws: int) -> float:
    """Chi-square over all transitions: each token was drawn from the target's row of the one before."""
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    chooser = DraftGains(dict) if setup.chooses else None
    counters: Counter[str] = Counter()
    start, batch = 0, 250 if num_draws < 10_000 else 2000
    while counts.sum() < num_draws:
        line = Line(setup, range(start, start + batch), chooser)
        start += batch
        pairs = torch.tensor(list(joined.from_iterable(pairwise((PROMPT[-1], *output)) for output in line.run()))).T
        counts += torch.bincount(pairs[0] * VOCAB + pairs[1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
        for name in ("num_branch_hits", "num_used_offers"):
            counters[name] += getattr(line.target.counters, name)
        for source, of_source in line.target.counters.by_source.items():
            counters["found" if source in ("ngram", "prediction") else source] += of_source.num_drafts
        counters["num_promoted"] += sum(drafter.counters.num_promoted for drafter in line.drafters.values())
        for name, of_drafter in line.target.counters.by_drafter.items():
            counters[name] += of_drafter.num_drafts
    if setup.ngram is not None:
        assert counters["found"] > num_draws / 50
    if isinstance(line.target._backend, WithHeads):
        assert counters["heads"] > num_draws / 50
    drafted = "model" if isinstance(line.target._backend, AlwaysPaired) else "num_used_offers"
    assert counters[drafted] > num_draws / 50, counters
    assert not setup.plan.num_branches or min(counters["num_branch_hits"], counters["num_promoted"]) > num_draws / 50
    assert isinstance(line.target._backend, AlwaysPaired) or min(counters[name] for name in setup.drafters) > 50
    expected = counts.sum(1, keepdim=True) * setup.logits()[0].double().softmax(1)
    is_possible = expected > 0  # nothing follows what ends a text
    statistic = float(((counts - expected) ** 2 / expected)[is_possible].sum())
    p = float(chi2.sf(statistic, int(is_possible.any(1).sum()) * (VOCAB - 1)))
    print(f"p = {p:.3g} of {int(counts.sum())} draws; {dict(counters)}")
    return p


AHEAD = Plan(num_draft_tokens=3, num_branches=4, acceptance_rate=0.5)
SETUPS = {
    "branches": Setup(),
    "texts_without_end": Setup(ends=False, noise=0.8),
    "sequential_and_often_late": Setup(plan=Plan(num_draft_tokens=3, mode="sequential"), draft_steps=(2, 3)),
    "prediction": Setup(plan=AHEAD, draft_steps=(6,), ngram=NgramOptions(1), prediction=PREDICTION),
    "look_up": Setup(plan=AHEAD, draft_steps=(6,), ngram=NgramOptions(1)),
    "look_up_or_model": Setup(plan=AHEAD, draft_steps=(6,), ngram=NgramOptions(2), chooses=True, noise=0.8),
    "heads": Setup(WithHeads, draft_steps=(1, 2), ngram=NgramOptions(2)),
    "heads_or_model": Setup(WithHeads, plan=AHEAD, draft_steps=(6,), chooses=True, noise=0.8),
    "paired": Setup(AlwaysPaired, plan=Plan(), draft_steps=(0,)),
    "paired_or_look_up": Setup(AlwaysPaired, plan=Plan(), draft_steps=(0,), ngram=NgramOptions(2)),
    "recursive_heads_or_model": Setup(WithRecursiveHeads, plan=AHEAD, draft_steps=(6,), chooses=True, noise=0.8),
    "recursive_trees_or_model": Setup(WithRecursiveTrees, plan=AHEAD, draft_steps=(6,), chooses=True, noise=0.8),
    "trees_or_model": Setup(WithTrees, plan=AHEAD, draft_steps=(6,), chooses=True, noise=0.8),
    "two_drafters": Setup(plan=AHEAD, draft_steps=(0, 3, 6, 1), noise=0.8, drafters=("a", "b")),
}
"""Where a draft model's drafts and others are both to be had, each is verified often."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETUPS)
def test_output_is_the_targets_in_distribution(name: str) -> None:
    assert p_value(SETUPS[name], NUM_DRAWS) > 1e-3


def test_under_the_coupled_rule_it_is_so_as_well() -> None:
    assert p_value(Setup(acceptance="coupled", ends=False, noise=0.8), 1_000) > 1e-3


@pytest.mark.parametrize("name", sized(["trees_or_model"], ["sequential_and_often_late", "trees_or_model"]))
def test_a_chain_that_ends_with_its_text_would_be_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length, or when it is complete, decides whether it is verified, and depends on what was drawn."""

    def ends_with_text(row: DraftSequence, path: Path) -> bool:
        return bool(path.tokens) and path.tokens[-1] == END

    monkeypatch.setattr(DraftSequence, "_has_ended", ends_with_text)
    assert p_value(SETUPS[name], 9_000) < 1e-6


def test_a_drafter_that_is_chosen_by_what_it_drew_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 18: under the rejection rule no draft decides whose it is."""

    def by_tokens(machine: TargetMachine, row: TargetSequence, drafters: Mapping[str, Any]) -> list[str]:
        return sorted(drafters, key=lambda name: drafters[name][0].tokens)[:1]

    monkeypatch.setattr(TargetMachine, "_ranked", by_tokens)
    assert p_value(replace(SETUPS["two_drafters"], draft_steps=(6,), ends=False), 9_000) < 1e-6


def test_heads_that_tell_another_distribution_than_they_drew_from_would_be_found() -> None:
    assert p_value(replace(SETUPS["heads_or_model"], kind=HeadsToldWrong), 1_000) < 1e-6


def test_a_looked_up_token_that_is_kept_too_often_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point mass that is told as less is kept more often than the target says it."""

    def biased(spec: SequenceSpec, tokens: Tokens) -> tuple[Candidates, ...]:
        return tuple(Candidates((token, (token + 1) % VOCAB), (0.6, 0.4)) for token in tokens)

    monkeypatch.setattr(target_module, "point_masses", biased)
    assert p_value(SETUPS["prediction"], 1_000) < 1e-6


@pytest.mark.whole
def test_a_bonus_that_chooses_the_branch_and_is_tested_again_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: Tensor) -> Backend:
        backend = BonusTestedAgain(logits)
        monkeypatch.setattr(target_module, "remaining_draft", backend.remaining)
        return backend

    assert p_value(Setup(broken, ends=False, noise=0.8), 15_000) < 1e-6
